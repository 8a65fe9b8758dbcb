"""The benchmark against a scripted engine: what it counts, compares and writes."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

import tiny
from eyas_contract import InvalidInput
from eyas_serve import BenchConfig, ServeConfig, Server, bench_report, run_bench
from eyas_serve.bench_report import first_difference, table
from eyas_serve.client import Client, Generation
from eyas_serve.measure import measure
from eyas_serve.prompts import Prompt, load_prompts


@pytest.fixture
def config(scenario: Callable[..., ServeConfig], tiny_target: Path, tmp_path: Path) -> BenchConfig:
    served = scenario("ok", target=tiny_target, draft=tmp_path / "draft", preflight=False)
    prompts = tiny.write_jsonl(tmp_path / "prompts.jsonl", tiny.conversations(5))
    return BenchConfig(**{**vars(served), "prompts": prompts, "out": tmp_path / "out" / "bench.json",
                          "max_new_tokens": 12, "concurrency": 2})


def test_report_and_table(config: BenchConfig) -> None:
    result = run_bench(config)
    assert json.loads(config.out.read_text()) == result
    assert result["histogram"] == [10, 5, 0, 5]
    assert result["acceptance_length"] == 2.0
    assert result["tokens"] == 60
    assert result["outputs_identical"] is True
    assert result["engine"] == {"name": "SGLang", "version": "0.5.20"}
    assert result["baseline_tokens_per_second"] > 0
    assert "outputs identical" in table(result)


@pytest.mark.parametrize(("at_a_time", "unmeasured"), [(1, 2), (4, 4)])
def test_the_warm_up_meets_every_batch_size(config: BenchConfig, at_a_time: int, unmeasured: int) -> None:
    asked: list[int] = []

    class Asked(Client):
        def stream(self, input_ids: list[int], max_new_tokens: int, **options: object) -> Generation:
            asked.append(len(input_ids))
            return Generation((1,) * max_new_tokens, (), 0.0, "length", 0.0)

    prompts = [Prompt(str(i), (1,) * (i + 1)) for i in range(6)]
    run = measure(Asked("http://nowhere"), prompts, dataclasses.replace(config, concurrency=at_a_time), "test")
    assert sorted(asked[:unmeasured]) == list(range(1, unmeasured + 1))
    assert sorted(asked[unmeasured:]) == list(range(1, 7))
    assert run.tokens == 6 * config.max_new_tokens


def test_an_earlier_report_is_kept(config: BenchConfig) -> None:
    said: list[str] = []
    first = run_bench(config, said.append)
    second = run_bench(dataclasses.replace(config, against=config.out), said.append)
    assert json.loads((config.out.parent / "bench.1.json").read_text()) == first
    assert json.loads(config.out.read_text()) == second
    assert second["against"]["report"] == str(config.out)
    names = {path.name for path in config.out.parent.iterdir()}
    assert {"bench.1.csv", "bench.1.html", "bench.csv", "bench.html"} <= names
    assert sum("an earlier report is now" in line for line in said) == 3


def test_differing_outputs_are_named(config: BenchConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_OUTPUTS", "differ")
    result = run_bench(config)
    assert result["outputs_identical"] is False
    assert result["differing"] == [{"id": f"tiny-0-{i}", "first_difference": 5} for i in range(5)]


def test_a_baseline_is_used_again(config: BenchConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_bench(config)
    again = BenchConfig(**{**vars(config), "baseline_report": config.out, "out": config.out.with_name("again.json")})
    second = run_bench(again)
    assert second["baseline_seconds"] == first["baseline_seconds"]
    assert second["outputs_identical"] is True
    monkeypatch.setenv("FAKE_OUTPUTS", "differ")
    assert run_bench(again)["outputs_identical"] is False
    with pytest.raises(InvalidInput, match=r"max_new_tokens 12, here 13; 5 prompts, not the 4"):
        run_bench(BenchConfig(**{**vars(again), "max_new_tokens": 13, "limit": 4}))
    other = config.prompts.with_name("other.json")
    other.write_text("{}", encoding="utf-8")
    with pytest.raises(InvalidInput, match="no baseline in it"):
        run_bench(BenchConfig(**{**vars(again), "baseline_report": other}))


def test_a_running_server_and_json(config: BenchConfig, tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text("a-long-secret-word\n")
    served = ServeConfig(**{name: getattr(config, name) for name in ServeConfig.__dataclass_fields__})
    with Server(dataclasses.replace(served, api_key_file=key)) as server:
        words = [sys.executable, "-m", "eyas_serve.cli", "bench", "--url", server.url, "--target", str(config.target),
                 "--prompts", str(config.prompts), "--out", str(tmp_path / "b.json"), "--limit", "2", "--json"]
        done = subprocess.run(words, capture_output=True, text=True, check=True,
                              env={**os.environ, "EYAS_API_KEY": "a-long-secret-word"})
        refused = subprocess.run(words, capture_output=True, text=True, check=False)
    assert "100 %  2/2 prompts" in done.stderr  # a share, and so a time to wait
    assert refused.returncode == 1
    assert "401" in refused.stderr
    result = json.loads(done.stdout)
    assert len(result["prompts"]) == 2
    assert result["outputs_identical"] is None
    assert result["baseline_tokens_per_second"] is None


def ask(config: BenchConfig, url: str) -> dict[str, Any]:
    return run_bench(dataclasses.replace(config, url=url, draft=None, out=config.out.with_name("url.json")))


@pytest.mark.parametrize(("plan", "head"), [({"tells": True}, "steps 5, topk 8, draft tokens 32"),
                                            ({}, "a tree that it does not tell")])
def test_a_running_servers_settings_are_its_own(config: BenchConfig, monkeypatch: pytest.MonkeyPatch,
                                                plan: dict[str, Any], head: str) -> None:
    monkeypatch.setenv("FAKE_PLAN", json.dumps(plan))
    served = ServeConfig(**{name: getattr(config, name) for name in ServeConfig.__dataclass_fields__})
    with Server(served) as server:
        result = ask(config, server.url)
    assert head in table(result)
    assert result["config"]["steps"] == (5 if plan else None)
    assert result["acceptance_length"] == 2.0


def test_no_round_is_no_acceptance_of_one(config: BenchConfig) -> None:
    served = ServeConfig(**{name: getattr(config, name) for name in ServeConfig.__dataclass_fields__})
    with Server(dataclasses.replace(served, draft=None)) as server:
        result = ask(config, server.url)
    assert result["acceptance_length"] is None
    assert {row["acceptance_length"] for row in result["prompts"]} == {None}
    assert "no round of speculation was seen" in table(result)


@pytest.mark.parametrize(("name", "found"), [("folder", "a folder"), ("b.html", "a name that ends in .html"),
                                             ("file/b.json", "in a folder that cannot be made")])
def test_a_place_that_cannot_be_is_refused_before_the_work(config: BenchConfig, tmp_path: Path, name: str,
                                                           found: str) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("mine")
    with pytest.raises(InvalidInput, match=found):
        run_bench(dataclasses.replace(config, out=tmp_path / name))
    assert not (tmp_path / "run").exists()


def test_a_full_disk_loses_no_number(config: BenchConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(path: Path, text: str) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(bench_report, "write_text_atomic", full)
    with pytest.raises(InvalidInput, match=r"No space left on device(?s:.)*acceptance length +2\.000"):
        run_bench(dataclasses.replace(config, baseline=False))


def test_the_drafts_half_is_there_while_the_baseline_is_measured(config: BenchConfig) -> None:
    seen: list[dict[str, Any]] = []

    def report(line: str) -> None:
        if config.out.exists():
            seen.append(json.loads(config.out.read_text()))

    whole = run_bench(config, report)
    assert seen[0]["complete"] is False
    assert seen[0]["outputs_identical"] is None
    assert {row["arm"] for row in seen[0]["levels"]} == {"draft"}
    assert whole["complete"] is True


def test_an_earlier_baseline_is_of_the_same_prompts_and_server(config: BenchConfig, tmp_path: Path) -> None:
    crowd = dataclasses.replace(config, concurrency=50)  # more than SGLang has room for with a draft, unless told
    run_bench(crowd)
    again = dataclasses.replace(crowd, baseline_report=crowd.out, out=tmp_path / "again.json")
    assert run_bench(again)["outputs_identical"] is True
    other = tiny.write_jsonl(tmp_path / "other.jsonl", [
        {"id": f"tiny-0-{i}", "messages": [{"role": "user", "content": "copy stone"}]} for i in range(5)])
    with pytest.raises(InvalidInput, match=r"cuda_graph True, here False; environment .*; other prompts than those of"):
        run_bench(dataclasses.replace(again, prompts=other, cuda_graph=False, environment={"NCCL_DEBUG": "INFO"}))


def test_against_names_what_differs(config: BenchConfig) -> None:
    run_bench(config)
    changed = dataclasses.replace(config, against=config.out, max_new_tokens=9, limit=3)
    result = run_bench(changed)
    assert result["against"]["settings"] == ["max_new_tokens 9, before 12", "limit 3, before None", "other prompts"]
    assert "of other settings: max_new_tokens 9, before 12" in table(result)


def test_secrets_are_in_no_file_of_a_bench(config: BenchConfig, tmp_path: Path) -> None:
    run_bench(dataclasses.replace(config, environment={"HF_TOKEN": "hf_very_secret", "NCCL_DEBUG": "INFO"}))
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert any(b"NCCL_DEBUG" in path.read_bytes() for path in files)
    assert not [path for path in files if b"hf_very_secret" in path.read_bytes()]


def test_live_conversations_build_on_the_servers_own_answers(config: BenchConfig, tiny_target: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_target)
    first = [{"role": "system", "content": "count up"}, {"role": "user", "content": "count from one to two"}]
    second = {"role": "user", "content": "copy red bird"}
    rows = [{"id": "a", "messages": [*first, {"role": "assistant", "content": "never sent"}, second]},
            {"id": "b", "conversations": [{"from": "human", "value": "copy stone"}]}]
    live = dataclasses.replace(config, turns="live", prompts=tiny.write_jsonl(config.prompts, rows), sweep=(1,))
    result = run_bench(live)
    asked = {row["id"]: row for row in result["prompts"]}
    assert list(asked) == ["a/1", "a/2", "b/1"]
    answer = {"role": "assistant", "content": tokenizer.decode(asked["a/1"]["output_ids"], skip_special_tokens=True)}
    for name, messages in (("a/1", first), ("a/2", [*first, answer, second]),
                           ("b/1", [{"role": "user", "content": "copy stone"}])):
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert asked[name]["prompt_tokens"] == len(ids)
        assert asked[name]["output_ids"] == [(sum(ids) + i) % 50 for i in range(12)]
    assert result["outputs_identical"] is True
    assert [row["requests"] for row in result["levels"]] == [3] * 4
    again = dataclasses.replace(live, baseline_report=live.out, out=live.out.with_name("again.json"))
    assert run_bench(again)["outputs_identical"] is True
    with pytest.raises(InvalidInput, match="turns live, here last; 3 prompts, not the 2"):
        run_bench(dataclasses.replace(again, turns="last"))


def test_a_turn_that_depends_on_the_files_answers_is_not_asked_live(config: BenchConfig) -> None:
    rows = [{"messages": [{"role": "user", "content": "x"}, {"role": "assistant", "content": "call"},
                          {"role": "tool", "content": "3"}, {"role": "user", "content": "y"}]}]
    path = tiny.write_jsonl(config.prompts, rows)
    assert len(load_prompts(path, config.target)) == 1
    with pytest.raises(InvalidInput, match="line 1: a turn of role 'tool'"):
        load_prompts(path, config.target, turns="live")


def test_senseless_settings_are_all_named(config: BenchConfig) -> None:
    bad = BenchConfig(**{**vars(config), "draft": None, "concurrency": 0, "baseline_url": "x"})
    with pytest.raises(InvalidInput, match=r"concurrency 0; baseline-url without url; neither draft nor url"):
        run_bench(bad)


def test_first_difference() -> None:
    assert first_difference((1, 2, 3), (1, 4, 3)) == 1
    assert first_difference((1, 2), (1, 2, 3)) == 2
