"""Stores: their states against Hugging Face's own, resumes, refusals, bad states."""

from __future__ import annotations

import dataclasses
import errno
import json
import shutil
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from eyas_contract import Contract, ContractMismatch, EyasError, InvalidInput, Manifest
from eyas_extract import capture as capture_module
from eyas_extract.capture import Capture
from eyas_extract.check import check
from eyas_extract.config import PlanConfig, RunConfig
from eyas_extract.disk import room_for
from eyas_extract.plan import plan
from eyas_extract.reshape import split
from eyas_extract.run import run, state_fault
from eyas_extract.target import load_target


def settings(target: Path, data: Path, out: Path, **more: Any) -> RunConfig:
    return RunConfig(target, data, out, **{"shard_tokens": 300, "batch_tokens": 128, **more})


def test_states_are_those_of_hugging_face(tiny_target: Path, answers: Path, finished: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float64).eval()
    contract, manifest = Contract.load(finished), Manifest.load(finished)
    assert contract.capture.aux_layer_ids == (1, 3, 4)
    assert manifest.complete
    assert len(manifest.shards) > 2
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [s.id for shard in manifest.shards for s in shard.samples] == [row["id"] for row in rows]
    last_layer: list[torch.Tensor] = []
    model.model.layers[-1].register_forward_hook(lambda module, args, out: last_layer.append(out))
    number = 0
    for shard in manifest.shards:
        tensors = load_file(finished / shard.file)
        bounds = tensors["sample_offsets"].tolist()
        for start, end in pairwise(bounds):
            ids = tensors["input_ids"][start:end]
            answer = rows[number]["messages"][-1]["output_ids"]
            assert ids[tensors["loss_mask"][start:end].bool()].tolist() == answer
            last_layer.clear()
            with torch.no_grad():
                hidden = model(ids[None].long(), output_hidden_states=True).hidden_states
            wanted = torch.cat([hidden[k + 1][0] for k in (1, 3, 4)], dim=-1)
            torch.testing.assert_close(tensors["aux_hidden_states"][start:end].double(), wanted, rtol=1e-4, atol=1e-4)
            torch.testing.assert_close(tensors["last_hidden_state"][start:end].double(), last_layer[0][0],
                                       rtol=1e-4, atol=1e-4)
            number += 1
    assert number == len(rows)


@pytest.mark.parametrize(("name", "dtype", "tolerance"),
                         [("bf16", torch.bfloat16, 0.01), ("fp16", torch.float16, 0.002)])
def test_store_dtype(tiny_target: Path, answers: Path, finished: Path, tmp_path: Path, name: Any, dtype: torch.dtype,
                     tolerance: float) -> None:
    run(settings(tiny_target, answers, tmp_path / "s", store_dtype=name))
    found, wanted = (load_file(folder / "shard-000000.safetensors")["last_hidden_state"]
                     for folder in (tmp_path / "s", finished))
    assert found.dtype == dtype
    torch.testing.assert_close(found.float(), wanted, rtol=tolerance, atol=1e-3)
    assert Manifest.load(tmp_path / "s").num_tokens == Manifest.load(finished).num_tokens


def test_fp8_has_a_scale_for_each_layer_and_token(tiny_target: Path, answers: Path, finished: Path, tmp_path: Path
                                                   ) -> None:
    assert plan(PlanConfig(tiny_target, answers, tmp_path / "s", store_dtype="fp8")).tokens_per_second > 0
    run(settings(tiny_target, answers, tmp_path / "s", store_dtype="fp8"))
    assert not check(tmp_path / "s").damage
    found, right = (load_file(folder / "shard-000000.safetensors") for folder in (tmp_path / "s", finished))
    for name, scales in (("aux_hidden_states", "aux_scales"), ("last_hidden_state", "last_scale")):
        assert found[name].dtype == torch.float8_e4m3fn
        tokens, layers = found[scales].shape
        states = (found[name].float().view(tokens, layers, -1) * found[scales][:, :, None]).view(tokens, -1)
        assert (states - right[name]).norm() < 0.04 * right[name].norm()


def test_fp8_of_nan_states_rejects_them(poisoned_target: Path, answers: Path, finished: Path, tmp_path: Path) -> None:
    run(settings(poisoned_target, answers, tmp_path / "s"))
    run(settings(poisoned_target, answers, tmp_path / "fp8", store_dtype="fp8"))
    rejects = [[json.loads(line)["id"] for line in (tmp_path / name / "rejects.jsonl").read_text().splitlines()]
               for name in ("s", "fp8")]
    assert rejects[0] == rejects[1]
    assert rejects[0]
    assert not check(tmp_path / "fp8").damage


def test_a_complete_store_is_left_alone(tiny_target: Path, answers: Path, store: Path) -> None:
    before = {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in store.glob("shard*")}
    summary = run(settings(tiny_target, answers, store))
    assert summary.new_tokens == 0
    assert summary.samples == 40
    assert {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in store.glob("shard*")} == before


def test_leftover_and_lost_shards(tiny_target: Path, answers: Path, finished: Path, store: Path) -> None:
    manifest = Manifest.load(store)
    dataclasses.replace(manifest, complete=False, shards=manifest.shards[:1]).save(store)
    (store / "shard-000001.safetensors").write_bytes(b"cut")
    leftovers = [store / f"{name[0]}shard-7-0.safetensors.tmp{name[1]}" for name in ((".", ""), (".", ".rows"),
                                                                                   ("..", ".tmp"))]
    for path in leftovers:
        path.touch()
    run(settings(tiny_target, answers, store))
    assert not any(path.exists() for path in leftovers)
    for name in ("shard-000001.safetensors", "manifest.json", "rejects.jsonl"):
        assert (store / name).read_bytes() == (finished / name).read_bytes()
    dataclasses.replace(manifest, complete=False, shards=manifest.shards[:2]).save(store)
    (store / "shard-000001.safetensors").unlink()
    with pytest.raises(EyasError, match="last committed shard is missing"):
        run(settings(tiny_target, answers, store))


def test_another_extraction_is_refused_with_all_differences(tiny_target: Path, answers: Path, store: Path,
                                                            tmp_path: Path) -> None:
    other = tmp_path / "other.jsonl"
    other.write_bytes(answers.read_bytes() + b"\n")
    before = (store / "manifest.json").read_bytes()
    with pytest.raises(ContractMismatch) as caught:
        run(settings(tiny_target, other, store, aux_layers=(0, 3, 4), max_length=99, overlong="truncate"))
    assert [m.field for m in caught.value.mismatches] == [
        "capture.aux_layer_ids", "capture.max_length", "source.input_sha256", "source.overlong"]
    assert (store / "manifest.json").read_bytes() == before


def test_a_manifest_of_another_extraction_is_refused(tiny_target: Path, answers: Path, store: Path) -> None:
    """Copied beside settings that fit: its shards would be taken for this run's."""
    dataclasses.replace(Manifest.load(store), source_sha256="0" * 64).save(store)
    with pytest.raises(ContractMismatch, match=r"manifest\.source_sha256"):
        run(RunConfig(tiny_target, answers, store, shard_tokens=300, batch_tokens=128))


def test_another_target_is_refused(poisoned_target: Path, answers: Path, store: Path) -> None:
    with pytest.raises(ContractMismatch, match="weights_fingerprint"):
        run(settings(poisoned_target, answers, store))


def test_a_folder_of_something_else_is_refused(tiny_target: Path, answers: Path, tmp_path: Path) -> None:
    (tmp_path / "letter.txt").write_text("dear")
    with pytest.raises(InvalidInput, match=r"letter\.txt"):
        run(settings(tiny_target, answers, tmp_path))


def test_two_writers_at_once_are_refused(tiny_target: Path, answers: Path, store: Path) -> None:
    from eyas_extract.run import describe
    from eyas_extract.store import StoreWriter

    writer = StoreWriter(store, *describe(settings(tiny_target, answers, store), "cpu"))
    with pytest.raises(InvalidInput, match="another process of eyas"):
        run(settings(tiny_target, answers, store))
    writer.close()
    run(settings(tiny_target, answers, store))


def test_samples_with_nan_states_are_rejected(poisoned_target: Path, answers: Path, tmp_path: Path) -> None:
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    cloudy = {row["id"] for row in rows if any(" cloud" in m["content"] for m in row["messages"])}
    assert 0 < len(cloudy) < len(rows)
    summary = run(settings(poisoned_target, answers, tmp_path / "s"))
    rejects = [json.loads(line) for line in (tmp_path / "s" / "rejects.jsonl").read_text().splitlines()]
    assert {r["id"] for r in rejects} == cloudy
    assert rejects == sorted(rejects, key=lambda r: r["line"])
    assert all("non-finite values in the states of layer 1" in r["reason"] for r in rejects)
    assert summary.samples == len(rows) - len(cloudy)
    for shard in Manifest.load(tmp_path / "s").shards:
        tensors = load_file(tmp_path / "s" / shard.file)
        assert tensors["sample_offsets"].tolist()[-1] == len(tensors["input_ids"])
        assert len(tensors["input_ids"]) == sum(s.tokens for s in shard.samples)
        assert torch.isfinite(tensors["aux_hidden_states"]).all()


def test_fp16_overflow_is_named(tiny_target: Path) -> None:
    with Capture(load_target(tiny_target, "cpu"), (1, 3, 4)) as capture:
        states = torch.ones(2, 256)
        assert not state_fault(states, capture)
        states[0, 70] = torch.inf
        states[:, 192:] = 0
        assert state_fault(states, capture) == (
            "1 non-finite values in the states of layer 3; all states of the last layer are zero")


def wrong_layer(capture: Capture) -> None:
    while capture.handles:
        capture.handles.pop().remove()
    for k in (1, 3, 4, 7):
        capture.handles.append(capture.target.layers[k - (k == 3)].register_forward_hook(capture._hook(k)))


def no_norm(capture: Capture) -> None:
    capture.target.norm.register_forward_pre_hook(lambda module, args: (args[0] * 0 + 1,))
    object.__setattr__(capture.target, "norm", torch.nn.Identity())


def no_output(capture: Capture) -> None:
    capture.handles.pop().remove()


@pytest.mark.parametrize(("spoil", "message"), [(no_norm, r"head\(norm\(last\)\) picks"), (no_output, "no output of"),
                                                (wrong_layer, r"layer 3 differs from hidden_states\[4\]")])
def test_a_target_that_hands_out_wrong_states_is_refused(tiny_target: Path, spoil: Callable[[Capture], None],
                                                         message: str) -> None:
    target = load_target(tiny_target, "cpu")
    with Capture(target, (1, 3, 4)) as capture:
        assert "equal hidden_states[k+1]" in capture.check([1, 2, 3, 4])
        spoil(capture)
        with pytest.raises(InvalidInput, match=message):
            capture.check([1, 2, 3, 4])


def test_nothing_is_stored_before_the_check(tiny_target: Path, answers: Path, tmp_path: Path,
                                            monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capture_module, "relative_error", lambda found, wanted: float("nan"))
    with pytest.raises(InvalidInput, match="Nothing was stored"):
        run(settings(tiny_target, answers, tmp_path / "s"))
    assert not list((tmp_path / "s").glob("shard*"))


def test_no_row_to_train_on(tiny_target: Path, tmp_path: Path) -> None:
    data = tmp_path / "d.jsonl"
    data.write_text('{"messages": [{"role": "user", "content": "a"}]}\n' * 2 + "{\n")
    with pytest.raises(EyasError, match="0 of 3 rows can be trained on: 2 x no assistant turn; 1 x not JSON"):
        run(settings(tiny_target, data, tmp_path / "s"))
    assert len((tmp_path / "s" / "rejects.jsonl").read_text().splitlines()) == 3


def test_a_store_without_shards_holds_nobody_to_its_settings(tiny_target: Path, answers: Path, finished: Path,
                                                             tmp_path: Path) -> None:
    """Prompts given for answers, and then the answers."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"messages": [{"role": "user", "content": "a"}]}\n')
    with pytest.raises(EyasError, match="1 x no assistant turn"):
        run(settings(tiny_target, prompts, tmp_path / "s", max_length=100))
    run(settings(tiny_target, answers, tmp_path / "s"))
    for name in ("contract.json", "source.json", "manifest.json", "rejects.jsonl"):
        assert (tmp_path / "s" / name).read_bytes() == (finished / name).read_bytes()


@pytest.mark.parametrize("bad", [{"aux_layers": (3, 1)}, {"aux_layers": (1, 99)}, {"shard_tokens": 0},
                                 {"batch_tokens": 1}, {"max_length": 0}, {"ahead": 0}, {"encoders": -1}, {"tp": 0},
                                 {"engines": 0}])
def test_settings_that_do_not_fit_are_refused(tiny_target: Path, answers: Path, tmp_path: Path,
                                              bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="settings"):
        run(settings(tiny_target, answers, tmp_path / "s", **bad))
    assert not (tmp_path / "s").exists()


def test_targets_without_tokenizer_or_template_are_refused(tiny_target: Path, answers: Path, tmp_path: Path) -> None:
    bare = Path(shutil.copytree(tiny_target, tmp_path / "bare"))
    (bare / "chat_template.jinja").unlink()
    with pytest.raises(InvalidInput, match="no chat template"):
        run(settings(bare, answers, tmp_path / "s"))
    with pytest.raises(InvalidInput, match=r"config\.json"):
        run(settings(tmp_path / "absent", answers, tmp_path / "s"))


@pytest.mark.parametrize("name", ["generation_config.json", "tokenizer_config.json"])
@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_settings_of_the_target_that_cannot_be_read(tiny_target: Path, answers: Path, tmp_path: Path, name: str,
                                                    text: str) -> None:
    broken = Path(shutil.copytree(tiny_target, tmp_path / "broken"))
    (broken / name).write_bytes(text.encode("latin-1"))
    with pytest.raises(InvalidInput, match=rf"{name}: (not JSON|a JSON list)"):
        run(settings(broken, answers, tmp_path / "s"))
    assert not (tmp_path / "s").exists()
    (broken / name).write_text('{"eos_token_id": "x"}')
    if name == "generation_config.json":
        with pytest.raises(InvalidInput, match="eos_token_id 'x'"):
            run(settings(broken, answers, tmp_path / "s"))


@pytest.mark.parametrize(("name", "found"), [("file", "a folder cannot be made here"),
                                             ("file/s", "a folder cannot be made here"),
                                             ("closed", "a folder that cannot be written")])
def test_places_that_cannot_be_written_are_refused_at_once(tiny_target: Path, answers: Path, finished: Path,
                                                           tmp_path: Path, name: str, found: str,
                                                           monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("eyas_extract.disk.os.access", lambda path, mode: path != tmp_path / "closed")
    with pytest.raises(InvalidInput, match=rf"{found}.*Give another "):
        run(settings(tiny_target, answers, tmp_path / name))
    with pytest.raises(InvalidInput, match=found):
        split(finished, (tmp_path / name, tmp_path / "b"), 0.5)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EFBIG])
def test_a_full_disk_is_an_error_for_users(tmp_path: Path, code: int) -> None:
    with pytest.raises(EyasError, match="no room to write"), room_for(tmp_path):
        raise OSError(code, "full")
    with pytest.raises(PermissionError), room_for(tmp_path):
        raise PermissionError(errno.EACCES, "no")


def test_a_really_full_device(tmp_path: Path) -> None:
    from eyas_extract.store import write_safetensors

    (tmp_path / ".shard.tmp").symlink_to("/dev/full")
    with pytest.raises(EyasError, match="No space left on device"), room_for(tmp_path):
        write_safetensors(tmp_path / "shard", {"a": torch.ones(4)}, {})
    assert list(tmp_path.iterdir()) == []
