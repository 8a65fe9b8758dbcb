"""Where the guard's hooks go in SGLang, by version. Read in 0.5.16, 0.5.20 and 0.5.23."""

from __future__ import annotations

import importlib.metadata
import pkgutil

from eyas_contract import EngineFailure
from eyas_contract.engines.sglang import NEWEST, Version, parse_version

OLDEST: Version = (0, 5, 16)
LLAMA = "sglang.srt.models.llama_eagle3"
MLA = "sglang.srt.models.kimi_k25_eagle3"
RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler.__init__"
LOAD_WEIGHTS = (f"{LLAMA}.LlamaForCausalLMEagle3.load_weights", f"{MLA}.Eagle3DeepseekV2ForCausalLM.load_weights")
FORWARD = (f"{LLAMA}.LlamaModel.forward", f"{MLA}.Eagle3MLAModel.forward")
INIT_LM_HEAD = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker.init_lm_head"
LOAD_MODEL = f"{RUNNER}.load_model"
KV_CACHE = f"{RUNNER}.alloc_memory_pool"
GRAPHS = f"{RUNNER}.init_cuda_graphs"
PREFILL = "sglang.srt.speculative.eagle_worker_v2.EagleDraftWorker._draft_extend_for_prefill"
RELOAD = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_disk"
READ_WEIGHTS = "sglang.srt.model_loader.loader.DefaultModelLoader._get_all_weights"

ALWAYS = (SCHEDULER, LOAD_MODEL, KV_CACHE, GRAPHS, READ_WEIGHTS, PREFILL)
GUARDING = (*LOAD_WEIGHTS, *FORWARD, INIT_LM_HEAD, RELOAD)


def require_known_version() -> None:
    """Raise EngineFailure where the installed SGLang is none of those that were read."""
    text = importlib.metadata.version("sglang")
    if not OLDEST <= parse_version(text) <= NEWEST:
        raise EngineFailure("SGLang", f"version {text}", f"{_text(OLDEST)} to {_text(NEWEST)}, which the guard knows",
                            "Serve with one of these, or with an eyas-serve that knows yours.")


def targets(mode: str) -> tuple[str, ...]:
    """What is hooked in a mode of the guard."""
    return ALWAYS if mode == "off" else (*ALWAYS, *GUARDING)


def require_targets(mode: str = "enforce") -> None:
    """Raise EngineFailure where a function that the guard hooks is gone (all named). Imports SGLang's models."""
    absent = [target for target in targets(mode) if resolve(target) is None]
    if absent:
        raise EngineFailure(f"SGLang {importlib.metadata.version('sglang')}", f"no {', '.join(absent)}",
                            "the functions that the guard watches", "Serve with a released SGLang, or report this "
                            "layout.")


def resolve(target: str) -> object | None:
    """The object at a dotted path, or None where it is not."""
    try:
        return pkgutil.resolve_name(target)  # type: ignore[no-any-return]
    except (ImportError, AttributeError):
        return None


def unhooked(mode: str) -> list[str]:
    """Targets that carry no hook: SGLang only logs hooks that it could not apply."""
    return [target for target in targets(mode) if not hasattr(resolve(target), "__wrapped__")]


def _text(version: Version) -> str:
    return ".".join(map(str, version))
