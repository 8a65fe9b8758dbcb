"""Folders made to hurt: an error in every case, in time, and without growing in memory."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import drafts
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import samples
from eyas_contract import Contract, CorruptFile, EyasError, InvalidInput
from eyas_contract.canonical import to_plain
from eyas_contract.checkpoint_files import read_checkpoint
from eyas_contract.engines import check, render
from eyas_contract.safetensors_header import MAX_VALUE_BYTES, read_header, read_values

DEEP = "[" * 200_000 + "]" * 200_000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return drafts.draft().write(tmp_path / "draft")


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return drafts.target().write(tmp_path / "target")


def raw(header: str | bytes, data: int = 0, length: int | None = None) -> bytes:
    body = header.encode() if isinstance(header, str) else header
    return struct.pack("<Q", len(body) if length is None else length) + body + b"\0" * data


def entry(start: int, end: int, shape: list[object] | None = None, dtype: object = "U8") -> dict[str, object]:
    return {"dtype": dtype, "shape": [end - start] if shape is None else shape, "data_offsets": [start, end]}


BROKEN: dict[str, bytes] = {
    "empty": b"", "seven bytes": b"1234567", "a header of 2^60 bytes": raw("{}", length=2**60),
    "a header of 2^64 - 1 bytes": raw("{}", length=2**64 - 1), "longer than the file": raw("{}", length=3),
    "no JSON": raw("{"), "no object": raw("[]"), "not UTF-8": raw(b"\xff\xfe\xff"), "deep": raw(DEEP),
    "a key twice": raw('{"a":%s,"a":%s}' % ((json.dumps(entry(0, 4)),) * 2), 4),
    "overlap": raw(json.dumps({"a": entry(0, 8), "b": entry(4, 12)}), 12),
    "gap": raw(json.dumps({"a": entry(0, 4), "b": entry(8, 12)}), 12),
    "past the end": raw(json.dumps({"a": entry(0, 100)}), 4),
    "data after the end": raw(json.dumps({"a": entry(0, 4)}), 9),
    "backwards": raw(json.dumps({"a": entry(4, 0, [4])}), 4), "negative": raw(json.dumps({"a": entry(-4, 0)}), 4),
    "huge product": raw(json.dumps({"a": entry(0, 4, [2**62] * 16)}), 4),
    "huge number": raw('{"a":{"dtype":"U8","shape":[1' + "0" * 5000 + '],"data_offsets":[0,4]}}', 4),
    "a thousand axes": raw(json.dumps({"a": entry(0, 1, [1] * 1000)}), 1),
    "fractions": raw(json.dumps({"a": entry(0, 4, [4.0])}), 4),
    "booleans": raw(json.dumps({"a": entry(0, 1, [True])}), 1),
    "strange dtype": raw(json.dumps({"a": entry(0, 4, dtype="Q9")}), 4),
    "dtype a list": raw(json.dumps({"a": entry(0, 4, dtype=["U8"])}), 4),
    "metadata of numbers": raw(json.dumps({"__metadata__": {"a": 1}})), "tensor no object": raw('{"a":3}'),
    "half a surrogate": raw(json.dumps({"\ud800x": entry(0, 4)}), 4),
    "half a byte": raw(json.dumps({"a": entry(0, 1, [3], "F4")}), 1),
}


@pytest.mark.parametrize("name", BROKEN)
def test_broken_files_are_refused(name: str, folder: Path, target: Path) -> None:
    (folder / "model.safetensors").write_bytes(BROKEN[name])
    with pytest.raises(CorruptFile):
        check(folder, target)


def test_a_large_header_is_not_even_read(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    with path.open("wb") as sink:
        sink.write(struct.pack("<Q", 2**33))
        sink.truncate(2**34)  # a hole of 16 GiB: the length is within the file
    with pytest.raises(CorruptFile, match="header of"):
        read_header(path)


@pytest.mark.parametrize("text", [
    '{"weight_map": {"a": "../../etc/passwd"}}', '{"weight_map": {"a": "/etc/passwd"}}', '{"weight_map": {"a": "x"}}',
    '{"weight_map": {"a": 3}}', '{"weight_map": ["a"]}', '{"weight_map": {"a": ["b"]}}', "{}", "[]", "{", DEEP,
    '{"weight_map": {"a": "a\\u0000b"}}', '{"weight_map": {"a": "' + "x" * 5000 + '"}}', '{"weight_map": {"a": "."}}'])
def test_an_index_that_leads_astray(text: str, folder: Path, target: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(text)
    with pytest.raises(InvalidInput):
        check(folder, target)


def test_shards_by_index(folder: Path, target: Path) -> None:
    whole = drafts.draft().tensors
    (folder / "model.safetensors").unlink()
    names = sorted(whole)
    parts = {"model-00001.safetensors": names[:7], "model-00002.safetensors": names[7:]}
    for file, chosen in parts.items():
        drafts.write_safetensors(folder / file, {n: whole[n] for n in chosen})
    index = {n: file for file, chosen in parts.items() for n in chosen}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))
    assert not [f for f in check(folder, target) if f.severity != "note"]
    drafts.write_safetensors(folder / "model-00002.safetensors", {n: whole[n] for n in names})
    with pytest.raises(InvalidInput, match="another file"):
        check(folder, target)


def test_files_that_one_reader_takes_and_another_leaves(folder: Path, target: Path) -> None:
    """Engines follow an index past a newer model.safetensors, and without one read every safetensors file."""
    whole = drafts.draft().tensors
    index, old = folder / "model.safetensors.index.json", folder / "model-00001-of-00001.safetensors"
    drafts.write_safetensors(old, whole)
    with pytest.raises(InvalidInput, match="another file"):
        check(folder, target)
    index.write_text(json.dumps({"weight_map": dict.fromkeys(whole, old.name)}))
    with pytest.raises(InvalidInput, match="which names other files"):
        check(folder, target)
    (folder / "model.safetensors").unlink()
    assert not [f for f in check(folder, target) if f.severity != "note"]
    index.unlink()
    old.rename(folder / "model.safetensors")
    drafts.write_safetensors(folder / "consolidated.safetensors", {"layers.0.attention.wq.weight": drafts.ones(64)})
    assert not [f for f in check(folder, target) if f.severity != "note"]
    (folder / "consolidated.safetensors").rename(folder / "adapter.safetensors")
    assert "tensor-dropped" in {f.code for f in check(folder, target)}


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json", "contract.json",
                                  "tokenizer.json"])
def test_links_out_of_the_folder(name: str, folder: Path, target: Path, tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.write_bytes((folder / name).read_bytes() if (folder / name).exists() else b"{}")
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to(outside)
    with pytest.raises(InvalidInput, match="link"):
        check(folder, target)


def test_a_dangling_and_an_endless_link(folder: Path, target: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "absent")
    with pytest.raises(InvalidInput):
        check(folder, target)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "model.safetensors")
    with pytest.raises((InvalidInput, OSError)):
        check(folder, target)


def test_links_within_the_download_cache_are_followed(tmp_path: Path, target: Path) -> None:
    home = tmp_path / "models--a--b"
    real = drafts.draft().write(home / "blobs")
    snapshot = home / "snapshots" / "0123"
    snapshot.mkdir(parents=True)
    for path in real.iterdir():
        (snapshot / path.name).symlink_to(f"../../blobs/{path.name}")
    assert not [f for f in check(snapshot, target) if f.severity != "note"]
    other = (home / "snapshots").rename(home / "others") / "0123"
    with pytest.raises(InvalidInput, match="a link to"):
        check(other, target)


def test_an_index_that_is_a_link_or_of_gigabytes_is_not_read(folder: Path, tmp_path: Path) -> None:
    """By any reader of a checkpoint: `check` looks at every file beforehand, trainer and extraction do not."""
    index = folder / "model.safetensors.index.json"
    (tmp_path / "outside").write_text(json.dumps({"weight_map": {"fc.weight": "model.safetensors"}}))
    index.symlink_to(tmp_path / "outside")
    with pytest.raises(InvalidInput, match="a link to"):
        read_checkpoint(folder)
    index.unlink()
    with index.open("wb") as sink:
        sink.truncate(MAX_VALUE_BYTES + 1)
    with pytest.raises(InvalidInput, match=f"{MAX_VALUE_BYTES + 1} bytes"):
        read_checkpoint(folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.safetensors.index.json",
                                  "contract.json", "tokenizer.json", "train_meta.json", "extra.json"])
def test_a_pipe_does_not_hang(name: str, folder: Path, target: Path) -> None:
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    with pytest.raises(InvalidInput):
        check(folder, target)


@pytest.mark.parametrize("text", ["", "[", "[]", "3", DEEP, '{"hidden_size": ' + "9" * 5000 + "}", "\ud800"])
def test_a_config_that_is_none(text: str, folder: Path, target: Path) -> None:
    for place in (folder, target):
        kept = (place / "config.json").read_bytes()
        (place / "config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
        with pytest.raises(InvalidInput):
            check(folder, target)
        (place / "config.json").write_bytes(kept)


@pytest.mark.parametrize("text", ["{", "[]", DEEP, "\ud800"])
def test_a_tokenizers_config_that_is_none(text: str, folder: Path, target: Path) -> None:
    (target / "tokenizer_config.json").write_bytes(text.encode("utf-8", "surrogatepass"))
    with pytest.raises(InvalidInput, match=r"tokenizer_config\.json"):
        check(folder, target)


@pytest.mark.parametrize("changes", [{"num_kv_heads": 0}, {"num_heads": 0}, {"rms_norm_eps": 10**400}])
def test_a_contract_of_impossible_numbers(changes: dict[str, int], folder: Path, target: Path) -> None:
    plain = to_plain(samples.contract())
    plain["draft"] |= changes
    (folder / "contract.json").write_text(json.dumps(plain))
    with pytest.raises(InvalidInput):
        Contract.load(folder)
    assert "contract-unreadable" in {f.code for f in check(folder, target)}


def test_half_a_surrogate_can_be_printed(folder: Path, target: Path) -> None:
    (folder / "config.json").write_text(json.dumps(drafts.draft(architectures=["\ud800"]).config))
    assert "\\ud800" in render(check(folder, target)).encode("utf-8").decode("utf-8")
    str(InvalidInput("\ud800", "a", "b", "c")).encode("utf-8")


def test_a_config_of_gigabytes(folder: Path, target: Path) -> None:
    with (folder / "config.json").open("r+b") as sink:
        sink.truncate(2**33)
    with pytest.raises(InvalidInput, match="bytes"):
        check(folder, target)


def test_a_map_of_gigabytes_is_not_read(folder: Path, target: Path) -> None:
    count = 2**31 - 1
    config = drafts.draft(draft_vocab_size=count).config
    (folder / "config.json").write_text(json.dumps(config))
    header = json.dumps({"d2t": {"dtype": "I64", "shape": [count], "data_offsets": [0, count * 8]}}).encode()
    with (folder / "model.safetensors").open("wb") as sink:
        sink.write(struct.pack("<Q", len(header)) + header)
        sink.truncate(8 + len(header) + count * 8)
    assert "vocab-size" in {f.code for f in check(folder, target)}
    with pytest.raises(InvalidInput, match="read whole"):
        read_values(read_checkpoint(folder)["d2t"])


JSON = st.recursive(st.none() | st.booleans() | st.integers(-10, 10**6) | st.floats() | st.text(max_size=8),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
                    max_leaves=6)
KEYS = sorted(set(drafts.draft().config) | {
    "rope_parameters", "num_aux_hidden_states", "fc_norm", "norm_before_fc", "target_hidden_size", "attention_bias",
    "quantization_config", "transformer_layer_config", "eagle_aux_hidden_state_layer_ids", "partial_rotary_factor",
    "intermediate_size_mlp"})


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(KEYS), JSON, min_size=1, max_size=3),
       inner=st.dictionaries(st.sampled_from(["eagle_aux_hidden_state_layer_ids", "use_aux_hidden_state"]), JSON))
def test_any_config_gets_an_answer(changes: dict[str, object], inner: dict[str, object], folder: Path,
                                   target: Path) -> None:
    config = drafts.draft().config
    config["eagle_config"] = config["eagle_config"] | inner
    (folder / "config.json").write_text(json.dumps(config | changes))
    for engine, version in (("sglang", "0.5.20"), ("sglang", "0.5.10"), ("vllm", "0.33.0")):
        try:
            findings = check(folder, target, engine, version, gpu="H100", tp=2)
        except EyasError:
            continue
        assert all(isinstance(f.found, str) for f in findings)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.dictionaries(st.sampled_from(sorted(drafts.target().config)), JSON, min_size=1, max_size=3))
def test_any_target_gets_an_answer(changes: dict[str, object], folder: Path, target: Path) -> None:
    (target / "config.json").write_text(json.dumps(drafts.target().config | changes))
    try:
        check(folder, target, gpu="H100", tp=2)
    except EyasError:
        return


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.integers(0, 1200), byte=st.integers(0, 255))
def test_any_flipped_byte_of_a_header_gets_an_answer(at: int, byte: int, folder: Path, target: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:at] + bytes([byte]) + whole[at + 1:])
    try:
        check(folder, target)
    except EyasError:
        pass
    finally:
        path.write_bytes(whole)


def test_memory_stays_small_on_a_large_pair(tmp_path: Path) -> None:
    """A target of 64 shards of 10 GB and a draft of 4 GB, as holes: under 300 MiB in a process of its own."""
    target = drafts.target(hidden_size=64).write(tmp_path / "target")
    for i in range(64):
        with (target / f"model-{i:05}.safetensors").open("wb") as sink:
            sink.truncate(10_000_000_000)
    folder = drafts.draft().write(tmp_path / "draft")
    script = ("import sys\nfrom eyas_contract.engines import check\ncheck(*sys.argv[1:3], version=None)\n"
              "print(next(line for line in open('/proc/self/status') if line.startswith('VmHWM')).split()[1])\n")
    done = subprocess.run([sys.executable, "-c", script, str(folder), str(target)], capture_output=True, text=True,
                          check=True)
    assert int(done.stdout) < 300 * 1024, f"{done.stdout} KiB"
