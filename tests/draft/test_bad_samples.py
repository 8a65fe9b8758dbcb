"""Runs on stores with NaN in them: the limit is that of all processes together, and no run goes round for ever."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import storemaker
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eyas_contract import InvalidInput
from eyas_draft import checkpoint
from eyas_draft.batches import plan_epoch
from eyas_draft.config import TrainConfig
from eyas_draft.fixed import pack_sizes
from eyas_draft.metrics import read_rows
from eyas_draft.packs import fill_pack
from eyas_draft.ranks import Ranks
from eyas_draft.train import Trainer


def longer(row: storemaker.Row, times: int, *, bad: bool = False) -> storemaker.Row:
    """A row's tokens over and over, the states NaN where `bad`."""
    name, ids, mask, aux, last = row
    aux = aux.repeat(times, 1) * (float("nan") if bad else 1.0)
    return name, ids.repeat(times), mask.repeat(times), aux, last.repeat(times, 1)


def trainer(store: Path, target: Path, out: Path, **changes: Any) -> Trainer:
    return Trainer(TrainConfig(store, target, out, **{
        "vocab_size": 64, "ttt_steps": 2, "tokens_per_batch": 128, "epochs": 1, "precision": "fp32", **changes}))


@pytest.mark.parametrize("shapes", ["ragged", "fixed"])
@pytest.mark.parametrize("resident", ["yes", "no"])
def test_a_run_whose_every_sample_is_bad_ends(tmp_path: Path, tiny_target: Path, rows: list[storemaker.Row],
                                              shapes: str, resident: Literal["yes", "no"]) -> None:
    store = storemaker.write_store(tmp_path / "store", tiny_target, [longer(row, 1, bad=True) for row in rows[:8]])
    run = trainer(store, tiny_target, tmp_path / "run", shapes=shapes, resident=resident, epochs=4, max_bad_samples=20)
    with pytest.raises(InvalidInput, match="all 7 samples to train on"):
        run.run()


@pytest.mark.parametrize("resident", ["yes", "no"])
def test_padding_holds_nothing_of_a_bad_sample(tmp_path: Path, tiny_target: Path, rows: list[storemaker.Row],
                                               resident: Literal["yes", "no"]) -> None:
    """Its NaN, times a gradient of zero, made all gradients of padded packs NaN where the first sample was bad."""
    few = [longer(row, 1, bad=number == 0) for number, row in enumerate(rows[:9])]
    store = storemaker.write_store(tmp_path / "store", tiny_target, few)
    losses = []
    for shapes in ("ragged", "fixed"):
        trainer(store, tiny_target, tmp_path / shapes, shapes=shapes, resident=resident, holdout=0.0).run()
        steps = [row for row in read_rows(tmp_path / shapes / "metrics.jsonl") if "loss" in row]
        assert not any(row.get("skipped") for row in steps)
        losses.append([row["loss"] for row in steps])
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)


def test_the_limit_is_that_of_all_processes_together(tmp_path: Path, tiny_target: Path, store: Path) -> None:
    """Judged at a checkpoint, before it is written, so that a run that is continued from the last meets the same."""
    run = trainer(store, tiny_target, tmp_path / "run", checkpoint_every=2, max_bad_samples=3, holdout=0.0)
    others = ["other-1", "other-2"]

    class Two(Ranks):
        def gather(self, value: Any) -> list[Any]:
            return [value, others]
    run.ranks = Two(**vars(run.ranks))
    run.loader.pass_over([0])
    for run.step in (2, 4):
        if run.step == 4:
            others.append("other-3")
            with pytest.raises(InvalidInput, match="in 4 samples"):
                run._save(None)
        else:
            run._save(None)
    run.stepper.close()
    assert run.loader.skipped == sorted([run.setup.store.id(0), *others])
    assert checkpoint.require(tmp_path / "run", "last")["step"] == 2


@pytest.mark.parametrize("most_bad", [10, 1])
def test_a_batch_that_is_left_out_does_not_take_a_run_past_its_sizes(tmp_path: Path, tiny_target: Path, most_bad: int,
                                                                     rows: list[storemaker.Row]) -> None:
    few = list(rows[:9])
    few[4], few[7] = longer(few[4], 2, bad=True), longer(few[7], 8)
    store = storemaker.write_store(tmp_path / "store", tiny_target, few)
    for seed in range(9, 12):
        run = trainer(store, tiny_target, tmp_path / f"run{seed}", shapes="fixed", tokens_per_batch=50, holdout=0,
                      seed=seed, max_steps=4, checkpoint_every=1000, max_bad_samples=most_bad)
        run.run()
        assert run.step == 4


@dataclasses.dataclass
class FewLengths:
    """Stands for a store and its loader."""

    lengths: list[int]
    masks: list[np.typing.NDArray[np.bool_]]
    tokens: int
    limit: int

    @property
    def store(self) -> Any:
        return self

    def __len__(self) -> int:
        return len(self.lengths)

    def length(self, index: int) -> int:
        return self.lengths[index]

    def trained(self, index: int) -> int:
        return int(self.masks[index].sum())

    @property
    def indices(self) -> range:
        return range(len(self.lengths))

    def plan(self, epoch: int) -> list[list[int]]:
        return plan_epoch(self.lengths, self.indices, self.tokens, 0, epoch)

    def num_batches(self, epoch: int) -> int:
        return len(self.plan(epoch))


@given(st.lists(st.integers(2, 40), min_size=1, max_size=40), st.integers(1, 120), st.integers(0, 4),
       st.integers(1, 30), st.integers(0, 2**20))
@settings(max_examples=80, deadline=None)
def test_every_batch_that_can_come_fits(lengths: list[int], tokens: int, limit: int, steps: int, seed: int) -> None:
    """Up to `limit` samples are bad; the batches that a run then trains on, those without them, are `steps`."""
    rng = np.random.default_rng(seed)
    loader: Any = FewLengths(lengths, [rng.random(n) < rng.random() for n in lengths], tokens, limit)
    bad = set(rng.permutation(len(lengths))[:min(limit, len(lengths) - 1)].tolist())
    sizes = pack_sizes(loader, steps)
    epoch = 0
    while steps > 0:
        for batch in loader.plan(epoch):
            kept = [loader.masks[i] for i in batch if i not in bad]
            if kept and steps > 0:
                fill_pack(np.zeros(sizes.total, dtype=np.int32), sizes, [0] * len(kept), kept)
                steps -= 1
        epoch += 1


def test_sizes_are_no_larger_than_the_batches_of_a_long_run_ask_for() -> None:
    rng = np.random.default_rng(1)
    lengths = rng.integers(20, 200, 2000).tolist()
    loader: Any = FewLengths(lengths, [np.arange(n) >= 0.3 * n * rng.random() * 2 for n in lengths], 2048, 10)
    plans = [batch for epoch in range(3) for batch in loader.plan(epoch)]
    sizes = pack_sizes(loader, len(plans) - 60)
    assert sizes.scored <= max(sum(loader.trained(i) for i in batch) for batch in plans) + 64
    assert sizes.documents - -(-sizes.tokens // sizes.longest) <= max(map(len, plans))


def test_a_batch_counts_its_bad_samples_when_its_turn_comes(tmp_path: Path, tiny_target: Path,
                                                            rows: list[storemaker.Row]) -> None:
    """Not when a thread reads it ahead: what a checkpoint holds must not depend on the thread's pace."""
    few = [longer(row, 1, bad=number in (3, 9)) for number, row in enumerate(rows[:12])]
    store = storemaker.write_store(tmp_path / "store", tiny_target, few)
    for shapes in ("ragged", "fixed"):
        run = trainer(store, tiny_target, tmp_path / shapes, shapes=shapes, tokens_per_batch=40, holdout=0.0)
        for step in range(1, run.total + 1):
            run.stepper.advance(step, 1e-3)
            seen = [i for batch in run.loader.plan(0)[:run.stepper.cursor] for i in batch]
            assert run.loader.skipped == [few[i][0] for i in seen if i in (3, 9)]
        run.stepper.close()
    assert torch.isfinite(run.model.fc.weight).all()
