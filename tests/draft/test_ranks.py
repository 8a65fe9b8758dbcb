"""Runs of 1, 2 and 3 processes: one loss curve, no sample twice, whatever was killed and however it was continued."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas_contract import CorruptFile, InvalidInput
from eyas_draft import checkpoint, sharded
from eyas_draft.batches import split
from eyas_draft.config import TrainConfig
from eyas_draft.fixed import takes_fixed
from eyas_draft.ranks import Ranks
from eyas_draft.store import Store
from eyas_draft.train import Trainer

HERE = Path(__file__).parent
STEPS_OF_A_CHECKPOINT = 2


def run(store: Path, target: Path, out: Path, processes: int, kill_at: int = 0, shapes: str = "auto") -> Path:
    """Run to the end, or to death; returns the folder of notes."""
    notes = out.with_name(f"{out.name}-notes-{processes}-{kill_at}")
    notes.mkdir()
    launch = [sys.executable] if not processes else [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    words = [*launch, str(HERE / "rank_run.py"), *map(str, (store, target, out, notes)), shapes]
    words += [str(kill_at)] * bool(kill_at)
    done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
    assert bool(done.returncode) == bool(kill_at), done.stderr[-3000:]
    return notes


def steps_of(out: Path) -> dict[int, dict[str, float]]:
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row for row in rows if "loss" in row}


def curve(out: Path) -> dict[int, float]:
    return {step: row["loss"] for step, row in steps_of(out).items()}


def reads(notes: Path, first: int = 0, last: int = 10**9) -> Counter[int]:
    """How often each sample was trained on in the steps from `first` to `last`."""
    rows = [line.split() for path in notes.iterdir() for line in path.read_text().splitlines()]
    return Counter(int(index) for step, index in rows if first <= int(step) <= last)


@pytest.fixture(scope="module")
def alone(store: Path, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one process without torchrun, undisturbed."""
    out = tmp_path_factory.mktemp("alone") / "run"
    run(store, tiny_target, out, 0)
    return out


@pytest.mark.parametrize(("before", "after"), [(2, 3), (3, 1), (0, 2)])
def test_killed_and_continued_by_another_number(store: Path, tiny_target: Path, tmp_path: Path, alone: Path,
                                                before: int, after: int) -> None:
    out, kill_at = tmp_path / "run", 6
    first = run(store, tiny_target, out, before, kill_at)
    reached = kill_at - 1 - (kill_at - 1) % STEPS_OF_A_CHECKPOINT  # the last checkpoint before
    latest = checkpoint.latest(out)
    assert latest is not None
    assert latest.stem == f"step-{reached:08d}"
    second = run(store, tiny_target, out, after)
    wanted, found = curve(alone), curve(out)
    assert sorted(found) == sorted(wanted) == list(range(1, len(wanted) + 1))
    for step, loss in wanted.items():
        assert found[step] == pytest.approx(loss, rel=2e-5), step
    trained, _ = split(Store(store), 0.05, 0)
    total = reads(first, last=reached) + reads(second, first=reached + 1)
    assert set(total) <= set(trained)
    assert max(total.values()) <= 2  # once an epoch
    assert sum(total.values()) >= 2 * len(trained) - 40  # the last, incomplete step is not taken


@pytest.fixture(scope="module")
def alone_fixed(store: Path, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As `alone`, on fixed shapes."""
    out = tmp_path_factory.mktemp("alone-fixed") / "run"
    run(store, tiny_target, out, 0, shapes="fixed")
    return out


@pytest.mark.parametrize(("before", "after"), [(2, 0), (0, 2)])
def test_fixed_shapes_by_several_each_with_the_whole_draft(store: Path, tiny_target: Path, tmp_path: Path,
                                                           alone_fixed: Path, before: int, after: int) -> None:
    """Killed, continued by another number of processes, and the same as a run of one that was left alone."""
    out, kill_at = tmp_path / "run", 6
    run(store, tiny_target, out, before, kill_at, shapes="fixed")
    latest = checkpoint.latest(out)
    assert latest is not None
    assert latest.name == "step-00000004.pt"
    run(store, tiny_target, out, after, shapes="fixed")
    wanted, found = (steps_of(path) for path in (alone_fixed, out))
    assert sorted(found) == sorted(wanted) == list(range(1, len(wanted) + 1))
    for step, row in wanted.items():
        assert found[step]["loss"] == pytest.approx(row["loss"], rel=2e-5), step
        assert found[step]["grad_norm"] == pytest.approx(row["grad_norm"], rel=1e-4), step
        assert all(found[step][key] == row[key] for key in ("cursor", "tokens", "trained")), step


@pytest.mark.parametrize(("changes", "processes", "parameters", "fixed"), [
    ({}, 0, 10**9, True), ({}, 1, 1000, True), ({}, 2, 1000, True), ({}, 2, 1001, False), ({}, 3, 1000, False),
    ({"shapes": "ragged"}, 0, 1, False), ({"shapes": "ragged"}, 2, 1, False), ({"shapes": "fixed"}, 2, 10**9, True),
    ({"precision": "fp32"}, 0, 1, False), ({"precision": "fp32"}, 2, 1, False), ({"device": "cpu"}, 0, 1, False)])
def test_drafts_that_take_little_of_a_gpu_are_whole_in_every_process(
        monkeypatch: pytest.MonkeyPatch, changes: dict[str, Any], processes: int, parameters: int, fixed: bool) -> None:
    config = TrainConfig(Path(), Path(), Path(), **{"accumulate": 4, "device": "cuda", **changes})
    ranks = Ranks(0, max(1, processes), torch.device(config.device), shared=processes > 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=999_999))
    monkeypatch.setattr(Ranks, "gather", lambda self, memory: [memory, 160_000])  # bytes: the other GPU is smaller
    draft: Any = torch.nn.Linear(parameters, 1, bias=False, device="meta")
    assert takes_fixed(config, ranks, draft) == fixed


@pytest.mark.parametrize(("shapes", "accumulate", "wanted"), [
    ("fixed", 3, "as many batches for each"), ("auto", 1, "a batch of every step for each process")])
def test_batches_that_cannot_be_shared_out_are_refused(
        store: Path, tiny_target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
        shapes: Literal["fixed", "auto"], accumulate: int, wanted: str) -> None:
    monkeypatch.setattr(Ranks, "join", lambda device: Ranks(0, 2, torch.device(device), shared=False))
    with pytest.raises(InvalidInput, match=rf"--accumulate.*{accumulate}, with 2 processes.*{wanted}"):
        Trainer(TrainConfig(store, tiny_target, tmp_path / "run", vocab_size=64, accumulate=accumulate, shapes=shapes))
    assert not (tmp_path / "run").exists()


def test_a_checkpoint_of_several_is_read_by_one(store: Path, tiny_target: Path, tmp_path: Path, alone: Path) -> None:
    run(store, tiny_target, tmp_path / "run", 2)
    mine, theirs = checkpoint.require(tmp_path / "run", "last"), checkpoint.require(alone, "last")
    assert {key: mine[key] for key in ("step", "cursor", "skipped")} == {
        key: theirs[key] for key in ("step", "cursor", "skipped")}
    for name, value in theirs["model"].items():
        if name != "layers.1.input_layernorm.weight":  # used by nothing
            torch.testing.assert_close(mine["model"][name], value, rtol=1e-3, atol=2e-5)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(0, 5))
def test_every_step_is_shared_out_whole_and_in_as_many_passes(world: int, accumulate: int, steps: int) -> None:
    plans = [[number] for number in range(accumulate * steps)]
    shares = [list(Ranks(rank, world, torch.device("cpu"), shared=True).share(iter(plans), accumulate))
              for rank in range(world)]
    passes = Ranks(0, world, torch.device("cpu"), shared=True).passes(accumulate)
    assert {len(share) for share in shares} == {passes * steps}
    for step in range(steps):
        taken = [plan for share in shares for plan in share[step * passes:(step + 1) * passes] if plan]
        assert sorted(taken) == plans[step * accumulate:(step + 1) * accumulate]


@pytest.mark.filterwarnings("ignore:torch.distributed")  # is not there, as is meant here
def test_a_cut_or_changed_checkpoint_of_several_is_named(tmp_path: Path) -> None:
    tensors = {"model.fc.weight": torch.randn(64, 64)}
    sharded.write(tmp_path / "step-00000002", tensors, {"step": 2}, Ranks(0, 1, torch.device("cpu"), shared=False))
    part, = (tmp_path / "step-00000002").glob("*.distcp")
    whole, flipped = part.read_bytes(), bytearray(part.read_bytes())
    assert sharded.read_whole(part.parent).keys() == tensors.keys()
    flipped[flipped.index(tensors["model.fc.weight"].numpy().tobytes()) + 1234] ^= 4
    for damaged, words in ((whole[:-3000], ""), (flipped, "not what was written")):
        part.write_bytes(damaged)
        for read in (lambda: sharded.read_into(part.parent, tensors), lambda: sharded.read_whole(part.parent)):
            with pytest.raises(CorruptFile, match=rf"step-00000002: unreadable.*{words}.*the checkpoint before"):
                read()


def test_a_numbered_device_is_refused_under_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(InvalidInput, match="local rank"):
        Ranks.join("cuda:1")


def test_a_world_without_ranks_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(InvalidInput, match="WORLD_SIZE without RANK, MASTER_ADDR, MASTER_PORT"):
        Ranks.join("cpu")
