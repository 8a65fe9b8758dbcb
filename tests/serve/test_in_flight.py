"""Waiting for answers while the server is looked after: who dies meanwhile is named, and the waiting ends at once."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from leftovers import orphans

import tiny
from eyas_contract import EngineFailure, InvalidInput
from eyas_serve import BenchConfig, ServeConfig, Server, run_bench
from eyas_serve import in_flight as module
from eyas_serve.in_flight import in_flight

Scenario = Callable[..., ServeConfig]


def test_answers_come_in_the_order_of_the_items() -> None:
    most, now, lock = 0, 0, threading.Lock()

    def work(item: int) -> int:
        nonlocal most, now
        with lock:
            now += 1
            most = max(most, now)
        time.sleep(0.02 * (item % 3))
        with lock:
            now -= 1
        return item * item

    assert in_flight(work, list(range(20)), 4, lambda: None) == [i * i for i in range(20)]
    assert most == 4
    assert in_flight(work, [], 4, lambda: None) == []


def test_nothing_is_begun_after_the_first_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY", 0.01)
    begun: list[int] = []

    def work(item: int) -> None:
        begun.append(item)
        raise KeyError(item)

    with pytest.raises(KeyError, match="0"):
        in_flight(work, list(range(50)), 1, lambda: None)
    assert begun == [0]


def test_a_look_that_raises_ends_the_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "EVERY", 0.05)
    free = threading.Event()

    def dead() -> None:
        raise EngineFailure("server", "dead", "alive", "")

    begun: list[int] = []

    def work(item: int) -> None:
        begun.append(item)
        free.wait(30)

    start = time.monotonic()
    with pytest.raises(EngineFailure, match="dead"):
        in_flight(work, list(range(50)), 2, dead)
    assert time.monotonic() - start < 5
    free.set()
    for thread in threading.enumerate():
        if thread.daemon and thread.name.startswith("Thread"):
            thread.join(1)
    assert sorted(begun) == [0, 1]  # nothing more once the waiting is over


def test_a_server_that_is_seen_dead_a_second_after_a_failed_request_is_what_is_told(monkeypatch: pytest.MonkeyPatch
                                                                                    ) -> None:
    monkeypatch.setattr(module, "EVERY", 0.05)
    looks: list[float] = []

    def look() -> None:
        looks.append(time.monotonic())
        if len(looks) == 2:
            raise EngineFailure("server", "rank tp1 died", "alive", "")

    def work(item: int) -> None:
        raise KeyError(item)

    with pytest.raises(EngineFailure, match="rank tp1 died"):
        in_flight(work, [1], 1, look)
    assert looks[1] - looks[0] >= 0.05


def kill_rank(folder: Path, rank: int) -> threading.Timer:
    """SIGKILL for a rank's process as soon as it is ready, and a second more."""
    def kill() -> None:
        path = folder / "ranks" / f"tp{rank}-pp0-dp0.json"
        while not path.is_file() or json.loads(path.read_text())["phase"] != "ready":
            time.sleep(0.05)
        time.sleep(1)
        os.kill(json.loads(path.read_text())["pid"], signal.SIGKILL)

    timer = threading.Timer(0, kill)
    timer.daemon = True
    timer.start()
    return timer


def test_a_rank_that_dies_in_the_first_generation_is_named(scenario: Scenario, monkeypatch: pytest.MonkeyPatch,
                                                          tmp_path: Path) -> None:
    monkeypatch.setenv("FAKE_PLAN", json.dumps({"ranks": 2, "answers": 0}))
    killer = kill_rank(tmp_path / "run", 1)
    start = time.monotonic()
    with pytest.raises(EngineFailure, match="rank tp1"), Server(scenario("ok", tp=2)):
        pass
    assert time.monotonic() - start < 15
    killer.join()


def test_a_first_generation_without_end_is_a_stall(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAKE_PLAN", json.dumps({"answers": 0}))
    with pytest.raises(EngineFailure, match="no progress for"), Server(scenario("ok", stall_seconds=2.0)):
        pass


@pytest.fixture
def bench(scenario: Scenario, tiny_target: Path, tmp_path: Path) -> BenchConfig:
    """Of five prompts."""
    served = scenario("ok", target=tiny_target, draft=tmp_path / "draft", preflight=False)
    prompts = tiny.write_jsonl(tmp_path / "prompts.jsonl", tiny.conversations(5))
    return BenchConfig(**{**vars(served), "prompts": prompts, "out": tmp_path / "bench.json", "max_new_tokens": 8})


def test_a_rank_that_dies_while_measuring_is_named(bench: BenchConfig, monkeypatch: pytest.MonkeyPatch,
                                                   tmp_path: Path) -> None:
    monkeypatch.setenv("FAKE_PLAN", json.dumps({"ranks": 2, "answers": 4}))
    killer = kill_rank(tmp_path / "run", 1)
    start = time.monotonic()
    with pytest.raises(EngineFailure, match="rank tp1"):
        run_bench(bench)
    assert time.monotonic() - start < 15
    killer.join()


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_ends_a_bench_whose_requests_hang(bench: BenchConfig, number: signal.Signals, code: int,
                                                   tmp_path: Path) -> None:
    words = ["env", "--default-signal=INT", sys.executable, "-m", "eyas_serve.cli", "bench", "--no-preflight"]
    for name in ("target", "draft", "prompts", "out", "run_dir", "engine_python"):
        words += [f"--{name.replace('_', '-')}", str(getattr(bench, name))]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True,
                               env={**os.environ, "FAKE_PLAN": json.dumps({"answers": 4})})
    assert process.stdout is not None
    assert any("READY" in line for line in process.stdout)
    time.sleep(1)
    start = time.monotonic()
    os.kill(process.pid, number)
    process.communicate(timeout=30)
    assert process.returncode == code
    assert time.monotonic() - start < 10
    assert not orphans(str(tmp_path))


def test_a_folder_belongs_to_one_server(scenario: Scenario) -> None:
    config = scenario("ok")
    with Server(config) as first:
        with pytest.raises(InvalidInput, match="another process of eyas writes to it"), Server(config):
            pass
        first.look()
        assert first.client.healthy()
    with Server(config) as again:
        assert again.client.healthy()
