"""States on their way from a store into a batch: e4m3 and its scales, NaN, rows joined and padded, training alike."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import storemaker
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas_draft.batches import Batch, HostBatch
from eyas_draft.config import TrainConfig
from eyas_draft.feed import Table, table_bytes
from eyas_draft.states import States, joined, joined_states
from eyas_draft.store import Store
from eyas_draft.train import Trainer

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def e4m3(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, rows: list[storemaker.Row]) -> Path:
    """The same rows as in the store of float32. Read-only."""
    return storemaker.write_store(tmp_path_factory.mktemp("e4m3") / "store", tiny_target, rows, dtype="F8_E4M3")


@given(st.sampled_from((torch.bfloat16, torch.float16, torch.float32)), st.integers(1, 40), st.integers(1, 70),
       st.sampled_from((0.0, math.nan, math.inf, -math.inf)), st.integers(0, 2**32 - 1))
def test_one_value_that_is_not_finite_is_found_wherever_it_is(dtype: torch.dtype, tokens: int, width: int, value: float,
                                                              seed: int) -> None:
    values = torch.randn(tokens, width, generator=torch.Generator().manual_seed(seed)).to(dtype)
    values.view(-1)[seed % values.numel()] = value
    assert States(values).finite == bool(torch.isfinite(values).all()) == math.isfinite(value)


@given(st.integers(1, 30), st.integers(1, 4), st.integers(1, 30), st.sampled_from((0x00, 0x7E, 0xFE, 0x7F, 0xFF)),
       st.sampled_from((1.0, math.nan, math.inf)), st.integers(0, 2**32 - 1))
def test_of_e4m3_too(tokens: int, layers: int, width: int, byte: int, scale: float, seed: int) -> None:
    """0x7e is the greatest, 448; 0x7f and 0xff are NaN."""
    random = torch.randn(tokens, layers * width, generator=torch.Generator().manual_seed(seed))
    values, scales = storemaker.quantised(random, layers)
    values.view(torch.uint8).view(-1)[seed % values.numel()] = byte
    scales.view(-1)[seed % scales.numel()] = scale
    states = States(values, scales)
    assert states.finite == (math.isfinite(scale) and byte not in (0x7F, 0xFF))
    if states.finite:
        assert torch.isfinite(states.plain).all()


def test_e4m3_becomes_its_product_with_the_scales_rounded_once() -> None:
    values, scales = storemaker.quantised(torch.randn(50, 3 * 16, generator=torch.Generator().manual_seed(1)), 3)
    exact = values.double().view(50, 3, 16) * scales.double()[:, :, None]
    found = States(values, scales).plain
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact.view(50, 48), rtol=2**-8 + 2**-20, atol=0)
    out = torch.empty(50, 48, dtype=torch.bfloat16)
    States(values, scales).into(out)
    assert torch.equal(out, found)


def test_rows_are_joined_and_padded_by_zeros() -> None:
    parts = [torch.arange(6).view(2, 3), torch.arange(3).view(1, 3)]
    assert joined(parts, pinned=False, room=5).tolist() == [[0, 1, 2], [3, 4, 5], [0, 1, 2], [0, 0, 0], [0, 0, 0]]
    states = [States(*storemaker.quantised(torch.randn(n, 8), 2)) for n in (3, 2)]
    both = joined_states(states, pinned=False, room=7)
    assert torch.equal(both.plain, torch.cat([states[0].plain, states[1].plain, torch.zeros(2, 8)]).bfloat16())
    assert torch.equal(both.taken(torch.tensor([4, 0])).plain, both.plain[[4, 0]])


def test_a_batch_holds_what_its_samples_hold(e4m3: Path, rows: list[storemaker.Row]) -> None:
    store = Store(e4m3)
    samples = [store.sample(i) for i in range(4)]
    packed = HostBatch.of(samples, pinned=False)
    assert packed.aux.values_tw.dtype == torch.float8_e4m3fn  # half the bytes travel
    batch = packed.to(CPU)
    for mine, wanted in ((batch.aux_tke, [s.aux_tke for s in samples]), (batch.last_te, [s.last_te for s in samples])):
        assert torch.equal(mine, torch.cat(wanted))
    assert torch.equal(batch.aux_tke, Batch.pack(samples, CPU).aux_tke)
    torch.testing.assert_close(samples[0].aux_tke.float(), rows[0][3], rtol=0.07, atol=0.02)


def test_room_on_a_device_is_that_of_plain_states(e4m3: Path, store: Path) -> None:
    quantised, plain = Store(e4m3), Store(store)
    assert 2 * table_bytes(quantised) == table_bytes(plain)  # bf16 and float32
    table = Table(quantised, CPU)
    assert table_bytes(quantised) == table.aux.nbytes + table.last.nbytes > quantised.manifest.shards[0].bytes


def test_every_way_of_training_reads_e4m3_alike(e4m3: Path, tiny_target: Path, tmp_path: Path) -> None:
    losses = []
    for name, changes in (("ragged", {"shapes": "ragged"}), ("resident", {"shapes": "fixed", "resident": "yes"}),
                          ("streamed", {"shapes": "fixed", "resident": "no"})):
        out = tmp_path / name
        Trainer(TrainConfig(e4m3, tiny_target, out, vocab_size=64, ttt_steps=3, max_steps=6, tokens_per_batch=300,
                            precision="fp32", holdout=0.05, lr=2e-3, **changes)).run()  # type: ignore[arg-type]
        rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
        losses.append([row["loss"] for row in rows if "loss" in row])
    ragged, resident, streamed = losses
    assert resident == streamed
    assert resident == pytest.approx(ragged, rel=2e-4)
    assert ragged[-1] < ragged[0]
