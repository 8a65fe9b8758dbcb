"""The benchmark against a scripted engine: what it counts, compares and writes."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import tiny
from eyas_contract import InvalidInput
from eyas_serve import BenchConfig, ServeConfig, Server, run_bench
from eyas_serve.bench import first_difference, table


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
    with Server(ServeConfig(**{name: getattr(config, name) for name in ServeConfig.__dataclass_fields__})) as server:
        done = subprocess.run(
            [sys.executable, "-m", "eyas_serve.cli", "bench", "--url", server.url, "--target", str(config.target),
             "--prompts", str(config.prompts), "--out", str(tmp_path / "b.json"), "--limit", "2", "--json"],
            capture_output=True, text=True, check=True)
    result = json.loads(done.stdout)
    assert len(result["prompts"]) == 2
    assert result["outputs_identical"] is None
    assert result["baseline_tokens_per_second"] is None


def test_senseless_settings_are_all_named(config: BenchConfig) -> None:
    bad = BenchConfig(**{**vars(config), "draft": None, "concurrency": 0, "baseline_url": "x"})
    with pytest.raises(InvalidInput, match=r"concurrency 0; baseline-url without url; neither draft nor url"):
        run_bench(bad)


def test_first_difference() -> None:
    assert first_difference((1, 2, 3), (1, 4, 3)) == 1
    assert first_difference((1, 2), (1, 2, 3)) == 2
