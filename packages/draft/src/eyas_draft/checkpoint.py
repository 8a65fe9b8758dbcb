"""Checkpoints that survive being killed at any moment: written beside, synced, renamed; old ones go last.

One process writes a file `step-N.pt`; several write a folder `step-N` together (`sharded.py`). Either can be continued
by any number of processes, and exported.
"""

from __future__ import annotations

import json
import os
import pickle
import re
import shutil
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from eyas_contract import CorruptFile, InvalidInput
from eyas_contract.contract import write_text_atomic

FOLDER = "checkpoints"
BEST = "best.json"


def save(run: Path, step: int, state: dict[str, Any], *, keep: int) -> Path:
    """Write the checkpoint of `step` as one file, then remove old ones."""
    path = place(run, step).with_suffix(".pt")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as sink:
        torch.save(state, sink)
        sink.flush()
        os.fsync(sink.fileno())
    temporary.replace(path)
    remove_old(run, keep)
    return path


def remove_old(run: Path, keep: int) -> None:
    """Remove all but the newest `keep` and the best."""
    best = best_step(run)
    for old in _steps(run)[:-keep] if keep else []:
        if old != best:
            path = find(run, old)
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def latest(run: Path, which: Literal["best", "last"] = "last") -> Path | None:
    """File or folder of the newest or best checkpoint; None where the run has none yet."""
    steps = _steps(run)
    if not steps:
        return None
    best = best_step(run)
    return find(run, best if which == "best" and best in steps else steps[-1])


def load(run: Path, which: Literal["best", "last"] = "last") -> dict[str, Any] | None:
    """The newest or best checkpoint's state on the CPU: `step`, `cursor`, `best`, `skipped` and `model`, by name; of a
    file also `optimizer` and `random`, of a folder `tensors` (see `sharded.tensors_of`). None where there is none yet.

    Raises:
        CorruptFile: a checkpoint that cannot be read.
    """
    path = latest(run, which)
    if path is None:
        return None
    if path.is_dir():
        from eyas_draft.sharded import read_plain, read_whole
        tensors: dict[str, Tensor] = read_whole(path)
        weights = {name.removeprefix("model."): value for name, value in tensors.items() if name.startswith("model.")}
        return {**read_plain(path), "model": weights, "tensors": tensors}
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


def place(run: Path, step: int) -> Path:
    """Path of a step's checkpoint, without a suffix: the folder that several processes write."""
    return run / FOLDER / f"step-{step:08d}"


def find(run: Path, step: int) -> Path:
    """The file or folder that holds a step."""
    folder = place(run, step)
    return folder if folder.is_dir() else folder.with_suffix(".pt")


def _steps(run: Path) -> list[int]:
    names = (run / FOLDER).glob("step-*") if (run / FOLDER).is_dir() else ()
    return sorted({int(match[1]) for name in names if (match := re.fullmatch(r"step-(\d+)(\.pt)?", name.name))})
