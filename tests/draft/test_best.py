"""Which checkpoint is the best, whatever came between; what an export of it says and leaves beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas_contract import InvalidInput
from eyas_draft import checkpoint
from eyas_draft.config import ExportConfig, TrainConfig
from eyas_draft.export import export
from eyas_draft.train import Trainer
from eyas_draft.walk import Walk

Save = Callable[..., Path]


def walked(length: float) -> Walk:
    """A measurement of this acceptance length, from 1 to 3."""
    more = round((length - 1) * 100)
    return Walk((100 - more, more, 0, 0) if more <= 100 else (0, 200 - more, more - 100, 0))


class DiskFullError(OSError):
    """Stands for a full disk, or a kill."""


@pytest.fixture
def trained(store: Path, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Trainer]:
    """Train to `max_steps` in `tmp_path / "run"` with given measurements by step; fail before or after a write."""
    write = checkpoint.save

    def run(lengths: Mapping[int, float], max_steps: int = 9, *, before: int = 0, after: int = 0,
            **changes: Any) -> Trainer:
        def save(folder: Path, step: int, state: dict[str, Any], **more: Any) -> Path:
            if step == before:
                raise DiskFullError
            path = write(folder, step, state, **more)
            if step == after:
                raise DiskFullError
            return path
        monkeypatch.setattr(checkpoint, "save", save)
        config = TrainConfig(store, tiny_target, tmp_path / "run", **{
            "vocab_size": 64, "ttt_steps": 2, "tokens_per_batch": 128, "precision": "fp32", "checkpoint_every": 3,
            "keep": 1, "max_steps": max_steps, **changes})
        trainer = Trainer(config)
        monkeypatch.setattr(trainer, "_measure", lambda log: walked(lengths.get(trainer.step, 1.0)))
        if before or after:
            with pytest.raises(DiskFullError):
                trainer.run()
            trainer.stepper.close()
        else:
            trainer.run()
        return trainer
    return run


def steps(run: Path) -> list[int]:
    return sorted(int(path.stem.removeprefix("step-")) for path in (run / "checkpoints").iterdir())


def exported(run: Path, out: Path, which: str = "best", *, golden: bool = False) -> tuple[Any, Any]:
    done = export(ExportConfig(run, out, checkpoint=which, golden=golden))  # type: ignore[arg-type]
    return done["step"], done["acceptance_length_heldout"]


def test_a_full_disk_leaves_the_best_that_was(trained: Callable[..., Trainer], tmp_path: Path) -> None:
    trained({3: 1.9, 6: 1.5, 9: 1.95}, before=9)
    run = tmp_path / "run"
    assert checkpoint.best_step(run) == 3
    assert steps(run) == [3, 6]
    assert exported(run, tmp_path / "a") == (3, 1.9)
    trained({9: 1.6})  # a GPU measures a little otherwise the second time
    assert exported(run, tmp_path / "a") == (3, 1.9)
    assert exported(run, tmp_path / "a", "last") == (9, 1.6)


@pytest.mark.parametrize("after", [6, 9])
def test_a_kill_between_the_checkpoint_and_its_being_named_is_made_good(trained: Callable[..., Trainer], tmp_path: Path,
                                                                        after: int) -> None:
    lengths = {3: 1.2, 6: 1.4, 9: 1.3}
    trained(lengths, after=after)
    assert trained(lengths).best == pytest.approx(1.4)
    assert checkpoint.best_step(tmp_path / "run") == 6
    assert steps(tmp_path / "run") == [6, 9]


@pytest.mark.parametrize("left", [12, 4, None])
def test_a_best_json_of_another_past_is_put_right(trained: Callable[..., Trainer], tmp_path: Path,
                                                  left: int | None) -> None:
    trained({3: 1.9, 6: 1.5}, before=9)
    checkpoint.mark_best(tmp_path / "run", left, 2.5)
    trained({9: 1.7})
    assert checkpoint.best_step(tmp_path / "run") == 3
    assert exported(tmp_path / "run", tmp_path / "draft") == (3, 1.9)


def test_where_the_best_was_removed_the_one_that_is_continued_takes_its_place(trained: Callable[..., Trainer],
                                                                              tmp_path: Path) -> None:
    trained({3: 1.9, 6: 1.5}, before=9)
    (tmp_path / "run" / "checkpoints" / "step-00000003.pt").unlink()
    trained({9: 1.4})
    assert exported(tmp_path / "run", tmp_path / "draft") == (6, 1.5)


def test_the_last_does_not_pass_for_the_best(trained: Callable[..., Trainer], tmp_path: Path) -> None:
    trained({3: 1.9, 6: 1.5}, 6)
    run = tmp_path / "run"
    (run / "checkpoints" / "step-00000003.pt").unlink()
    with pytest.raises(InvalidInput, match=r"step 3, which has no checkpoint.*--checkpoint last \(step 6\)"):
        exported(run, tmp_path / "draft")
    (run / "best.json").unlink()
    with pytest.raises(InvalidInput, match="no checkpoint was measured"):
        checkpoint.latest(run, "best")
    assert exported(run, tmp_path / "draft", "last") == (6, 1.5)


def age(run: Path) -> None:
    """Make a run one of before checkpoints said what they measured, and runs which samples they are of."""
    (run / "data.json").unlink()
    for path in (run / "checkpoints").iterdir():
        state = torch.load(path, weights_only=True)
        torch.save({name: value for name, value in state.items() if name not in ("measured", "best_step")}, path)


def test_runs_of_before_go_on(trained: Callable[..., Trainer], tmp_path: Path) -> None:
    run = tmp_path / "run"
    trained({3: 1.9, 6: 1.5}, 12, before=9)
    age(run)
    assert exported(run, tmp_path / "draft") == (3, 1.9)  # by best.json
    assert exported(run, tmp_path / "draft", "last") == (6, None)
    trained({9: 1.7}, 12, before=12)
    assert exported(run, tmp_path / "draft") == (3, 1.9)
    age(run)
    (run / "best.json").write_text('{"step": 12, "acceptance_length": 2.5}')  # as they left it on a full disk
    trained({12: 1.2}, 12)
    assert exported(run, tmp_path / "draft") == (12, 1.2)  # which was the best before is not known


def test_no_golden_record_stays_beside_other_weights(trained: Callable[..., Trainer], tmp_path: Path) -> None:
    trained({3: 1.9, 6: 1.5}, 6)
    run, out = tmp_path / "run", tmp_path / "draft"
    exported(run, out, golden=True)
    assert (out / "golden.json").is_file()
    exported(run, out, "last")
    assert sorted(path.name for path in out.iterdir()) == ["config.json", "config.resolved.json", "contract.json",
                                                           "model.safetensors"]


def test_a_checkpoint_says_what_it_measured(trained: Callable[..., Trainer], tmp_path: Path) -> None:
    trained({3: 1.9, 6: 1.5}, 6)
    state = checkpoint.require(tmp_path / "run", "last")
    assert [state[name] for name in ("step", "measured", "best", "best_step")] == [6, 1.5, 1.9, 3]
    assert json.loads((tmp_path / "run" / "best.json").read_text()) == {"step": 3, "acceptance_length": 1.9}


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"step": "x"}'])
def test_a_best_json_that_names_nothing_is_told(trained: Callable[..., Trainer], tmp_path: Path, text: str) -> None:
    trained({3: 1.9}, 3)
    (tmp_path / "run" / "best.json").write_text(text)
    with pytest.raises(InvalidInput, match=r"best\.json"):
        exported(tmp_path / "run", tmp_path / "draft")
    trained({3: 1.9}, 3)  # finished: nothing is trained, and the file is put right
    assert exported(tmp_path / "run", tmp_path / "draft") == (3, 1.9)


def test_old_checkpoints_go_but_never_the_best(tmp_path: Path) -> None:
    for step in (1, 2, 3, 4):
        checkpoint.save(tmp_path, step, {"step": step})
    checkpoint.mark_best(tmp_path, 2, 1.5)
    checkpoint.remove_old(tmp_path, 0)
    assert steps(tmp_path) == [1, 2, 3, 4]
    checkpoint.remove_old(tmp_path, 1)
    assert steps(tmp_path) == [2, 4]


@pytest.mark.parametrize(("best", "settled"), [(1, (1, 2.5)), (2, (2, 2.5)), (3, (2, 1.5)), (0, (2, 1.5))],
                         ids=["earlier", "this", "later", "gone"])
def test_the_best_is_a_checkpoint_that_is_there_and_no_later_than_the_one_continued(
        tmp_path: Path, best: int, settled: tuple[int, float]) -> None:
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, {"step": step})
    (tmp_path / "checkpoints" / "step-00000000.tmp").touch()  # of a run that was killed while it wrote
    checkpoint.mark_best(tmp_path, 3, 9.0)
    state = {"step": 2, "measured": 1.5, "best_step": best, "best": 2.5}
    assert checkpoint.settle_best(tmp_path, state) == settled
    assert checkpoint.best_step(tmp_path) == settled[0]


def test_a_checkpoint_is_synced_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a power cut leaves the newest one empty, and the one before it removed."""
    synced: list[int] = []

    def fsync(handle: int) -> None:
        synced.append(os.fstat(handle).st_size)
        assert not (tmp_path / "checkpoints" / "step-00000003.pt").exists()

    monkeypatch.setattr(os, "fsync", fsync)
    path = checkpoint.save(tmp_path, 3, {"step": 3})
    assert synced == [path.stat().st_size]


def test_exported_weights_are_synced_before_they_have_their_name(trained: Callable[..., Trainer], tmp_path: Path,
                                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    trained({3: 1.9}, 3)
    weights, synced = tmp_path / "draft" / "model.safetensors", set[int]()

    def fsync(handle: int) -> None:
        synced.add(0 if weights.exists() else os.fstat(handle).st_size)

    monkeypatch.setattr(os, "fsync", fsync)
    exported(tmp_path / "run", tmp_path / "draft")
    assert weights.stat().st_size in synced
