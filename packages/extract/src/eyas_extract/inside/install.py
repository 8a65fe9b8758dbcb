"""Registers the capture's hooks with SGLang. Three points, equal in SGLang 0.5.16, 0.5.20 and 0.5.23,
on which it has run."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from eyas_contract import EyasError
from eyas_contract.contract import write_text_atomic
from eyas_extract.inside.captor import CaptureRank
from eyas_extract.protocol import REFUSED, CaptureSettings

LOAD_MODEL = "sglang.srt.model_executor.model_runner.ModelRunner.load_model"
FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
LOGITS = "sglang.srt.layers.logits_processor.LogitsProcessor.forward"

INSTALLED: list[bool] = []
RANKS: dict[int, CaptureRank] = {}  # by id of the model runner: one a process


def install() -> None:
    """Register the hooks, once; SGLang applies them when all plug-ins are loaded. InvalidInput for bad settings."""
    if INSTALLED:
        return  # the entry point was found twice: installed, and on PYTHONPATH
    INSTALLED.append(True)
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    settings = CaptureSettings.from_environment()
    assert settings is not None
    Path(settings.status).mkdir(parents=True, exist_ok=True)
    HookRegistry.register(LOAD_MODEL, _after_load(settings), HookType.AFTER)
    HookRegistry.register(FORWARD, _around_forward, HookType.AROUND)
    HookRegistry.register(LOGITS, _before_logits, HookType.BEFORE)


def _after_load(settings: CaptureSettings) -> Callable[..., None]:
    """AFTER hook of `load_model`, before memory is measured and graphs are captured: the target is made to capture."""

    def hook(result: Any, runner: Any, *args: Any, **kwargs: Any) -> None:
        if getattr(runner, "is_draft_worker", False):
            return
        try:
            RANKS[id(runner)] = CaptureRank(runner, settings)
        except EyasError as error:
            _refuse(settings, error)

    return hook


def _around_forward(original: Callable[..., Any], runner: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> Any:
    """AROUND hook of `ModelRunner.forward`: the batch whose states the logits processor will see."""
    rank = RANKS.get(id(runner))
    if rank is None:
        return original(runner, forward_batch, *args, **kwargs)
    rank.batch = forward_batch
    try:
        return original(runner, forward_batch, *args, **kwargs)
    except EyasError as error:
        _refuse(rank.settings, error)
    finally:
        rank.batch = None


def _before_logits(processor: Any, input_ids: Any, hidden_states: Any, lm_head: Any, metadata: Any,
                   aux_hidden_states: Any = None, *args: Any, **kwargs: Any) -> tuple[Any, Any] | None:
    """BEFORE hook of `LogitsProcessor.forward`: takes the states; the processor itself sees none, and copies none."""
    for rank in RANKS.values():
        if rank.batch is not None:
            rank.take(aux_hidden_states)
    return (processor, input_ids, hidden_states, lm_head, metadata, None, *args), kwargs


def _refuse(settings: CaptureSettings, error: EyasError) -> NoReturn:
    """Tell whoever started the engine; the error then ends the rank, and SGLang its whole tree."""
    write_text_atomic(Path(settings.status) / f"{REFUSED}{os.getpid()}.txt", f"{error}\n")
    raise error
