"""The store's reader against real faults: flipped and cut bytes, foreign contracts, false masks, NaN."""

from __future__ import annotations

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import storemaker
import torch
from old_store import as_version_1

from eyas_contract import Contract, CorruptFile, InvalidInput, Manifest
from eyas_contract.safetensors_header import read_header
from eyas_draft.batches import Loader, plan_epoch, split
from eyas_draft.store import Store

SHARD = "shard-000001.safetensors"


@pytest.fixture
def copy(store: Path, tmp_path: Path) -> Path:
    """A store of one's own to damage."""
    return Path(shutil.copytree(store, tmp_path / "copy"))


def test_samples_come_back_as_written(store: Path, rows: list[storemaker.Row]) -> None:
    opened = Store(store)
    assert len(opened) == len(rows)
    for index in (0, 7, 8, 95):
        sample, row = opened.sample(index), rows[index]
        assert sample.id == row[0]
        for mine, theirs in ((sample.input_ids_t, row[1]), (sample.loss_mask_t, row[2].bool()),
                             (sample.aux_tke, row[3]), (sample.last_te, row[4])):
            assert torch.equal(mine, theirs)
    counts = torch.bincount(torch.cat([r[1][r[2].bool()] for r in rows]).long(), minlength=512)
    assert torch.equal(opened.token_counts(), counts)


@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("tensor", ["input_ids", "loss_mask", "aux_hidden_states", "last_hidden_state"])
def test_a_flipped_bit_is_found_on_first_use_and_names_the_shard(copy: Path, tensor: str, version: int) -> None:
    if version == 1:
        as_version_1(copy)
    info = read_header(copy / SHARD).tensors[tensor]
    raw = bytearray((copy / SHARD).read_bytes())
    raw[(info.start + info.end) // 2] ^= 1
    (copy / SHARD).write_bytes(raw)
    opened = Store(copy)
    assert opened.sample(0).finite  # in a sound shard
    with pytest.raises(CorruptFile, match=rf"{SHARD}.*{tensor}"):
        opened.sample(8)
    assert Store(copy, verify=False)


@pytest.mark.parametrize("length", [4, 100, -1])
def test_a_cut_shard_is_refused_on_opening(copy: Path, length: int) -> None:
    raw = (copy / SHARD).read_bytes()
    (copy / SHARD).write_bytes(raw[:length])
    with pytest.raises(CorruptFile, match=SHARD):
        Store(copy)


def test_a_missing_shard_is_refused_on_opening(copy: Path) -> None:
    (copy / SHARD).unlink()
    with pytest.raises(CorruptFile, match=f"{SHARD}.*no such file"):
        Store(copy)


def test_a_header_that_says_another_dtype_is_refused(copy: Path) -> None:
    raw = (copy / SHARD).read_bytes()
    (copy / SHARD).write_bytes(raw.replace(b'"dtype":"I32"', b'"dtype":"U32"', 1))
    with pytest.raises(CorruptFile, match=rf"{SHARD}.*input_ids is \('U32'"):
        Store(copy)


def edit_contract(folder: Path) -> None:
    contract = Contract.load(folder)
    dataclasses.replace(contract, capture=dataclasses.replace(contract.capture, aux_layer_ids=(0, 3, 4))).save(folder)


def edit_manifest(folder: Path) -> None:
    manifest = Manifest.load(folder)
    digests = tuple((name, "0" * 64) for name, _ in manifest.contract_digests)
    dataclasses.replace(manifest, contract_digests=digests).save(folder)


@pytest.mark.parametrize("edit", [edit_contract, edit_manifest])
def test_a_contract_of_another_store_is_refused(copy: Path, edit: Callable[[Path], None]) -> None:
    edit(copy)
    with pytest.raises(CorruptFile, match="belongs to another store"):
        Store(copy)


def test_shards_stamped_by_another_contract_are_refused(copy: Path) -> None:
    edit_contract(copy)
    manifest = Manifest.load(copy)
    digests = tuple(sorted(Contract.load(copy).digests().items()))
    dataclasses.replace(manifest, contract_digests=digests).save(copy)
    with pytest.raises(CorruptFile, match=r"shard-000000.*metadata says capture"):
        Store(copy)


@pytest.mark.parametrize(("value", "word"), [(0, "zero"), (1, "one")])
def test_a_mask_of_one_value_is_refused(tmp_path: Path, tiny_target: Path, rows: list[storemaker.Row], value: int,
                                        word: str) -> None:
    flat = [(r[0], r[1], torch.full_like(r[2], value), r[3], r[4]) for r in rows[:4]]
    with pytest.raises(InvalidInput, match=f"all {word}"):
        Store(storemaker.write_store(tmp_path / "s", tiny_target, flat))


def test_no_store_and_an_empty_one(tmp_path: Path, copy: Path) -> None:
    with pytest.raises(InvalidInput, match="no such file"):
        Store(tmp_path / "nowhere")
    dataclasses.replace(Manifest.load(copy), shards=()).save(copy)
    with pytest.raises(InvalidInput, match="no samples"):
        Store(copy)


def test_a_manifest_that_is_not_json_is_refused(copy: Path) -> None:
    (copy / "manifest.json").write_text(json.dumps({"shards": 3}))
    with pytest.raises(InvalidInput, match=r"manifest\.json"):
        Store(copy)


def test_samples_with_nan_are_passed_over_up_to_the_limit(tmp_path: Path, tiny_target: Path,
                                                          rows: list[storemaker.Row]) -> None:
    bad = [(r[0], r[1], r[2], r[3].clone(), r[4].clone()) for r in rows[:8]]
    bad[2][3][5, 7] = float("nan")
    bad[5][4][0, 0] = float("inf")
    opened = Store(storemaker.write_store(tmp_path / "s", tiny_target, bad))
    loader = Loader(opened, range(8), 10_000, seed=0, limit=2)
    assert [i for i, _ in loader.load(range(8))] == [0, 1, 3, 4, 6, 7]
    assert not loader.skipped  # only read ahead so far
    for _ in range(2):
        loader.pass_over([2, 5])
    assert loader.skipped == [bad[2][0], bad[5][0]]
    with pytest.raises(InvalidInput, match=r"NaN or infinite.*2 samples"):
        Loader(opened, range(8), 10_000, seed=0, limit=1).pass_over([2, 5])


def test_samples_that_are_known_to_be_bad_do_not_end_a_run_that_is_continued(store: Path) -> None:
    """Of several processes each counts its own between checkpoints; one that goes on starts from the count of all."""
    opened = Store(store)
    loader = Loader(opened, range(20), 100, seed=0, limit=1, skipped=[opened.id(3), opened.id(4)])
    loader.pass_over([3, 4])
    with pytest.raises(InvalidInput, match=r"in 3 samples.*--max-bad-samples"):
        loader.pass_over([5])
    with pytest.raises(InvalidInput, match="in 2 samples"):
        Loader(opened, range(20), 100, seed=0, limit=1, skipped=loader.skipped[:2]).require_few()


def test_a_run_without_one_finite_sample_is_refused_within_the_limit(store: Path) -> None:
    opened = Store(store)
    loader = Loader(opened, [4, 7], 100, seed=0, limit=10)
    loader.pass_over([4, 5])  # 5 is held out
    with pytest.raises(InvalidInput, match="all 2 samples to train on"):
        loader.pass_over([7])


def test_epochs_hold_every_sample_once_in_batches_within_the_size() -> None:
    lengths = [5, 30, 7, 12, 3, 3, 40, 9]
    orders = [plan_epoch(lengths, range(8), 32, seed=1, epoch=e) for e in range(3)]
    for plan in orders:
        assert sorted(i for batch in plan for i in batch) == list(range(8))
        assert all(sum(lengths[i] for i in batch) <= 32 or len(batch) == 1 for batch in plan)
    assert orders[0] != orders[1]
    assert orders == [plan_epoch(lengths, range(8), 32, seed=1, epoch=e) for e in range(3)]
    assert [len(batch) for batch in plan_epoch([8] * 8, range(8), 32, seed=1, epoch=0)] == [4, 4]  # filled to the last


class Few(Store):
    """Of four samples two can be trained on: one has no trained token, one nothing to predict."""

    def __init__(self) -> None:
        self.folder = Path("few")

    def __len__(self) -> int:
        return 4

    def trained(self, index: int) -> int:
        return (1, 1, 0, 1)[index]

    def length(self, index: int) -> int:
        return (3, 2, 9, 3)[index]


def test_the_smallest_shares_leave_one_sample_on_each_side() -> None:
    for fraction in (1.0, 0.01):
        trained, held = split(Few(), 0.01, 0, fraction)
        assert sorted(trained + held) == [0, 3]
        assert (len(trained), len(held)) == (1, 1)
    with pytest.raises(InvalidInput, match="--fraction"):
        split(Few(), 0.01, 0, 1.5)


def test_the_cursor_continues_where_batches_stopped(store: Path) -> None:
    loader = Loader(Store(store), range(20), 100, seed=0, limit=0)
    whole = loader.batches(0)
    ids = [[s.id for _, s in next(whole)] for _ in range(15)]
    rest = loader.batches(4)
    assert [[s.id for _, s in next(rest)] for _ in range(11)] == ids[4:]


def test_held_out_samples_are_never_trained_on(store: Path) -> None:
    trained, held = split(Store(store), 0.1, seed=5)
    assert len(held) == 10
    assert not set(trained) & set(held)
    assert len(trained) + len(held) == 96
    assert split(Store(store), 0.0, seed=5)[1] == []
    with pytest.raises(InvalidInput, match="held out"):
        split(Store(store), 1.0, seed=5)


def test_a_shard_that_is_cut_after_opening_does_not_hang(copy: Path) -> None:
    opened = Store(copy)
    path = copy / opened.manifest.shards[0].file
    with path.open("r+b") as sink:
        sink.truncate(path.stat().st_size // 2)
    with pytest.raises(CorruptFile, match="not those whose digest was recorded"):
        opened.sample(0)
