"""Runs in SGLang's own interpreter: asks its classes what eyas's tables claim. JSON on stdin, JSON on stdout.

The draft classes are built on the CPU and fed by their own `load_weights`; the targets' hooks run on a light stand-in
for `self`. Nothing is forwarded, so the rotary kernel that a CPU lacks is never needed.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import json
import pkgutil
import re
import sys
import tempfile
import types
import warnings
from pathlib import Path
from typing import Any

import torch


def prepare() -> None:
    """Make SGLang's model files importable and its process groups exist, on a CPU without its kernels."""
    warnings.simplefilter("ignore")
    for name in ("nms", "qnms"):
        torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    absent = types.ModuleType("vllm._custom_ops")
    absent.rotary_embedding = None  # type: ignore[attr-defined]
    sys.modules.setdefault("vllm", types.ModuleType("vllm"))
    sys.modules.setdefault("vllm._custom_ops", absent)
    from sglang.srt import distributed, server_args
    folder = Path(tempfile.mkdtemp())
    distributed.init_distributed_environment(world_size=1, rank=0, local_rank=0, backend="gloo",
                                             distributed_init_method=f"file://{folder / 'store'}")
    distributed.initialize_model_parallel(tensor_model_parallel_size=1)
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 64, "vocab_size": 256,
              "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    (folder / "config.json").write_text(json.dumps(config))
    server_args.set_global_server_args_for_scheduler(
        server_args.ServerArgs(model_path=str(folder), device="cpu", skip_tokenizer_init=True))


def load(kind: str, config: dict[str, Any], tensors: dict[str, list[Any]]) -> dict[str, Any]:
    """Build the draft class and load ones under the given names: which were taken, which parameters stayed empty."""
    from sglang.srt.models import kimi_k25_eagle3, llama_eagle3
    from transformers import DeepseekV3Config, LlamaConfig
    classes = {"llama": (LlamaConfig, llama_eagle3.LlamaForCausalLMEagle3),
               "mla": (DeepseekV3Config, kimi_k25_eagle3.Eagle3DeepseekV2ForCausalLM)}
    config_class, model_class = classes[kind]
    try:
        model = model_class(config_class(**config))
    except (ValueError, AttributeError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    parameters = dict(model.named_parameters())
    for parameter in parameters.values():
        parameter.data.fill_(float("nan"))
    taken: dict[str, bool] = {}

    def state() -> tuple[int, bool]:
        return sum(int(p.isnan().sum()) for p in parameters.values()), model.hot_token_id is not None

    def feed() -> Any:
        for name, (dtype, shape) in tensors.items():
            before = state()
            yield name, torch.zeros(shape, dtype=torch.long) if dtype == "I64" else torch.ones(shape)
            taken[name] = state() != before

    try:
        model.load_weights(feed())
    except (AssertionError, RuntimeError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}"}
    unfilled = sorted(name for name, p in parameters.items() if p.isnan().any())
    return {"taken": taken, "unfilled": unfilled, "head_from_target": bool(model.load_lm_head_from_target)}


def entry_classes() -> tuple[dict[str, Any], dict[str, str]]:
    """Every registered model class whose file can be imported here, and the files that cannot (kernels, packages)."""
    import sglang.srt.models as package
    found: dict[str, Any] = {}
    absent: dict[str, str] = {}
    for module in pkgutil.iter_modules(package.__path__):
        try:
            loaded = importlib.import_module(f"{package.__name__}.{module.name}")
        except (ImportError, RuntimeError, OSError, AttributeError) as error:
            absent[module.name] = f"{type(error).__name__}: {error}"[:200]
            continue
        entries = getattr(loaded, "EntryClass", [])
        found |= {entry.__name__: entry for entry in (entries if isinstance(entries, list | tuple) else [entries])}
    return found, absent


@functools.cache
def hook_source(method: Any) -> str:
    """Source text of a hook, looked up once: `inspect` parses the whole file each time."""
    return inspect.getsource(method)


def stand_in(cls: Any, layers: int, classes: dict[str, Any]) -> Any:
    """An object with what the hooks touch: config, pipeline rank, a model with layers, a language model beneath."""
    text = types.SimpleNamespace(num_hidden_layers=layers)
    config = types.SimpleNamespace(num_hidden_layers=layers, text_config=text)
    model = types.SimpleNamespace(layers=[types.SimpleNamespace() for _ in range(layers)], layers_to_capture=[])
    own = types.SimpleNamespace(config=config, pp_group=types.SimpleNamespace(is_last_rank=True), model=model)

    def inner(chosen: list[int]) -> None:
        model.layers_to_capture = list(chosen)
    source = hook_source(cls.set_eagle3_layers_to_capture)
    if "self.model.set_eagle3_layers_to_capture(" in source and "hasattr(self.model" not in source:
        model.set_eagle3_layers_to_capture = inner
    beneath = {"KimiK25ForConditionalGeneration": "DeepseekV3ForCausalLM",
               "Gemma3ForConditionalGeneration": "Gemma3ForCausalLM",
               "Llama4ForConditionalGeneration": "Llama4ForCausalLM"}.get(cls.__name__)
    if beneath:
        text_class = classes[beneath]
        own.language_model = types.SimpleNamespace(config=config, pp_group=own.pp_group, model=model)
        own.language_model.set_eagle3_layers_to_capture = types.MethodType(
            text_class.set_eagle3_layers_to_capture, own.language_model)
    else:
        own.language_model = model  # gemma4 sets the list on it
    return own


def hooks(cases: list[dict[str, Any]]) -> dict[str, Any]:
    """Boundaries that each class captures for each list of ids, and whether its layers were marked."""
    classes, absent = entry_classes()
    answers: list[dict[str, Any]] = []
    for case in cases:
        cls = classes.get(case["architecture"])
        if cls is None:
            continue
        answer = dict(case, hook=hasattr(cls, "set_eagle3_layers_to_capture"))
        if answer["hook"] and case["layers"]:
            own = stand_in(cls, case["layers"], classes)
            cls.set_eagle3_layers_to_capture(own, case["ids"])
            answer["boundaries"] = own.model.layers_to_capture
            answer["marked"] = any(getattr(layer, "_is_layer_to_capture", False) for layer in own.model.layers)
        answers.append(answer)
    return {"classes": sorted(classes), "absent": absent, "answers": answers}


def backends() -> dict[str, Any]:
    """Names in the fixed map of draft backends, those that page trees, and the default numbers."""
    from sglang.srt.arg_groups import speculative_hook
    from sglang.srt.speculative import draft_utils
    text = inspect.getsource(speculative_hook)
    paged = re.search(r"_PAGE_TREE_SPEC_BACKENDS = \(([^)]*)\)", text)
    assert paged
    return {"draft": sorted(set(re.findall(r'"(\w+)": self\._create_\w+_decode_backend',
                                           inspect.getsource(draft_utils)))),
            "paged": sorted(re.findall(r'"(\w+)"', paged[1]))}


def main() -> None:
    request = json.load(sys.stdin)
    prepare()
    answer = {"drafts": [load(**draft) for draft in request["drafts"]], "hooks": hooks(request["hooks"]),
              "backends": backends()}
    import sglang
    answer["version"] = sglang.__version__
    sys.stdout.write("\nANSWER" + json.dumps(answer) + "\n")


if __name__ == "__main__":
    main()
