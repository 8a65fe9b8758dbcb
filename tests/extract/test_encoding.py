"""Encoding by several processes gives what one gives, in the same order, from any line on."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas_extract.config import RunConfig
from eyas_extract.pending import shards
from eyas_extract.target import stop_ids
from eyas_extract.template import ChatTemplate


def test_same_shards_by_two_processes(tiny_target: Path, answers: Path, tmp_path: Path) -> None:
    lines = answers.read_text().splitlines()
    data = tmp_path / "data.jsonl"
    data.write_text("\n".join([line.replace('"tiny-0-', f'"{n}-') for n in range(5) for line in lines] + ["{"]) + "\n")
    config = RunConfig(tiny_target, data, tmp_path / "store", shard_tokens=1000, encoders=1)
    template = ChatTemplate(tiny_target, sorted(stop_ids(tiny_target)))
    alone = list(shards(config, template, 1))
    assert len(alone) > 3
    together = list(shards(dataclasses.replace(config, encoders=2), template, alone[0].next_line))
    assert together == alone[1:]
