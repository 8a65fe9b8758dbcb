"""repair, merge, split and stats of a store."""

from __future__ import annotations

import dataclasses
import errno
import itertools
import json
import os
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from eyas_contract import ContractMismatch, CorruptFile, InvalidInput, Manifest
from eyas_contract.safetensors_header import read_header
from eyas_extract.capture import Capture, States
from eyas_extract.check import check, read_tensor
from eyas_extract.cli import main
from eyas_extract.config import RepairConfig, RunConfig
from eyas_extract.conversations import read_rejects
from eyas_extract.digest import PLACE
from eyas_extract.provenance import token_faults
from eyas_extract.repair import repair
from eyas_extract.reshape import merge, split
from eyas_extract.run import run
from eyas_extract.stats import stats
from eyas_extract.store import write_safetensors


def contents(store: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(store.glob("*.safetensors"))}


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1000)


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 16
    path.write_bytes(raw)


def config(target: Path, answers: Path, store: Path) -> RepairConfig:
    return RepairConfig(target, answers, store, shard_tokens=300, batch_tokens=128)


@pytest.mark.parametrize("damage", [cut, flip, Path.unlink], ids=["cut", "flipped", "deleted"])
@pytest.mark.parametrize("place", [1, -1], ids=["middle", "last"])
def test_repair_brings_back_the_same_bytes(damage: Any, place: int, store: Path, finished: Path, tiny_target: Path,
                                           answers: Path) -> None:
    """Only the damaged shard is made anew, and it comes out as it was."""
    name = Manifest.load(store).shards[place].file
    old = (store / name).read_bytes()
    others = {p.name: p.stat().st_ino for p in store.glob("*.safetensors") if p.name != name}
    damage(store / name)
    done = repair(config(tiny_target, answers, store))
    assert done.shards == (name,)
    assert done.faults >= 1
    assert not done.after.damage
    assert (store / name).read_bytes() == old
    assert contents(store) == contents(finished)
    assert {n: (store / n).stat().st_ino for n in others} == others
    assert (store / "quarantine" / name).exists() == (damage is not Path.unlink)


def test_samples_that_repair_finds_bad_are_rejected(store: Path, tiny_target: Path, answers: Path,
                                                    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
                                                    ) -> None:
    """One had sound states at first, and has none now: it must not vanish."""
    shard = Manifest.load(store).shards[1]
    (store / shard.file).unlink()
    honest, calls = Capture.states, itertools.count()

    def states(self: Capture, rows: Any) -> States:
        found = honest(self, rows)
        if next(calls) != 1:  # the first is the target's check
            return found
        last = found.last.clone()
        last[0, 0, 0] = torch.nan
        return dataclasses.replace(found, last=last)

    monkeypatch.setattr(Capture, "states", states)
    with pytest.raises(SystemExit) as end:
        main(["repair", "--target", str(tiny_target), "--data", str(answers), "--out", str(store), "--shard-tokens",
              "300", "--batch-tokens", "128"])
    assert end.value.code == 0
    assert "1 x 1 non-finite values in the states of the last layer" in capsys.readouterr().out
    [reject] = read_rejects(store / "rejects.jsonl")
    assert {s.id for s in shard.samples} - {s.id for s in Manifest.load(store).shards[1].samples} == {reject.id}
    assert token_faults(store, tiny_target, answers) == []


def test_repair_of_a_sound_store_does_nothing(store: Path, finished: Path, tiny_target: Path, answers: Path) -> None:
    assert repair(config(tiny_target, answers, store)).shards == ()
    assert contents(store) == contents(finished)


def test_repair_refuses_other_input(store: Path, tiny_target: Path, answers: Path, tmp_path: Path) -> None:
    flip(store / "shard-000001.safetensors")
    other = tmp_path / "other.jsonl"
    other.write_text("\n".join(answers.read_text().splitlines()[:20]) + "\n")
    with pytest.raises(ContractMismatch, match=r"source\.input_sha256"):
        repair(config(tiny_target, other, store))


def test_repair_command(store: Path, tiny_target: Path, answers: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flip(store / "shard-000001.safetensors")
    with pytest.raises(SystemExit) as end:
        main(["repair", "--target", str(tiny_target), "--data", str(answers), "--out", str(store), "--shard-tokens",
              "300", "--batch-tokens", "128"])
    assert end.value.code == 0
    assert "1 shards made anew (shard-000001.safetensors)" in capsys.readouterr().out


def cut_short(store: Path, shards: int) -> None:
    """As if its run had been killed after so many shards."""
    manifest = Manifest.load(store)
    for shard in manifest.shards[shards:]:
        (store / shard.file).unlink()
    dataclasses.replace(manifest, shards=manifest.shards[:shards], complete=False).save(store)


def test_a_changed_place_in_the_input_is_found(store: Path, finished: Path, tiny_target: Path, answers: Path) -> None:
    """A run would go on by it, and leave rows out or take them twice."""
    cut_short(store, 2)
    path = store / "shard-000001.safetensors"
    raw = path.read_bytes()
    at = raw.index(b'"next_line":"') + len(b'"next_line":"')
    path.write_bytes(raw[:at] + bytes([raw[at] ^ 2]) + raw[at + 1:])
    [damage] = check(store).damage
    assert damage.shard == path.name
    assert "its next_line" in damage.fault
    with pytest.raises(CorruptFile, match=r"its next_line .* Run `eyas-extract repair`"):
        run(RunConfig(tiny_target, answers, store, shard_tokens=300, batch_tokens=128))
    assert repair(config(tiny_target, answers, store)).shards == (path.name,)
    assert path.read_bytes() == raw
    run(RunConfig(tiny_target, answers, store, shard_tokens=300, batch_tokens=128))
    assert contents(store) == contents(finished)


def test_shards_of_older_versions_say_their_place_without_a_digest(store: Path, finished: Path, tiny_target: Path,
                                                                   answers: Path) -> None:
    cut_short(store, 2)
    manifest, shards = Manifest.load(store), []
    for shard in manifest.shards:
        header = read_header(store / shard.file)
        tensors = {record.name: read_tensor(header.tensors[record.name]) for record in shard.tensors}
        metadata = {key: value for key, value in header.metadata.items() if key != PLACE}
        records, size = write_safetensors(store / shard.file, tensors, metadata)
        shards.append(dataclasses.replace(shard, tensors=records, bytes=size))
    dataclasses.replace(manifest, shards=tuple(shards)).save(store)
    run(RunConfig(tiny_target, answers, store, shard_tokens=300, batch_tokens=128))
    assert not check(store).damage
    assert samples(store) == samples(finished)


@pytest.mark.parametrize(("damage", "fault"), [(flip, "are not those that were written"), (cut, "bytes, not"),
                                               (Path.unlink, "is missing")])
def test_split_gives_damage_no_new_digest(store: Path, tmp_path: Path, damage: Callable[[Path], None], fault: str
                                          ) -> None:
    """Half of the samples lie in whole shards, and the one that is divided is damaged."""
    shards = Manifest.load(store).shards
    divided = next(i for i, shard in enumerate(shards) if i and len(shard.samples) > 1)
    damage(store / shards[divided].file)
    share = (sum(len(shard.samples) for shard in shards[:divided]) + 1) / 40
    with pytest.raises(CorruptFile, match=rf"{fault}.*Run `eyas-extract repair`"):
        split(store, (tmp_path / "a", tmp_path / "b"), share)
    assert not (tmp_path / "a").exists()


def samples(store: Path) -> dict[str, tuple[bytes, ...]]:
    """Each sample's bytes of every tensor, by its id."""
    result = {}
    for shard in Manifest.load(store).shards:
        tensors = {n: read_tensor(t) for n, t in read_header(store / shard.file).tensors.items()}
        bounds = tensors.pop("sample_offsets").tolist()
        for sample, start, end in zip(shard.samples, bounds, bounds[1:], strict=False):
            result[sample.id] = tuple(tensors[name][start:end].contiguous().view(torch.uint8).numpy().tobytes()
                                      for name in sorted(tensors))
    return result


def test_split_and_merge_lose_nothing(finished: Path, tmp_path: Path) -> None:
    first, second = split(finished, (tmp_path / "a", tmp_path / "b"), 0.7)
    assert (first.num_samples, second.num_samples) == (28, 12)
    assert not check(tmp_path / "a").damage
    assert not check(tmp_path / "b").damage
    whole = samples(finished)
    assert samples(tmp_path / "a") | samples(tmp_path / "b") == whole
    merged = merge([tmp_path / "a", tmp_path / "b"], tmp_path / "c")
    assert not check(tmp_path / "c").damage
    assert list(samples(tmp_path / "c")) == list(whole)
    assert samples(tmp_path / "c") == whole
    (tmp_path / "b" / "shard-000001.safetensors").unlink()
    with pytest.raises(CorruptFile, match=r"shard-000001\.safetensors is missing"):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "d")
    assert not (tmp_path / "d").exists()
    assert merged.num_trained == Manifest.load(finished).num_trained


def test_merge_refuses_what_does_not_belong_together(finished: Path, tiny_target: Path, answers: Path, tmp_path: Path
                                                     ) -> None:
    other = tmp_path / "other"
    run(RunConfig(tiny_target, answers, other, aux_layers=(0, 3, 4)))
    with pytest.raises(ContractMismatch, match=r"capture\.aux_layer_ids: \[0,3,4\]"):
        merge([finished, other], tmp_path / "out")
    with pytest.raises(InvalidInput, match=r"is in .* and in .*and 35 more"):
        merge([finished, finished], tmp_path / "out")
    with pytest.raises(InvalidInput, match="1 stores"):
        merge([finished], tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("second", ["one", "./one", "link"])
def test_one_folder_for_both_sides_is_refused(store: Path, finished: Path, tmp_path: Path, second: str) -> None:
    """The second side would be written over the first, and through its links over the store itself."""
    (tmp_path / "link").symlink_to("one")
    with pytest.raises(InvalidInput, match="for both sides"):
        split(store, (tmp_path / "one", tmp_path / second), 0.575)
    assert contents(store) == contents(finished)


def test_another_processs_shard_is_not_written_over(store: Path, finished: Path, tmp_path: Path,
                                                    monkeypatch: pytest.MonkeyPatch) -> None:
    """It got there first, and its shard is a link into a store."""
    (tmp_path / "out").mkdir()
    os.link(store / "shard-000001.safetensors", tmp_path / "out" / "shard-000000.safetensors")
    monkeypatch.setattr("eyas_extract.reshape._begin", lambda out: out.mkdir(exist_ok=True))
    with pytest.raises(InvalidInput, match="by another process"):
        split(store, (tmp_path / "out", tmp_path / "b"), 0.5)
    assert contents(store) == contents(finished)


def test_shards_may_be_relative_links(store: Path, finished: Path, tmp_path: Path) -> None:
    """As in a folder that came out of a cache of downloads."""
    (tmp_path / "blobs").mkdir()
    for path in store.glob("*.safetensors"):
        path.rename(tmp_path / "blobs" / path.name)
        path.symlink_to(f"../blobs/{path.name}")
    outs = (tmp_path / "deep" / "a", tmp_path / "deep" / "b")
    split(store, outs, 0.5)
    assert not [fault for out in outs for fault in check(out).damage]
    assert contents(store) == contents(finished)


@pytest.mark.parametrize("text", ["[]", "null", "3"])
def test_a_source_of_another_form_is_told(store: Path, tiny_target: Path, answers: Path, text: str) -> None:
    (store / "source.json").write_text(text)
    with pytest.raises(InvalidInput, match=r"source\.json: a JSON"):
        run(RunConfig(tiny_target, answers, store, shard_tokens=300, batch_tokens=128))
    with pytest.raises(InvalidInput, match=r"source\.json: a JSON"):
        token_faults(store, tiny_target, answers)


def test_rejects_of_another_form_are_not_handed_on(store: Path, tmp_path: Path) -> None:
    (store / "rejects.jsonl").write_bytes(b"\xff\xfe")
    with pytest.raises(CorruptFile, match="no list of rejects"):
        split(store, (tmp_path / "a", tmp_path / "b"), 0.5)
    assert not (tmp_path / "a").exists()


@pytest.mark.parametrize("share", [1.0, float("nan"), float("inf")])
def test_split_refuses_an_empty_side(finished: Path, tmp_path: Path, share: float) -> None:
    with pytest.raises(InvalidInput, match=f"a share of {share}"):
        split(finished, (tmp_path / "a", tmp_path / "b"), share)


def test_split_and_merge_print_json(finished: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    halves = [str(tmp_path / name) for name in "ab"]
    with pytest.raises(SystemExit):
        main(["split", "--store", str(finished), "--first", halves[0], "--second", halves[1], "--share", "0.7",
              "--json"])
    made = json.loads(capsys.readouterr().out)
    assert [(each["store"], each["samples"]) for each in made] == [(halves[0], 28), (halves[1], 12)]
    with pytest.raises(SystemExit):
        main(["merge", "--stores", *halves, "--out", str(tmp_path / "c"), "--json"])
    [whole] = json.loads(capsys.readouterr().out)
    assert whole["trained_tokens"] == Manifest.load(finished).num_trained == sum(e["trained_tokens"] for e in made)


def test_stats(finished: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = stats(finished)
    manifest = Manifest.load(finished)
    assert (found.samples, found.tokens, found.trained_tokens) == (40, manifest.num_tokens, manifest.num_trained)
    assert found.bytes == sum(path.stat().st_size for path in finished.glob("*.safetensors"))
    assert found.aux_layer_ids == (1, 3, 4)
    lengths = sorted(s.tokens for shard in manifest.shards for s in shard.samples)
    assert found.lengths == (lengths[0], lengths[20], lengths[36], lengths[-1])
    with pytest.raises(SystemExit):
        main(["stats", "--store", str(finished), "--json"])
    assert json.loads(capsys.readouterr().out)["store_dtype"] == "F32"


def test_a_shard_is_synced_before_it_has_its_name_and_its_folder_after(tmp_path: Path, monkeypatch: pytest.MonkeyPatch
                                                                      ) -> None:
    """Else a power cut leaves a manifest that names a shard without its bytes."""
    path, synced = tmp_path / "shard-000000.safetensors", []

    def fsync(handle: int) -> None:
        found = os.fstat(handle)
        synced.append(("folder" if stat.S_ISDIR(found.st_mode) else found.st_size, path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    _, size = write_safetensors(path, {"input_ids": torch.arange(5, dtype=torch.int32)}, {})
    assert synced == [(size, False), ("folder", True)]
    assert size == path.stat().st_size


def test_a_shard_that_does_not_fit_leaves_nothing_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a full disk its temporary file would take the room that the next try needs."""
    def full(handle: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_safetensors(tmp_path / "shard-000000.safetensors", {"input_ids": torch.arange(5, dtype=torch.int32)}, {})
    assert list(tmp_path.iterdir()) == []


def test_tokens_of_another_row_are_found(store: Path, tiny_target: Path, answers: Path, tmp_path: Path,
                                         capsys: pytest.CaptureFixture[str]) -> None:
    """Right lengths, wrong content: two rows of the input change places under their ids."""
    words = ["check", "--store", str(store), "--target", str(tiny_target), "--data"]
    with pytest.raises(SystemExit) as end:
        main([*words, str(answers)])
    assert end.value.code == 0
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    rows[3]["id"], rows[8]["id"] = rows[8]["id"], rows[3]["id"]
    rows[5]["id"] = "new"
    other = tmp_path / "other.jsonl"
    other.write_text("".join(json.dumps(row) + "\n" for row in rows))
    capsys.readouterr()
    with pytest.raises(SystemExit) as end:
        main([*words, str(other)])
    assert end.value.code == 1
    text = capsys.readouterr().out
    assert text.count("its tokens are not those of the input's row") == 2
    assert f"sample {json.loads(answers.read_text().splitlines()[5])['id']}: is no sample of the input" in text
    assert "sample new: is in no shard and not among the rejects" in text


def test_a_lost_row_is_found_whatever_ids_others_have(tiny_target: Path, answers: Path, tmp_path: Path) -> None:
    """Rejected rows vouch for no sample but their own: a duplicate of its id, or an id that it begins with."""
    rows = [json.loads(line) for line in answers.read_text().splitlines()[:12]]
    rows[0]["id"], rows[1]["id"] = "x#1", "y"
    rows += [{**rows[2], "id": "y"}, {"id": "x", "messages": []}]
    data, store = tmp_path / "rows.jsonl", tmp_path / "store"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run(RunConfig(tiny_target, data, store, shard_tokens=100))
    assert token_faults(store, tiny_target, data) == []
    manifest = Manifest.load(store)
    lost = {sample.id for sample in manifest.shards[0].samples}
    assert lost >= {"x#1", "y"}
    dataclasses.replace(manifest, shards=manifest.shards[1:]).save(store)
    assert {fault.sample for fault in token_faults(store, tiny_target, data)} == lost
