"""Checkpoints that survive being killed at any moment: written beside, synced, renamed; old ones go last."""

from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path
from typing import Any, Literal

import torch

from eyas_contract import CorruptFile, InvalidInput
from eyas_contract.contract import write_text_atomic

FOLDER = "checkpoints"
BEST = "best.json"


def save(run: Path, step: int, state: dict[str, Any], *, keep: int) -> Path:
    """Write the checkpoint of `step`, then remove all but the newest `keep` and the best."""
    folder = run / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"step-{step:08d}.pt"
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as sink:
        torch.save(state, sink)
        sink.flush()
        os.fsync(sink.fileno())
    temporary.replace(path)
    best = best_step(run)
    for old in _steps(run)[:-keep] if keep else []:
        if old != best:
            _path(run, old).unlink()
    return path


def load(run: Path, which: Literal["best", "last"] = "last") -> dict[str, Any] | None:
    """The newest or best checkpoint's state on the CPU; None where the run has none yet.

    Raises:
        CorruptFile: a checkpoint that cannot be read.
    """
    steps = _steps(run)
    if not steps:
        return None
    best = best_step(run)
    step = best if which == "best" and best in steps else steps[-1]
    assert step is not None
    path = _path(run, step)
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError, KeyError) as error:
        raise CorruptFile(str(path), f"unreadable ({error})", "a checkpoint of eyas-draft train",
                          "Delete this file to go on from the checkpoint before it.") from error
    return state


def require(run: Path, which: Literal["best", "last"]) -> dict[str, Any]:
    """As `load`, but InvalidInput where there is no checkpoint."""
    state = load(run, which)
    if state is None:
        raise InvalidInput(str(run), "no checkpoint", "a run folder of eyas-draft train",
                           "Train first, or give the run's folder.")
    return state


def mark_best(run: Path, step: int, acceptance_length: float) -> None:
    """Name the best checkpoint."""
    write_text_atomic(run / BEST, json.dumps({"step": step, "acceptance_length": acceptance_length}) + "\n")


def best_step(run: Path) -> int | None:
    """Step of the best checkpoint so far."""
    path = run / BEST
    return int(json.loads(path.read_text(encoding="utf-8"))["step"]) if path.is_file() else None


def _steps(run: Path) -> list[int]:
    names = ((run / FOLDER).glob("step-*.pt")) if (run / FOLDER).is_dir() else ()
    return sorted(int(match[1]) for name in names if (match := re.fullmatch(r"step-(\d+)\.pt", name.name)))


def _path(run: Path, step: int) -> Path:
    return run / FOLDER / f"step-{step:08d}.pt"
