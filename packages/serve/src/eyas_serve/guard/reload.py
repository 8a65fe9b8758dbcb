"""Weights exchanged at run time (`POST /update_weights_from_disk`): only whole ones, and only where they belong.

SGLang offers one folder to the target and then to the draft, in the same loaders that pass over unknown names; what
fails half-way is "rolled back" from the very folder that failed. So a folder is judged before anything is written, the
draft's weights go to the draft alone, the target's to the target alone, and a refusal leaves the server as it was.

Source: `update_weights_from_disk` in SGLang's `model_executor/model_runner_components/weight_updater.py` and
`managers/scheduler_components/weight_updater.py` (0.5.16 to 0.5.23).
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable
from pathlib import Path
from typing import Any

from eyas_contract import EyasError
from eyas_contract.engines import check, render, verdict
from eyas_contract.engines.sglang import DRAFT_CLASSES
from eyas_contract.target import read_config
from eyas_serve.guard.state import GUARD

FREE = ("dtype", "torch_dtype", "transformers_version", "_name_or_path")
"""Config keys that may differ between a running draft and the weights that replace its own."""


def guard_reload(original: Callable[..., Any], updater: Any, model_path: str, *args: Any, **kwargs: Any) -> Any:
    """AROUND hook of `WeightUpdater.update_weights_from_disk`; returns its (success, message)."""
    model, folder = _model(updater), Path(str(model_path))
    if GUARD.draft is None or not folder.is_dir():
        return original(updater, model_path, *args, **kwargs)
    into_draft = type(model).__name__ in DRAFT_CLASSES.values()
    try:
        config = read_config(folder)
        of_draft = str((config.get("architectures") or [""])[0]) in DRAFT_CLASSES.values()
        if of_draft != into_draft:
            keeps, holds = ("draft", "target") if into_draft else ("target", "draft")
            return True, f"eyas guard: the {keeps} keeps its weights, for {folder} holds a {holds}'s"
        faults = _faults(folder, config) if into_draft else ""
    except EyasError as error:
        faults = str(error)
    if faults:
        return False, f"eyas guard: nothing was changed. {faults}"
    try:
        success, message = original(updater, model_path, *args, **kwargs)
    except EyasError as error:  # raised by the audit of weights, in SGLang's own attempt to roll back
        return False, f"eyas guard: the draft's weights are now partly changed; restart the server. {error}"
    if success and into_draft:
        _renew_map(model)
        GUARD.draft = folder
    return success, message


def _model(updater: Any) -> Any:
    get = getattr(updater, "get_model", None)
    return get() if get is not None else updater.model


def _faults(folder: Path, config: dict[str, Any]) -> str:
    """Why a draft's folder cannot replace the running draft's weights; empty where it can."""
    assert GUARD.draft is not None
    running = read_config(GUARD.draft)
    other = [f"{key} {config.get(key)!r}, running {running.get(key)!r}" for key in sorted(set(config) | set(running))
             if key not in FREE and config.get(key) != running.get(key)]
    if other:
        return f"{folder}/config.json is not that of the running draft: {'; '.join(other)[:800]}. Restart with it"
    findings = [finding for finding in check(folder, GUARD.target, "sglang", importlib.metadata.version("sglang"))
                if finding.severity == "error"]
    return render(findings) if verdict(findings) == "fail" else ""


def _renew_map(model: Any) -> None:
    """SGLang's worker keeps a copy of the vocabulary map, made at start: renew it in place, as graphs refer to it."""
    held, new = getattr(GUARD.worker, "hot_token_id", None), model.hot_token_id
    if held is not None and new is not None:
        held.copy_(new.to(held.device))
