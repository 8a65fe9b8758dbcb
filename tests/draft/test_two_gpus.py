"""Training on two GPUs by NCCL, the whole draft in each or spread: one loss curve, whatever continues whatever."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from eyas_draft.metrics import read_rows

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="fewer than two GPUs")

WHOLE, SPREAD = "2 processes, each with the whole draft, on fixed shapes", "2 processes, the draft spread over them"
FIRST, CURVE = 1e-3, 2e-2  # relative differences of losses in bf16: before any update, and of all steps
HALF = 6  # the step to go on from


def train(store: Path, target: Path, out: Path, processes: int, shapes: str) -> str:
    """Train to the end, or go on; returns what the run said."""
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)] if processes else []
    done = subprocess.run(
        [sys.executable, *launch, "-m", "eyas_draft.cli", "train", "--store", store, "--target", target, "--out", out,
         "--device", "cuda", "--vocab-size", "64", "--ttt-steps", "3", "--tokens-per-batch", "150", "--accumulate", "4",
         "--max-steps", str(2 * HALF), "--epochs", "100", "--lr", "2e-3", "--checkpoint-every", str(HALF),
         "--keep", "9", "--shapes", shapes], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stderr


def require_same(out: Path, wanted: Path) -> None:
    """Compare two runs' loss curves."""
    found, expected = curve(out), curve(wanted)
    assert sorted(found) == list(range(1, 2 * HALF + 1))
    assert found[1] == pytest.approx(expected[1], rel=FIRST)
    assert found == pytest.approx(expected, rel=CURVE)


def curve(out: Path) -> dict[int, float]:
    return {row["step"]: row["loss"] for row in read_rows(out / "metrics.jsonl") if "loss" in row}


def half_of(run: Path, copy: Path, shapes: str) -> Path:
    """A copy of a run as it was at its first checkpoint, had it been asked for such shapes."""
    shutil.copytree(run, copy)
    (copy / "best.json").unlink(missing_ok=True)
    settings = json.loads((copy / "config.resolved.json").read_text())
    (copy / "config.resolved.json").write_text(json.dumps({**settings, "shapes": shapes}))
    later, = (path for path in (copy / "checkpoints").iterdir() if int(path.stem.removeprefix("step-")) > HALF)
    shutil.rmtree(later) if later.is_dir() else later.unlink()
    return copy


def test_small_drafts_are_whole_in_every_process_and_go_on_in_either_way(store: Path, tiny_target: Path,
                                                                         tmp_path: Path) -> None:
    one, whole, spread = (tmp_path / name for name in ("one", "whole", "spread"))
    train(store, tiny_target, one, 0, "auto")
    assert WHOLE in train(store, tiny_target, whole, 2, "auto")
    assert SPREAD in train(store, tiny_target, spread, 2, "ragged")
    for out, suffix in ((whole, ".pt"), (spread, "")):
        assert {path.suffix for path in (out / "checkpoints").iterdir()} == {suffix}
        require_same(out, one)
    for run, processes, shapes in ((whole, 0, "auto"), (one, 2, "auto"), (spread, 2, "auto"), (whole, 2, "ragged")):
        out = half_of(run, tmp_path / f"{run.name}-{processes}-{shapes}", shapes)
        train(store, tiny_target, out, processes, shapes)
        require_same(out, one)
