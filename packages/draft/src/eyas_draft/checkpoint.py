"""Checkpoints that survive being killed at any moment: written beside, synced, renamed, named the best where they are;
old ones go last. Each says what it measured, and which was the best when it was written.

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
from eyas_contract.contract import read_json, write_text_atomic
from eyas_draft.sums import require_whole

FOLDER = "checkpoints"
BEST = "best.json"


def save(run: Path, step: int, state: dict[str, Any]) -> Path:
    """Write the checkpoint of `step` as one file."""
    path = place(run, step).with_suffix(".pt")
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    with temporary.open("wb") as sink:
        torch.save(state, sink)
        sink.flush()
        os.fsync(sink.fileno())
    temporary.replace(path)
    return path


def remove_old(run: Path, keep: int) -> None:
    """Remove all but the newest `keep` and the best."""
    best = best_step(run)
    for old in _steps(run)[:-keep] if keep else []:
        if old != best:
            path = find(run, old)
            shutil.rmtree(path) if path.is_dir() else path.unlink()


def latest(run: Path, which: Literal["best", "last"] = "last") -> Path | None:
    """File or folder of the newest or best checkpoint; None where the run has none yet.

    Raises:
        InvalidInput: checkpoints, but not the best: none is named so, or the one that is is gone; see `best_step`.
    """
    steps = _steps(run)
    if not steps:
        return None
    if which == "last":
        return find(run, steps[-1])
    best = best_step(run)
    if best not in steps:
        found = "no such file: no checkpoint was measured" if best is None else f"step {best}, which has no checkpoint"
        raise InvalidInput(str(run / BEST), found, "the step of the best checkpoint, by --checkpoint best",
                           f"Give --checkpoint last (step {steps[-1]}); a run that is continued names its best anew.")
    return find(run, best)


def load(run: Path, which: Literal["best", "last"] = "last") -> dict[str, Any] | None:
    """The newest or best checkpoint's state on the CPU: `step`, `cursor`, `skipped`, `measured` (held-out acceptance
    length, None where nothing is held out), `best` and `best_step` (the best so far) and `model`, by name; of a file
    also `optimizer` and `random`, of a folder `tensors` (see `sharded.tensors_of`). None where there is none yet.

    Raises:
        InvalidInput: see `latest`.
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
        require_whole(path)
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (RuntimeError, EOFError, pickle.UnpicklingError, LookupError, ValueError, TypeError,
            AttributeError) as error:
        raise CorruptFile(str(path), f"unreadable ({error})", "a checkpoint of eyas-draft train",
                          "Delete this file to go on from the checkpoint before it.") from error
    return state


def require(run: Path, which: Literal["best", "last"]) -> dict[str, Any]:
    """As `load`, but InvalidInput where there is no checkpoint at all."""
    state = load(run, which)
    if state is None:
        raise InvalidInput(str(run), "no checkpoint", "a run folder of eyas-draft train",
                           "Train first, or give the run's folder.")
    return state


def mark_best(run: Path, step: int | None, acceptance_length: float = 0.0) -> None:
    """Name the best checkpoint; None where there is none."""
    if step is None:
        (run / BEST).unlink(missing_ok=True)
    else:
        write_text_atomic(run / BEST, json.dumps({"step": step, "acceptance_length": acceptance_length}) + "\n")


def measured(run: Path, state: dict[str, Any]) -> float | None:
    """What a checkpoint measured; of one that does not say (they did not always), what best.json says of it."""
    if "measured" in state:
        return None if state["measured"] is None else float(state["measured"])
    if best_step(run) != state["step"]:
        return None
    return float(json.loads((run / BEST).read_text(encoding="utf-8"))["acceptance_length"])


def settle_best(run: Path, state: dict[str, Any]) -> tuple[int | None, float]:
    """The best checkpoint (step, acceptance length) for a run that goes on from `state`: by the record in it, which
    best.json is made to follow. A kill, a full disk or a hand that removed checkpoints may have left another there.

    Where that one is gone, the checkpoint that is continued takes its place; where it does not say what it measured
    (it was made before checkpoints did), none is the best until the next.
    """
    step, length = state["best_step"] if "best_step" in state else best_step(run), state["best"]
    if step is None or step > state["step"] or step not in _steps(run):
        own = measured(run, state)
        step, length = (None, 0.0) if own is None else (state["step"], own)
    mark_best(run, step, length)
    return step, length


def best_step(run: Path) -> int | None:
    """Step of the best checkpoint so far. Raises InvalidInput where the file that names it names none."""
    path, wanted = run / BEST, "the step of the best checkpoint, by eyas-draft train"
    if not path.is_file():
        return None
    named = read_json(path, wanted)
    if not isinstance(named, dict) or type(named.get("step")) is not int:
        raise InvalidInput(str(path), f"no step ({str(named)[:60]})", wanted,
                           "Give --checkpoint last; a run that is continued names its best anew.")
    return int(named["step"])


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
