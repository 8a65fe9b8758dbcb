"""Sweeps, intervals, percentiles, the HTML report, comparison of reports, and watching a server's metrics."""

from __future__ import annotations

import csv
import json
import random
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

import tiny
from eyas_contract import EngineFailure, InvalidInput
from eyas_serve import BenchConfig, ServeConfig, Server, run_bench
from eyas_serve.bench_report import table
from eyas_serve.client import Generation
from eyas_serve.levels import Arm, compare, speedups, summarise_level, thin
from eyas_serve.numbers import acceptance_interval, percentiles, student_t
from eyas_serve.prompts import Prompt
from eyas_serve.watch import Alarm, Look, WatchConfig, interval, parse, watch


def test_interval_covers_the_truth() -> None:
    rng, hits = random.Random(7), 0
    for _ in range(400):
        rows = []
        for _ in range(12):
            p = rng.choice([0.4, 0.6])  # requests differ, as prompts do
            row = [0, 0, 0]
            for _ in range(rng.randint(10, 40)):
                row[0 if rng.random() > p else 1 if rng.random() > p else 2] += 1
            rows.append(row)
        low, high = acceptance_interval(rows) or (0.0, 0.0)
        hits += low <= 1 + (0.4 + 0.6) / 2 + (0.16 + 0.36) / 2 <= high
    assert 0.91 <= hits / 400 <= 0.98
    assert acceptance_interval([[1, 2]]) is None
    assert acceptance_interval([[1, 2], [0, 0], [2, 1], []]) == acceptance_interval([[1, 2], [2, 1]])


def test_no_interval_reaches_below_the_bonus_token() -> None:
    low, high = acceptance_interval([[9, 1, 0], [2, 1, 7]]) or (0.0, 0.0)
    assert low == 1.0
    assert high > 3.0  # a histogram ends at the most that was accepted, not at what could have been
    low, high = acceptance_interval([[50, 50, 0], [49, 51, 0], [51, 49, 0]]) or (0.0, 0.0)
    assert 1.0 < low < 1.5 < high < 3.0


def test_student_and_percentiles_by_tables() -> None:
    for freedom, value in ((1, 12.70620), (2, 4.30265), (3, 3.18245), (4, 2.77645), (5, 2.57058), (6, 2.44691),
                           (7, 2.36462), (10, 2.22814), (30, 2.04227), (31, 2.03951), (60, 2.00030), (120, 1.97993)):
        assert student_t(freedom) == pytest.approx(value, rel=1e-5)
    assert student_t(3, 0.99) == pytest.approx(5.84091, rel=1e-5)
    assert percentiles([4.0, 1.0, 3.0, 2.0]) == pytest.approx({"mean": 2.5, "p50": 2.5, "p90": 3.7, "p99": 3.97})
    assert percentiles([]) is None


@pytest.fixture
def config(scenario: Callable[..., ServeConfig], tiny_target: Path, tmp_path: Path) -> BenchConfig:
    served = scenario("ok", target=tiny_target, draft=tmp_path / "draft", preflight=False)
    one = tiny.write_jsonl(tmp_path / "gsm.jsonl", tiny.conversations(4))
    other = tiny.write_jsonl(tmp_path / "chat<b>.jsonl", tiny.conversations(3, seed=5))
    return BenchConfig(**{**vars(served), "prompts": one, "data_sets": (other,), "out": tmp_path / "bench.json",
                          "max_new_tokens": 12, "concurrency": 1, "sweep": (4,)})


class Links(HTMLParser):
    """Whatever would be fetched."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in ("script", "link", "img", "iframe", "object"):
            self.found.append(tag)
        self.found += [f"{name}={value}" for name, value in attrs if name in ("src", "href")]


def test_sweep_report_csv_html_and_comparison(config: BenchConfig) -> None:
    result = run_bench(config)
    whole = [row for row in result["levels"] if row["data_set"] == "all"]
    assert [(row["arm"], row["concurrency"]) for row in whole] == [
        ("draft", 1), ("draft", 4), ("target alone", 1), ("target alone", 4)]
    assert {row["data_set"] for row in result["levels"]} == {"all", "gsm", "chat<b>"}
    assert all(row["interval"] == [2.0, 2.0] for row in whole[:2])
    assert all(0 < row["ttft"]["p50"] <= row["ttft"]["p99"] and row["tpot"]["p50"] >= 0 for row in whole)
    rows = list(csv.DictReader(config.out.with_suffix(".csv").read_text().splitlines()))
    assert len(rows) == len(result["levels"])
    text = config.out.with_suffix(".html").read_text()
    links = Links()
    links.feed(text)
    assert links.found == []
    assert "url(" not in text
    plots = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(plots) == 6
    for plot in plots:
        ElementTree.fromstring(plot)
    assert "chat&lt;b&gt;" in text
    again = run_bench(BenchConfig(**{**vars(config), "against": config.out, "out": config.out.with_name("b.json")}))
    assert len(again["against"]["rows"]) == len(result["levels"])
    with pytest.raises(InvalidInput, match="no such file"):
        run_bench(BenchConfig(**{**vars(config), "against": config.out.with_name("none.json")}))


def test_a_server_that_lets_requests_wait_is_named(config: BenchConfig) -> None:
    assert {row["room"] for row in run_bench(replace(config, sweep=(49,)))["levels"]} == {49}
    few = run_bench(replace(config, extra="--max-running-requests 3"))
    words = [f"{arm} ran at most 3 of 4 requests at a time" for arm in ("draft", "target alone")]
    assert all(word in table(few) and word in config.out.with_suffix(".html").read_text() for word in words)


def test_a_level_of_few_requests_is_named() -> None:
    def level(concurrency: int, requests: int, data_set: str = "all") -> dict[str, object]:
        return {"arm": "draft", "concurrency": concurrency, "requests": requests, "data_set": data_set}

    rows = [level(1, 1), level(4, 16), level(16, 63), level(16, 31, "chat")]
    assert thin(rows) == ["63 requests at 16 at a time: towards the end fewer are in flight, which weighs in its speed;"
                          " give 64 prompts or more"]


def test_an_answer_of_one_token_has_no_time_between_tokens() -> None:
    answers = tuple(Generation(ids, (1, 1), 3.0, "length", 1.0) for ids in ((5,), (5, 6, 7)))
    [row] = summarise_level(Arm("draft", 1, answers, 6.0), [Prompt("a", (1,)), Prompt("b", (1,))])
    assert (row["ttft"]["mean"], row["tpot"]["mean"], row["tokens"]) == (1.0, 1.0, 4)


def test_a_speedup_needs_both_arms_at_one_level() -> None:
    speed = {("draft", 1): 30.0, ("target alone", 1): 10.0, ("draft", 4): 50.0, ("target alone", 8): 40.0}
    rows = [{"arm": arm, "concurrency": level, "data_set": name, "tokens_per_second": each if name == "all" else None}
            for (arm, level), each in speed.items() for name in ("all", "chat")]
    assert speedups(rows) == {1: 3.0}


def test_worse_only_where_the_intervals_do_not_meet() -> None:
    row = {"arm": "draft", "concurrency": 1, "data_set": "all", "tokens_per_second": 10.0, "acceptance_length": 2.0}
    old = [row | {"interval": [1.9, 2.1]}]
    assert compare(old, [row | {"interval": [1.7, 1.8]}])[0]["acceptance"] == "worse"
    assert compare(old, [row | {"interval": [1.8, 2.0]}])[0]["acceptance"] == "same within the intervals"
    assert compare(old, [row | {"interval": [2.0, 2.2]}])[0]["acceptance"] == "same within the intervals"
    assert compare(old, [row | {"interval": [2.2, 2.3]}])[0]["acceptance"] == "better"
    assert compare(old, [row | {"interval": None}])[0]["acceptance"] == "unknown"
    assert compare(old, [row | {"interval": [2.2, 2.4], "tokens_per_second": 20.0}])[0]["speed_ratio"] == 2.0
    assert compare([], old) == []


def test_metrics_of_two_replicas() -> None:
    text = "\n".join(f'sglang:{name}{{dp_rank="{rank}"}} {value}' for rank in (0, 1) for name, value in (
        ("generation_tokens_total", 100 * (rank + 1)), ("spec_verify_calls_total", 50),
        ("spec_accept_length", 2 + rank), ("token_usage", 0.4 - 0.1 * rank)))
    first, later = parse("sglang:generation_tokens_total 0.0", 1.0), parse(text, 3.0)
    assert (later.tokens, later.rounds, later.length, later.cache) == (300, 100, 2.5, 0.4)
    assert interval(first, later) == (150, 2.5)
    assert parse(text.replace("sglang:", "sglang_"), 3.0) == later
    idle = parse(text + '\nsglang:spec_accept_length{dp_rank="2"} 0.0', 3.0)  # has verified nothing yet
    assert idle.length == 2.5
    with pytest.raises(EngineFailure, match="no metric"):
        parse("python_info 1", 0.0)


def test_shares_of_priorities_are_not_counted_beside_the_whole() -> None:
    """As SGLang gives them with --enable-priority-scheduling."""
    lines = [f'sglang:num_{kind}_reqs{{engine_type="unified",model_name="m",priority="{priority}"}} {value}'
             for kind, values in (("running", (3.0, 1.0, 2.0)), ("queue", (5.0, 5.0, 0.0)))
             for priority, value in zip(("", "0", "-1"), values, strict=True)]
    lines += [f'sglang:generation_tokens_total{{model_name="m",priority="{priority}",is_streaming="true"}} {tokens}'
              for priority, tokens in (("0", 10.0), ("-1", 5.0))]  # counted request by request: there is no whole
    look = parse("\n".join(lines), 0.0)
    assert (look.running, look.queued, look.tokens) == (3.0, 5.0, 15.0)


def test_a_restart_is_no_negative_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    def told(as_json: bool) -> list[str]:
        said: list[str] = []
        looks = iter([Look(float(i), tokens, tokens / 2, 1.0, 0, 0, 0) for i, tokens in enumerate((90, 100, 40, 60))])
        monkeypatch.setattr("eyas_serve.watch.look", lambda client: next(looks))
        watch(WatchConfig("http://nowhere", every=0, looks=3, patience=2), said.append, as_json)
        return said

    rows = [json.loads(line) for line in told(as_json=True)]
    assert [row["tokens_per_second"] for row in rows] == [10.0, None, 20.0]
    assert [row["restarted"] for row in rows] == [False, True, False]
    assert [row["alarm"] for row in rows] == [False] * 3  # the looks before the restart were another server's
    first, second, restart, third = told(as_json=False)
    assert "10.0 tokens/s" in first
    assert " - tokens/s" in second
    assert restart.startswith("RESTART")
    assert "20.0 tokens/s" in third
    assert interval(Look(0, 9, 4, None, 0, 0, 0), Look(1, 3, 1, None, 0, 0, 0)) == (None, None)
    assert interval(Look(0, 9, 4, None, 0, 0, 0), Look(1, 12, 1, None, 0, 0, 0)) == (None, None)  # many tokens since
    assert interval(Look(0, 9, 4, None, 0, 0, 0), Look(1, 9, 4, None, 0, 0, 0)) == (0, None)


def test_a_server_may_be_gone_for_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that restarts answers nothing for minutes; one that never answered is an error at once."""
    gone = "Connection refused"

    def told(answers: str, **settings: Any) -> tuple[int, list[dict[str, Any]]]:
        said, numbered = list[str](), enumerate(answers)

        def look(client: object) -> Look:
            i, answer = next(numbered)
            if answer == "-":
                raise EngineFailure("http://nowhere", gone, "metrics", "Start it.")
            return Look(float(i), 10.0 * i, 5.0 * i, 1.0 if answer == "l" else 2.0, 0, 0, 0)

        monkeypatch.setattr("eyas_serve.watch.look", look)
        config = WatchConfig("http://nowhere", every=0, looks=len(answers) - 1, patience=2, **settings)
        return watch(config, said.append, True), [json.loads(line) for line in said]

    code, rows = told("+-+--+")
    assert code == 0
    assert [row["down"] for row in rows] == [gone, None, gone, gone, None]
    assert [row["alarm"] for row in rows] == [False, False, False, True, False]
    assert [row["tokens_per_second"] for row in rows] == [None, 10.0, None, None, 10.0]
    _, rows = told("+l-l")
    assert [row["alarm"] for row in rows] == [False] * 3  # no two looks in a row were low
    code, rows = told("+---", stop_on_alarm=True)
    assert (code, len(rows)) == (3, 2)
    with pytest.raises(EngineFailure):
        told("-+")


def test_alarm_needs_patience_and_traffic() -> None:
    alarm = Alarm(1.5, 2)
    looks = ((1.0, True), (1.0, False), (None, True), (1.0, True), (2.0, True), (1.0, True))
    assert [alarm.look(*look) for look in looks] == [False, False, False, True, False, False]
    assert not Alarm(1.5, 1).look(1.5, True)


def test_watch_a_server(config: BenchConfig) -> None:
    with Server(ServeConfig(**{name: getattr(config, name) for name in ServeConfig.__dataclass_fields__})) as server:
        done = subprocess.run([sys.executable, "-m", "eyas_serve.cli", "watch", server.url, "--every", "0.1", "--looks",
                               "2", "--json"], capture_output=True, text=True, check=True)
    looks = [json.loads(line) for line in done.stdout.splitlines()]
    assert [look["acceptance_length"] for look in looks] == [2.0, 2.0]
