"""TargetSpec and fingerprints from real folders."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from eyas_contract import InvalidInput, Rope, TargetSpec
from eyas_contract.fingerprint import SAMPLE_BYTES, chat_template_sha256, tokenizer_sha256, weights_fingerprint


def test_reads_the_tiny_target(tiny_target: Path) -> None:
    spec = TargetSpec.from_folder(tiny_target)
    assert (spec.architecture, spec.num_layers, spec.hidden_size) == ("LlamaForCausalLM", 8, 64)
    assert spec.rope == Rope("default", 10000.0)
    assert spec.dtype == "float32"
    assert all(len(d) == 64 for d in (spec.tokenizer_sha256, spec.chat_template_sha256, spec.weights_fingerprint))


@pytest.mark.parametrize(("file", "field"), [
    ("model.safetensors", "weights_fingerprint"), ("tokenizer.json", "tokenizer_sha256"),
    ("chat_template.jinja", "chat_template_sha256")])
def test_one_flipped_byte_is_another_target(tiny_target: Path, tmp_path: Path, file: str, field: str) -> None:
    copy = tmp_path / "target"
    shutil.copytree(tiny_target, copy)
    raw = bytearray((copy / file).read_bytes())
    raw[len(raw) // 2] ^= 1
    (copy / file).write_bytes(raw)
    before, after = TargetSpec.from_folder(tiny_target), TargetSpec.from_folder(copy)
    assert getattr(before, field) != getattr(after, field)


@pytest.mark.parametrize(("config", "rope"), [
    ({"rope_theta": 5e4}, Rope("default", 5e4)),
    ({"rope_theta": 5e4, "rope_scaling": {"type": "yarn", "factor": 64.0}}, Rope("yarn", 5e4, (("factor", 64.0),))),
    ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "llama3", "factor": 8.0}},
     Rope("llama3", 1e6, (("factor", 8.0),))),
    ({}, Rope("default", 1e4)),
])
def test_every_spelling_of_rope(config: dict[str, object], rope: Rope) -> None:
    assert Rope.from_config(config) == rope
    assert Rope.from_config({"rope_parameters": rope.to_config()}) == rope


def test_nested_text_config(tmp_path: Path) -> None:
    text = {"num_hidden_layers": 61, "hidden_size": 7168, "vocab_size": 163840, "model_type": "kimi_k2"}
    (tmp_path / "config.json").write_text(json.dumps(
        {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": text}), encoding="utf-8")
    spec = TargetSpec.from_folder(tmp_path)
    assert (spec.num_layers, spec.hidden_size, spec.vocab_size, spec.model_type) == (61, 7168, 163840, "kimi_k2")


def test_bad_folders(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="no such file"):
        TargetSpec.from_folder(tmp_path)
    (tmp_path / "config.json").write_text("{", encoding="utf-8")
    with pytest.raises(InvalidInput, match="not JSON"):
        TargetSpec.from_folder(tmp_path)
    (tmp_path / "config.json").write_text('{"hidden_size": 1}', encoding="utf-8")
    with pytest.raises(InvalidInput, match="no num_hidden_layers, vocab_size"):
        TargetSpec.from_folder(tmp_path)


@pytest.mark.parametrize(("key", "value"), [
    ("max_position_embeddings", None), ("max_position_embeddings", "4096"), ("rms_norm_eps", None),
    ("rope_parameters", [1]), ("rope_parameters", {"rope_theta": "x"}), ("rope_theta", "1e6"),
    ("quantization_config", "fp8"), ("architectures", {})])
def test_values_that_are_none_are_named(key: str, value: object, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(
        {"num_hidden_layers": 8, "hidden_size": 64, "vocab_size": 256, key: value}), encoding="utf-8")
    with pytest.raises(InvalidInput, match=key):
        TargetSpec.from_folder(tmp_path)


def test_files_of_other_names_sizes_or_ends_are_other_weights(tmp_path: Path) -> None:
    path, content = tmp_path / "a.safetensors", bytes(40 * SAMPLE_BYTES)
    path.write_bytes(content)
    whole = weights_fingerprint(tmp_path)
    for other in (content[:-1] + b"\1", content[:-1]):
        path.write_bytes(other)
        assert weights_fingerprint(tmp_path) != whole
    path.write_bytes(content)
    assert weights_fingerprint(tmp_path) == whole
    path.rename(tmp_path / "b.safetensors")
    assert weights_fingerprint(tmp_path) != whole


def test_every_file_of_an_older_tokenizer_counts(tmp_path: Path) -> None:
    assert tokenizer_sha256(tmp_path) == ""
    found = set()
    for name in ("tokenizer.model", "vocab.json", "merges.txt", "tiktoken.model"):
        (tmp_path / name).write_text(name)
        found.add(tokenizer_sha256(tmp_path))
    assert len(found) == 4


def test_a_list_of_templates_has_a_digest_too(tmp_path: Path) -> None:
    """As older tokenizers keep them, one for tools; the order of their keys is no difference."""
    config, one = tmp_path / "tokenizer_config.json", {"name": "default", "template": "{{ x }}"}
    digests = []
    for template in (one, dict(reversed(one.items())), one | {"template": "{{ y }}"}):
        config.write_text(json.dumps({"chat_template": [template]}))
        digests.append(chat_template_sha256(tmp_path))
    assert digests[0] == digests[1] != digests[2]


def test_a_link_to_nothing_is_named(tiny_target: Path, tmp_path: Path) -> None:
    """As a download cache leaves it whose blobs were removed."""
    folder = Path(shutil.copytree(tiny_target, tmp_path / "target"))
    (folder / "model-00002.safetensors").symlink_to(tmp_path / "nowhere")
    with pytest.raises(InvalidInput, match=r"model-00002\.safetensors: a broken link"):
        TargetSpec.from_folder(folder)
