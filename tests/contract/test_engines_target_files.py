"""The target's weight files before the load: absent, cut, or without what their index promises."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import drafts
import pytest
from drafts import bf16, write_safetensors

from eyas_contract.checkpoint_files import INDEX_NAME, SINGLE_NAME, weight_sizes
from eyas_contract.engines import check
from eyas_contract.engines.findings import Finding

SHARDS = {"a-00001-of-00002.safetensors": ["model.norm.weight", "lm_head.weight"],
          "a-00002-of-00002.safetensors": ["model.embed_tokens.weight"]}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """Two shards with an index."""
    folder = drafts.target().write(tmp_path / "target")
    (folder / SINGLE_NAME).unlink(missing_ok=True)
    for shard, names in SHARDS.items():
        write_safetensors(folder / shard, {name: bf16([8, 8]) for name in names})
    index = {"weight_map": {name: shard for shard, names in SHARDS.items() for name in names}}
    (folder / INDEX_NAME).write_text(json.dumps(index))
    return folder


def found(target: Path, tmp_path: Path) -> list[Finding]:
    return [f for f in check(drafts.draft().write(tmp_path / "draft"), target, gpu="H200") if f.code == "target-files"]


def test_whole_shards_are_right_whatever_else_lies_there(target: Path, tmp_path: Path) -> None:
    sizes = weight_sizes(target)
    write_safetensors(target / "consolidated.safetensors", {"norm.weight": bf16([8, 8])})
    assert found(target, tmp_path) == []
    assert weight_sizes(target) == sizes == [(target / shard).stat().st_size for shard in SHARDS]
    assert found(drafts.target().write(tmp_path / "config_only"), tmp_path) == []


def test_an_absent_shard(target: Path, tmp_path: Path) -> None:
    (target / "a-00002-of-00002.safetensors").unlink()
    [finding] = found(target, tmp_path)
    assert (finding.severity, finding.where) == ("error", f"target: {INDEX_NAME}")
    assert "a-00002-of-00002.safetensors" in finding.found


def test_every_cut_shard(target: Path, tmp_path: Path) -> None:
    for shard in SHARDS:
        content = (target / shard).read_bytes()
        (target / shard).write_bytes(content[:-1])
    assert [f.where for f in found(target, tmp_path)] == [f"target: {shard}" for shard in SHARDS]


def test_tensors_that_are_not_where_the_index_places_them(target: Path, tmp_path: Path) -> None:
    write_safetensors(target / "a-00001-of-00002.safetensors", {"model.norm.weight": bf16([8, 8])})
    [finding] = found(target, tmp_path)
    assert finding.found.startswith("1 of 3 tensors")
    assert "lm_head.weight in a-00001-of-00002.safetensors" in finding.found
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    assert found(target, tmp_path) == []  # the head is the embedding


@pytest.mark.parametrize(("layers", "absent"), [(range(12), ""), (range(13), ""), (range(11), "1 of these: 11"),
                                                ((0, 1, *range(4, 12)), "2 of these: 2, 3"), ((), "")])
def test_layers_that_only_the_config_has(layers: Iterable[int], absent: str, tmp_path: Path) -> None:
    """Of 12; beside them a vision tower of other numbers, whose layers count for nothing."""
    target = drafts.target().write(tmp_path / "target")
    names = [f"model.layers.{i}.mlp.up_proj.weight" for i in layers] + ["vision.encoder.layers.0.weight"] * bool(layers)
    write_safetensors(target / SINGLE_NAME, dict.fromkeys([*names, "lm_head.weight"], bf16([8, 8])))
    assert [absent in f.found for f in found(target, tmp_path)] == [True] * bool(absent)
