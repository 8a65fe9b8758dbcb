"""Templates that print the date: one date a store, and one a file of answers, however many days they take."""

from __future__ import annotations

import dataclasses
import datetime
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers.utils import chat_template_utils

import tiny
from eyas_contract import Manifest
from eyas_contract.canonical import digest
from eyas_extract import template as template_module
from eyas_extract.check import check
from eyas_extract.config import PlanConfig, RegenerateConfig, RepairConfig, RunConfig, ShowConfig
from eyas_extract.plan import plan
from eyas_extract.provenance import token_faults
from eyas_extract.regenerate import regenerate
from eyas_extract.repair import repair
from eyas_extract.run import run
from eyas_extract.show import show

On = Callable[[str], None]


@pytest.fixture
def target(tiny_target: Path, tmp_path: Path) -> Path:
    """The tiny target, whose template says what day it is."""
    out = Path(shutil.copytree(tiny_target, tmp_path / "target"))
    (out / "chat_template.jinja").write_text("{{ strftime_now('%d %b %Y') }}\n" + tiny.CHATML)
    return out


@pytest.fixture
def on(monkeypatch: pytest.MonkeyPatch) -> On:
    """Makes it another day, for us and for transformers."""
    def inner(day: str) -> None:
        class Clock(datetime.datetime):
            @classmethod
            def now(cls, tz: Any = None) -> Any:
                return cls.fromisoformat(day)

        class Today(datetime.date):
            @classmethod
            def today(cls) -> Any:
                return cls.fromisoformat(day)

        monkeypatch.setattr(chat_template_utils, "datetime", Clock)
        monkeypatch.setattr(template_module, "date", Today, raising=False)
    return inner


@pytest.fixture
def data(tmp_path: Path) -> Path:
    rows = tiny.conversations(12)
    for row in rows:
        row["messages"] = [*row["messages"], {"role": "assistant", "content": "one two"}]  # type: ignore[misc]
    return tiny.write_jsonl(tmp_path / "data.jsonl", rows)


def contents(store: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(store.glob("shard-*"))}


def cut_short(store: Path) -> None:
    manifest = Manifest.load(store)
    dataclasses.replace(manifest, shards=manifest.shards[:1], complete=False).save(store)


def test_a_store_keeps_the_date_that_it_was_begun_with(target: Path, data: Path, tmp_path: Path, on: On) -> None:
    store = tmp_path / "store"
    config = RunConfig(target, data, store, shard_tokens=150, batch_tokens=128)
    on("2026-01-31")
    run(config)
    whole = contents(store)
    assert len(whole) > 2
    on("2026-02-01")
    cut_short(store)
    run(config)
    assert contents(store) == whole
    assert not token_faults(store, target, data)
    (store / "shard-000001.safetensors").unlink()
    assert not repair(RepairConfig(**vars(config))).after.damage
    assert contents(store) == whole
    cut_short(store)
    run(dataclasses.replace(config, encoders=2))
    assert contents(store) == whole
    assert json.loads((store / "source.json").read_text())["template_date"] == "2026-01-31"


def test_a_store_begun_before_dates_were_kept_goes_on(target: Path, data: Path, tmp_path: Path, on: On) -> None:
    store = tmp_path / "store"
    config = RunConfig(target, data, store, shard_tokens=150, batch_tokens=128)
    on("2026-01-31")
    run(config)
    cut_short(store)
    source = json.loads((store / "source.json").read_text())
    del source["template_date"], source["longest"]
    (store / "source.json").write_text(json.dumps(source))
    dataclasses.replace(Manifest.load(store), source_sha256=digest(source)).save(store)
    on("2026-02-01")
    run(config)
    assert Manifest.load(store).complete
    assert not check(store).damage
    assert "template_date" not in json.loads((store / "source.json").read_text())


def test_answers_hand_their_date_on(target: Path, tmp_path: Path, on: On) -> None:
    prompts, out = tiny.write_jsonl(tmp_path / "prompts.jsonl", tiny.conversations(3)), tmp_path / "answers.jsonl"
    config = RegenerateConfig(target, prompts, out, max_new_tokens=4)
    on("2026-01-31")
    regenerate(config)
    answers = out.read_bytes()
    on("2026-02-01")
    out.rename(tmp_path / "answers.jsonl.partial")
    (tmp_path / "answers.jsonl.partial").write_bytes(b"")
    regenerate(config)
    assert out.read_bytes() == answers
    run(RunConfig(target, out, tmp_path / "store"))
    assert json.loads((tmp_path / "store" / "source.json").read_text())["template_date"] == "2026-01-31"
    assert "31 Jan 2026" in "".join(show(ShowConfig(target, out)).tokens)
    assert plan(PlanConfig(target, out, tmp_path / "store", probe=False)).samples == 3


def test_templates_without_a_date_change_nothing(tiny_target: Path, data: Path, tmp_path: Path) -> None:
    run(RunConfig(tiny_target, data, tmp_path / "store"))
    assert "template_date" not in json.loads((tmp_path / "store" / "source.json").read_text())
