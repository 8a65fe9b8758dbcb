"""Samples longer than the target has positions for, which no engine takes and whose states mean nothing."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from eyas_contract import Manifest, TargetSpec
from eyas_contract.canonical import digest
from eyas_contract.target import Rope
from eyas_extract.config import RunConfig
from eyas_extract.provenance import token_faults
from eyas_extract.run import describe, run
from eyas_extract.target import positions
from eyas_extract.template import ChatTemplate

LIMIT = 512  # positions of the tiny target


def row(name: str, tokens: int, template: ChatTemplate) -> dict[str, Any]:
    """A row of so many tokens, of which the answer's are the last."""
    for words in range(tokens):
        messages = [{"role": "user", "content": "copy" + " red" * words},
                    {"role": "assistant", "content": "red" + " red" * 8}]
        if len(template.encode(template.render(messages, None))) - 1 == tokens:  # the line's end is no sample's
            return {"id": name, "messages": messages}
    raise AssertionError(tokens)


@pytest.fixture
def data(tiny_target: Path, tmp_path: Path) -> Path:
    """Samples of few tokens, and of one less, as many and one more than there are positions."""
    template = ChatTemplate(tiny_target)
    rows = [row("few", 40, template), *(row(str(n), n, template) for n in (LIMIT - 1, LIMIT, LIMIT + 1))]
    path = tmp_path / "data.jsonl"
    path.write_text("".join(json.dumps(each) + "\n" for each in rows))
    return path


def lengths(store: Path) -> dict[str, int]:
    return {sample.id: sample.tokens for shard in Manifest.load(store).shards for sample in shard.samples}


def test_they_are_left_out_or_cut(tiny_target: Path, data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
                                  ) -> None:
    config = RunConfig(tiny_target, data, tmp_path / "rejected")
    done = run(config)
    assert lengths(config.out) == {"few": 40, "511": 511, "512": 512}
    assert done.rejected == {"N tokens, longer than max_length N": 1}
    assert [json.loads(line)["id"] for line in (config.out / "rejects.jsonl").read_text().splitlines()] == ["513"]
    assert "more than 512 tokens are left out: the target has 512 positions" in capfd.readouterr().err
    assert not token_faults(config.out, tiny_target, data)
    config = dataclasses.replace(config, out=tmp_path / "cut", overlong="truncate")
    run(config)
    assert lengths(config.out) == {"few": 40, "511": 511, "512": 512, "513": 512}
    assert "more than 512 tokens are cut" in capfd.readouterr().err
    assert not token_faults(config.out, tiny_target, data)


def test_sglang_takes_one_less(tiny_target: Path, data: Path, tmp_path: Path) -> None:
    config = RunConfig(tiny_target, data, tmp_path, engine="sglang")
    assert describe(config, "cpu")[1]["longest"] == LIMIT - 1
    assert "longest" not in describe(dataclasses.replace(config, max_length=LIMIT - 1), "cpu")[1]


def test_a_lower_max_length_is_left_alone(tiny_target: Path, data: Path, tmp_path: Path,
                                          capfd: pytest.CaptureFixture[str]) -> None:
    run(RunConfig(tiny_target, data, tmp_path / "s", max_length=100))
    assert lengths(tmp_path / "s") == {"few": 40}
    assert "positions" not in capfd.readouterr().err
    assert "longest" not in json.loads((tmp_path / "s" / "source.json").read_text())


def test_a_store_begun_without_the_limit_goes_on_without(tiny_target: Path, data: Path, tmp_path: Path) -> None:
    config = RunConfig(tiny_target, data, tmp_path / "s", shard_tokens=30)
    run(config)
    source = json.loads((config.out / "source.json").read_text())
    assert source.pop("longest") == LIMIT
    (config.out / "source.json").write_text(json.dumps(source))
    manifest = Manifest.load(config.out)
    dataclasses.replace(manifest, shards=manifest.shards[:1], complete=False, source_sha256=digest(source)).save(
        config.out)
    run(config)
    assert lengths(config.out)["513"] == LIMIT + 1
    assert not token_faults(config.out, tiny_target, data)


@pytest.mark.parametrize(("rope", "wanted"), [
    (Rope("default", 1e4), 100), (Rope("linear", 1e4, (("factor", 4.0),)), 400),
    (Rope("llama3", 1e4, (("factor", 8.0),)), 100),
    (Rope("yarn", 1e4, (("factor", 4.0), ("original_max_position_embeddings", 25))), 100)])
def test_positions_are_told_as_sglang_tells_them(tiny_target: Path, rope: Rope, wanted: int) -> None:
    spec = dataclasses.replace(TargetSpec.from_folder(tiny_target), max_position_embeddings=100, rope=rope)
    assert positions(spec) == wanted
