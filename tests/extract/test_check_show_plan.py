"""Damage found and named; samples shown; plans; the command line."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from old_store import as_version_1
from safetensors.torch import load_file

from eyas_contract import Contract, CorruptFile, InvalidInput, Manifest
from eyas_contract.safetensors_header import read_header
from eyas_extract.check import check
from eyas_extract.cli import main
from eyas_extract.config import PlanConfig, RunConfig, ShowConfig
from eyas_extract.plan import plan
from eyas_extract.run import run
from eyas_extract.show import show, text
from eyas_extract.store import write_safetensors

SHARD = "shard-000001.safetensors"


def command(*words: object) -> int:
    with pytest.raises(SystemExit) as ended:
        main([str(word) for word in words])
    return int(ended.value.code or 0)


def test_a_sound_store(finished: Path) -> None:
    report = check(finished)
    assert report.complete
    assert not report.damage
    assert (report.samples, report.tokens) == (40, Manifest.load(finished).num_tokens)


def test_a_store_of_the_first_version(store: Path, tiny_target: Path, answers: Path) -> None:
    """Its SHA-256 digests are checked as before; it is continued, and what is added has the newer digest."""
    for path in sorted(store.glob("shard-*"))[2:]:
        path.unlink()
    manifest = Manifest.load(store)
    dataclasses.replace(manifest, shards=manifest.shards[:2], complete=False).save(store)
    as_version_1(store)
    assert not check(store).damage
    run(RunConfig(tiny_target, answers, store, shard_tokens=300, batch_tokens=128))
    continued = Manifest.load(store)
    assert [t.digest[0] for s in continued.shards for t in s.tensors] == ["sha256"] * 10 + ["xxh3_128"] * (
        5 * (len(manifest.shards) - 2))
    assert not check(store).damage
    raw = bytearray((store / SHARD).read_bytes())
    raw[-5000] ^= 1
    (store / SHARD).write_bytes(raw)
    assert any("not those that were written (sha256)" in each.fault for each in check(store).damage)


@pytest.mark.parametrize("name", ["input_ids", "loss_mask", "aux_hidden_states", "last_hidden_state", "sample_offsets"])
def test_a_flipped_bit_is_found_in_every_tensor(store: Path, name: str) -> None:
    info = read_header(store / SHARD).tensors[name]
    raw = bytearray((store / SHARD).read_bytes())
    raw[(info.start + info.end) // 2] ^= 1
    (store / SHARD).write_bytes(raw)
    faults = check(store).damage
    assert {f.shard for f in faults} == {SHARD}
    assert f"the bytes of {name} are not those that were written (xxh3_128)" in [f.fault for f in faults]


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1000])


def grow(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"x")


def swap(path: Path) -> None:
    path.write_bytes((path.parent / "shard-000000.safetensors").read_bytes())


@pytest.mark.parametrize(("spoil", "fault"), [(cut, "but the header describes"), (grow, "but the header describes"),
                                              (Path.unlink, "no such file"), (swap, "bytes, not")])
def test_cut_lost_and_swapped_shards(store: Path, spoil: Callable[[Path], None], fault: str) -> None:
    spoil(store / SHARD)
    damage = check(store).damage
    assert fault in damage[0].fault
    assert {d.shard for d in damage} == {SHARD}


def test_a_shard_outside_of_the_store_is_none_of_its(store: Path) -> None:
    manifest = Manifest.load(store)
    (store / SHARD).rename(store.parent / SHARD)
    shards = [dataclasses.replace(shard, file=f"../{SHARD}") if shard.file == SHARD else shard
              for shard in manifest.shards]
    dataclasses.replace(manifest, shards=tuple(shards)).save(store)
    assert [(d.shard, d.fault) for d in check(store).damage] == [(f"../{SHARD}", "no such file in the store")]


def rewrite(store: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """A shard with other tensors and a manifest that records them as if they were right."""
    manifest = Manifest.load(store)
    loaded = load_file(store / SHARD)
    tensors = {t.name: loaded[t.name].clone() for t in Contract.load(store).capture.tensors}
    change(tensors)
    records, size = write_safetensors(store / SHARD, tensors, read_header(store / SHARD).metadata)
    shards = list(manifest.shards)
    shards[1] = dataclasses.replace(shards[1], tensors=records, bytes=size)
    dataclasses.replace(manifest, shards=tuple(shards)).save(store)


def test_bad_values_name_their_sample(store: Path) -> None:
    def change(tensors: dict[str, torch.Tensor]) -> None:
        start, end = tensors["sample_offsets"][2:4].tolist()
        tensors["aux_hidden_states"][start, 5] = torch.nan
        tensors["aux_hidden_states"][end - 1, 130] = torch.inf
        tensors["last_hidden_state"][start:end] = 0
        tensors["loss_mask"][start] = 1

    rewrite(store, change)
    sample = Manifest.load(store).shards[1].samples[2]
    assert [(d.sample, d.fault) for d in check(store).damage] == [
        (sample.id, f"{sample.trained + 1} trained tokens, not {sample.trained}"),
        (sample.id, "1 non-finite values in the states of layer 1"),
        (sample.id, "1 non-finite values in the states of layer 4"),
        (sample.id, "all states of the last layer are zero")]


@pytest.mark.parametrize(("change", "fault"), [
    (lambda t: t.update(aux_hidden_states=t["aux_hidden_states"][:, :128]), "aux_hidden_states is F32 [290, 128]"),
    (lambda t: t.update(last_hidden_state=t["last_hidden_state"].half()), "last_hidden_state is F16"),
    (lambda t: t.update(last_hidden_state=t["last_hidden_state"][8:]), "last_hidden_state is F32"),
    (lambda t: t.pop("loss_mask"), "no tensor loss_mask"),
    (lambda t: t["sample_offsets"][1].add_(1), "sample_offsets are not"),
])
def test_wrong_shapes_types_and_counts(store: Path, change: Callable[[dict[str, torch.Tensor]], None],
                                       fault: str) -> None:
    rewrite(store, change)
    assert fault.split("[")[0] in check(store).damage[0].fault


def test_another_contract_and_samples_stored_twice(store: Path) -> None:
    manifest = Manifest.load(store)
    dataclasses.replace(manifest, shards=(*manifest.shards, manifest.shards[0])).save(store)
    assert len([d for d in check(store).damage if d.fault == "is also in shard-000000.safetensors"]) == len(
        manifest.shards[0].samples)
    plain = json.loads((store / "contract.json").read_text())
    plain["capture"]["aux_layer_ids"] = [0, 3, 4]
    (store / "contract.json").write_text(json.dumps(plain))
    faults = {d.fault for d in check(store).damage}
    assert "is not the contract whose digests the manifest holds" in faults
    assert "its capture digest is not the contract's" in faults


def test_show(tiny_target: Path, answers: Path, finished: Path) -> None:
    from_store = show(ShowConfig(tiny_target, store=finished, index=39))
    assert from_store == show(ShowConfig(tiny_target, data=answers, index=39))
    assert from_store == show(ShowConfig(tiny_target, store=finished, id=from_store.id))
    assert from_store == show(ShowConfig(tiny_target, data=answers, id=from_store.id))
    answer = json.loads(answers.read_text().splitlines()[39])["messages"][-1]
    assert from_store.supervised == answer["content"] + "<|im_end|>"
    plain = text(from_store, colour=False)
    assert plain.replace("[", "").replace("]", "").count(answer["content"]) == 2
    assert "[<|im_end|>]" in plain
    assert "\x1b[1;32m<|im_end|>\x1b[0m" in text(from_store, colour=True)


@pytest.mark.parametrize("choice", [{"index": 40}, {"index": -1}, {"id": "absent"}])
def test_show_of_what_is_not_there(tiny_target: Path, answers: Path, finished: Path, choice: dict[str, Any]) -> None:
    for source in ({"data": answers}, {"store": finished}):
        with pytest.raises(InvalidInput, match="no sample"):
            show(ShowConfig(tiny_target, **source, **choice))  # type: ignore[arg-type]
    with pytest.raises(InvalidInput, match="neither"):
        show(ShowConfig(tiny_target))
    with pytest.raises(InvalidInput, match="--data and --store"):
        show(ShowConfig(tiny_target, answers, finished))


def test_show_of_a_lost_shard(tiny_target: Path, store: Path) -> None:
    (store / "shard-000000.safetensors").unlink()
    with pytest.raises(CorruptFile, match=r"shard-000000.*no such file.*repair"):
        show(ShowConfig(tiny_target, store=store))


def test_show_says_why_a_row_makes_no_sample(tiny_target: Path, tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text('{"id": "x", "messages": [{"role": "user", "content": "a"}]}\n')
    with pytest.raises(InvalidInput, match="line 1: no assistant turn"):
        show(ShowConfig(tiny_target, data, id="x"))


def test_plan_foretells_the_run(tiny_target: Path, answers: Path, finished: Path, tmp_path: Path) -> None:
    out = tmp_path / "not" / "there"
    found = plan(PlanConfig(tiny_target, answers, out, shard_tokens=300))
    manifest = Manifest.load(finished)
    assert (found.samples, found.tokens, found.trained_tokens, found.rejected) == (
        manifest.num_samples, manifest.num_tokens, manifest.num_trained, 0)
    assert found.bytes_per_token == 4 * 64 * 4 + 5
    payload = sum(info.end - info.start for shard in manifest.shards
                  for info in read_header(finished / shard.file).tensors.values())
    assert found.bytes == payload - 8 * len(manifest.shards)  # each shard has one bound more than samples
    assert found.fits
    assert found.tokens_per_second > 0
    assert not out.parent.exists()
    assert plan(PlanConfig(tiny_target, answers, out, probe=False)).seconds == 0


def test_command_line(tiny_target: Path, answers: Path, store: Path, tmp_path: Path,
                      capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "run.toml"
    config.write_text(f'target = "{tiny_target}"\ndata = "{answers}"\nshard-tokens = 300\naux_layers = [1, 3, 4]\n')
    out = tmp_path / "s"
    assert command("run", "--config", config, "--out", out, "--batch-tokens", 128) == 0
    assert "40 samples" in capsys.readouterr().out
    assert json.loads((out / "summary.json").read_text())["trained_tokens"] == Manifest.load(out).num_trained
    assert json.loads((out / "config.resolved.json").read_text())["shard_tokens"] == 300
    assert command("run", "--config", config, "--out", out, "--batch-tokens", 128, "--json") == 0
    assert json.loads(capsys.readouterr().out)["new_tokens"] == 0
    assert command("run", "--config", config, "--out", out, "--max-length", 7) == 1
    errors = capsys.readouterr().err
    assert "capture.max_length: 4096" in errors
    assert "Traceback" not in errors
    assert command("check", "--store", out) == 0
    assert "sound" in capsys.readouterr().out
    cut(store / SHARD)
    assert command("check", "--store", store) == 1
    assert SHARD in capsys.readouterr().out
    assert command("check", "--store", store, "--json") == 1
    assert json.loads(capsys.readouterr().out)["damage"][0]["shard"] == SHARD
    assert command("show", "--target", tiny_target, "--store", out, "--json") == 0
    assert any(json.loads(capsys.readouterr().out)["trained"])
    assert command("plan", "--target", tiny_target, "--data", answers, "--out", out, "--no-probe", "--json") == 0
    assert json.loads(capsys.readouterr().out)["samples"] == 40
    assert command("run", "--no-such-flag") == 2
    config.write_text("shard_token = 3\n")
    assert command("run", "--config", config) == 1
