"""The target: its parts found by name or refused, its stop tokens, its weights on a device."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from eyas_contract import InvalidInput, TargetSpec
from eyas_contract.contract import read_json

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Target:
    """A loaded target.

    Attributes:
        folder: its Hugging Face folder.
        spec: its facts.
        model: the causal language model, in evaluation mode.
        decoder: the part that maps token ids to final states.
        layers: its decoder layers, in order.
        norm: its final norm.
        head: its output projection.
        stop_ids: tokens that end an answer.
    """

    folder: Path
    spec: TargetSpec
    model: Any
    decoder: Any
    layers: Any
    norm: Any
    head: Any
    stop_ids: frozenset[int]


def pick_device(name: str) -> str:
    """`auto` -> `cuda` where there is one, else `cpu`.

    Raises:
        InvalidInput: a CUDA device was named and none can be used.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise InvalidInput("--device", f"{name}, but torch {torch.__version__} sees no CUDA device",
                           "a device that torch can use", "Use --device cpu, or install a CUDA build of torch.")
    return name


def read_spec(folder: Path) -> TargetSpec:
    """A target's facts, once the files that its readers take for objects are some.

    Raises:
        InvalidInput: no target, or a file of its that cannot be read.
    """
    for name in ("tokenizer_config.json", "generation_config.json"):
        _settings(folder / name)
    return TargetSpec.from_folder(folder)


def _settings(path: Path) -> dict[str, Any]:
    """A JSON object of the target's folder; empty where there is no such file."""
    if not path.is_file():
        return {}
    wanted = "a JSON object, as Hugging Face writes it, by eyas-extract"
    value = read_json(path, wanted)
    if not isinstance(value, dict):
        raise InvalidInput(str(path), f"a JSON {type(value).__name__}", wanted, "Restore the file.")
    return value


def stop_ids(folder: Path) -> frozenset[int]:
    """`eos_token_id` (one or several) of `generation_config.json`, else of `config.json`.

    Raises:
        InvalidInput: one of the files is no JSON object, or holds something else under that name.
    """
    for name in ("generation_config.json", "config.json"):
        value = _settings(folder / name).get("eos_token_id")
        if value is not None:
            ids = value if isinstance(value, list) else [value]
            if not all(type(each) is int for each in ids):
                raise InvalidInput(str(folder / name), f"eos_token_id {value!r:.60}", "one token id or several, by "
                                   "eyas-extract", "Correct the file.")
            return frozenset(ids)
    return frozenset()


def positions(spec: TargetSpec) -> int:
    """Most tokens that the target has positions for; 0 where its config does not say.

    A rope's `factor` counts where the config still has the unscaled number, which is how SGLang tells.
    Source: `get_context_length`, sglang/srt/utils/hf_transformers/common.py.
    """
    scaling = dict(spec.rope.scaling)
    factor = scaling.get("factor", 1)
    whole = spec.rope.type == "llama3" or "original_max_position_embeddings" in scaling
    if whole or not isinstance(factor, int | float):
        factor = 1
    return int(factor * spec.max_position_embeddings)


def load_target(folder: Path, device: str, dtype: str = "auto") -> Target:
    """Load a target's weights and find its parts.

    Args:
        dtype: `auto` for that of the weights, or a name of DTYPES.

    Raises:
        InvalidInput: not a model folder, or a model class whose parts are not where Hugging Face puts them (all named).
    """
    spec = read_spec(folder)
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES.get(dtype, dtype)).to(device).eval()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise InvalidInput(str(folder), f"weights that do not load ({error})", "a causal language model",
                           "Check the folder, and that transformers knows this architecture.") from error
    finally:
        transformers_logging.enable_progress_bar()
    decoder = model.get_decoder()
    parts = {"decoder.layers": getattr(decoder, "layers", None), "decoder.norm": getattr(decoder, "norm", None),
             "output embeddings": model.get_output_embeddings()}
    faults = [f"no {name}" for name, part in parts.items() if part is None]
    if parts["decoder.layers"] is not None and len(parts["decoder.layers"]) != spec.num_layers:
        faults.append(f"{len(parts['decoder.layers'])} decoder layers, config.json says {spec.num_layers}")
    if faults:
        raise InvalidInput(f"{type(model).__name__} of {folder}", "; ".join(faults),
                           "a decoder with `layers` and `norm`, and a head, by eyas-extract",
                           "This model class cannot be captured through Hugging Face.")
    return Target(folder, spec, model, decoder, decoder.layers, decoder.norm, model.get_output_embeddings(),
                  stop_ids(folder))
