"""A run killed with SIGKILL at random moments ends bit for bit like one left alone."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from eyas_contract import CorruptFile, InvalidInput
from eyas_draft import checkpoint
from eyas_draft.config import TrainConfig
from eyas_draft.metrics import MetricsLog
from eyas_draft.train import Trainer, learning_rate

FLAGS = {"vocab_size": 64, "epochs": 6, "tokens_per_batch": 256, "accumulate": 2, "ttt_steps": 3,
         "precision": "fp32", "holdout": 0.05, "checkpoint_every": 5, "keep": 2}


def config(store: Path, target: Path, out: Path, **changes: object) -> TrainConfig:
    return TrainConfig(store, target, out, **{**FLAGS, **changes})  # type: ignore[arg-type]


def flags(settings: TrainConfig) -> list[str]:
    words = ["--store", str(settings.store), "--target", str(settings.target), "--out", str(settings.out)]
    for name, value in FLAGS.items():
        words += [f"--{name.replace('_', '-')}", str(value)]
    return words


@pytest.fixture(scope="module")
def undisturbed(store: Path, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run. Read-only."""
    out = tmp_path_factory.mktemp("runs") / "undisturbed"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, "-m", "eyas_draft.cli", "train", *flags(config(store, tiny_target, out))],
                   check=True, env=environment, capture_output=True)
    return out


def lines(run: Path) -> list[dict[str, object]]:
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        row.pop("seconds", None)
        row.pop("wait", None)
    return rows


def test_killed_runs_end_bit_for_bit_alike(undisturbed: Path, store: Path, tiny_target: Path, tmp_path: Path) -> None:
    out = tmp_path / "killed"
    command = [sys.executable, "-m", "eyas_draft.cli", "train", *flags(config(store, tiny_target, out))]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    rng, kills = random.Random(11), 0
    while True:
        child = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        if kills < 2:
            seen = len(list((out / "metrics.jsonl").read_text().splitlines())) if kills else 0
            metrics = out / "metrics.jsonl"
            deadline = time.monotonic() + 120
            while child.poll() is None and time.monotonic() < deadline:
                if metrics.is_file() and abs(len(metrics.read_text().splitlines()) - seen) > rng.randint(2, 12):
                    break
                time.sleep(rng.uniform(0.005, 0.03))
            child.send_signal(signal.SIGKILL)
            child.wait()
            kills += 1
            continue
        assert child.wait() == 0
        break
    mine, theirs = checkpoint.require(out, "last"), checkpoint.require(undisturbed, "last")
    assert mine["step"] == theirs["step"] > 20
    for name, value in theirs["model"].items():
        assert torch.equal(mine["model"][name], value), name
    for key, state in theirs["optimizer"]["state"].items():
        assert torch.equal(mine["optimizer"]["state"][key]["exp_avg"], state["exp_avg"])
    assert lines(out) == lines(undisturbed)
    assert checkpoint.best_step(out) == checkpoint.best_step(undisturbed)


def test_metrics_hold_every_step_once(undisturbed: Path) -> None:
    steps = [row["step"] for row in lines(undisturbed) if "loss" in row]
    assert steps == list(range(1, len(steps) + 1))
    assert [row["step"] for row in lines(undisturbed) if "heldout" in row] == [0, *range(5, len(steps), 5), len(steps)]


def test_training_learns(undisturbed: Path) -> None:
    losses = [row["loss"] for row in lines(undisturbed) if "loss" in row]
    assert sum(losses[-5:]) < 0.8 * sum(losses[:5])  # type: ignore[arg-type]


def test_only_the_newest_and_the_best_are_kept(undisturbed: Path) -> None:
    names = sorted(path.name for path in (undisturbed / "checkpoints").iterdir())
    total = checkpoint.require(undisturbed, "last")["step"]
    kept = {total, total // 5 * 5 if total % 5 else total - 5, checkpoint.best_step(undisturbed)}
    assert names == [f"step-{step:08d}.pt" for step in sorted(kept)]  # type: ignore[type-var]


def test_a_run_with_other_settings_is_not_continued(undisturbed: Path, store: Path, tiny_target: Path) -> None:
    with pytest.raises(InvalidInput, match=r"lr: 0.001 before, 0.5 now; seed: 0 before, 4 now"):
        Trainer(config(store, tiny_target, undisturbed, lr=0.5, seed=4))


def test_a_finished_run_is_left_alone(undisturbed: Path, store: Path, tiny_target: Path) -> None:
    before = (undisturbed / "metrics.jsonl").read_bytes()
    trainer = Trainer(config(store, tiny_target, undisturbed, keep=3))
    assert trainer.step == trainer.total
    trainer.run()
    assert (undisturbed / "metrics.jsonl").read_bytes() == before


def test_a_damaged_checkpoint_is_named(tmp_path: Path) -> None:
    path = checkpoint.save(tmp_path, 3, {"x": torch.zeros(100)})
    path.write_bytes(path.read_bytes()[:200])
    with pytest.raises(CorruptFile, match=r"step-00000003\.pt.*the checkpoint before"):
        checkpoint.load(tmp_path)
    whole = checkpoint.save(tmp_path, 3, {"x": torch.zeros(100)}).read_bytes()
    for damaged in (whole.replace(b"FloatStorage", b"\xff\xfeoatStorage"), whole.replace(b"cpu", b"\xffpu")):
        assert damaged != whole
        path.write_bytes(damaged)
        with pytest.raises(CorruptFile, match=r"step-00000003\.pt: unreadable"):
            checkpoint.load(tmp_path)


def test_no_flipped_bit_is_trained_on(tmp_path: Path) -> None:
    """torch reads such a tensor as it stands."""
    path = checkpoint.save(tmp_path, 3, {"x": torch.ones(1000), "y": torch.ones(10)})
    data = bytearray(path.read_bytes())
    data[data.index(torch.ones(1000).numpy().tobytes()) + 1234] ^= 4
    path.write_bytes(data)
    with pytest.raises(CorruptFile, match=r"step-00000003\.pt: unreadable.*not what was written.*checkpoint before"):
        checkpoint.load(tmp_path)


def test_half_a_line_is_dropped_on_resume(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3, "x": {"y": 1}')
    log = MetricsLog(tmp_path, 2)
    log.write(step=3)
    log.close()
    assert [json.loads(line)["step"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3]


def test_the_rate_rises_and_falls() -> None:
    settings = TrainConfig(Path(), Path(), Path(), lr=1.0, warmup=0.1, final_lr=0.1)
    rates = [learning_rate(settings, step, 100) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[9] == rates[10] == 1.0
    assert rates == sorted(rates[:10]) + sorted(rates[10:], reverse=True)
    assert rates[-1] == pytest.approx(0.1, abs=1e-3)
