"""The launcher against a scripted engine: right verdict, soon, and nothing left behind."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from leftovers import orphans

from eyas_contract import EngineFailure, InvalidInput
from eyas_serve import ServeConfig, Server
from eyas_serve import client as client_module
from eyas_serve.child import Child
from eyas_serve.client import Client
from eyas_serve.events import Event
from eyas_serve.proof import QUESTIONS

Scenario = Callable[..., ServeConfig]


def failure(config: ServeConfig) -> str:
    with pytest.raises(EngineFailure) as caught, Server(config):
        pass
    return str(caught.value)


def test_ready_after_handshake_and_first_generation(scenario: Scenario, tmp_path: Path) -> None:
    said: list[str] = []
    with Server(scenario("ok"), said.append) as server:
        assert server.client.generate([1, 2], 3).output_ids == (3, 4, 5)
        assert "Load weight begin" in server.log.read_text()
    assert said[-1].startswith("READY")
    assert any("tp0-pp0-dp0: ready" in line for line in said)
    assert json.loads((tmp_path / "run" / "config.resolved.json").read_text())["tp"] == 1


@pytest.mark.parametrize(("told", "room"), [(None, 48), (64, 64)])
def test_ready_says_how_many_requests_run_at_a_time(scenario: Scenario, tmp_path: Path, told: int | None,
                                                    room: int) -> None:
    said: list[str] = []
    with Server(scenario("ok", draft=tmp_path / "draft", preflight=False, max_running_requests=told), said.append):
        pass
    assert said[-1].endswith(f"acceptance length 2.00 in the first generation, {room} requests at a time")


def test_one_odd_answer_condemns_no_draft(scenario: Scenario, tiny_target: Path, tmp_path: Path) -> None:
    """The draft knows nothing of the first answer and something of the second."""
    said: list[str] = []
    plan = {"FAKE_PLAN": json.dumps({"histogram": [[45, 1], [20, 10], [1, 9]]})}
    with Server(scenario("ok", target=tiny_target, draft=tmp_path / "draft", preflight=False, environment=plan),
                said.append) as server:
        assert server.acceptance_length == pytest.approx(1 + 11 / 76)
    assert "acceptance length 1.14 in the first 2 generations" in said[-1]


def test_a_draft_is_of_no_use_only_after_every_question(scenario: Scenario, tiny_target: Path, tmp_path: Path) -> None:
    plan = {"FAKE_PLAN": json.dumps({"histogram": [[45, 1], [46]]})}
    text = failure(scenario("ok", target=tiny_target, draft=tmp_path / "draft", preflight=False, environment=plan))
    assert f"acceptance length 1.00 in the first {len(QUESTIONS)} generations, {46 * len(QUESTIONS)} rounds" in text
    assert "of no use" in text
    assert "where it passes, the draft is served as trained, and needs more training" in text


def test_slow_is_not_stuck(scenario: Scenario) -> None:
    said: list[str] = []
    with Server(scenario("slow", stall_seconds=1.5), said.append):
        pass
    assert any("% of 100 MiB" in line for line in said)


def test_stuck_is_stopped_with_its_phase(scenario: Scenario) -> None:
    text = failure(scenario("stall", stall_seconds=1.0))
    assert "no progress" in text
    assert "tp0-pp0-dp0: loading target weights 50 %" in text


@pytest.mark.parametrize("name", ["dies", "floods"])
def test_death_shows_the_first_ranks_exception(scenario: Scenario, name: str) -> None:
    text = failure(scenario(name))
    assert "RuntimeError: rank 5 lost its disk" in text
    assert "peer closed" not in text
    assert "exit code -9" in text


def test_the_guards_refusal_comes_first(scenario: Scenario) -> None:
    text = failure(scenario("refuses"))
    assert text.count("drops decoder_layers.0.x") == 1
    assert "exit code 1" in text


def test_up_without_a_handshake_is_refused(scenario: Scenario) -> None:
    assert "SGLANG_PLUGINS" in failure(scenario("silent"))


def test_every_rank_must_report(scenario: Scenario) -> None:
    assert "['tp0-pp0-dp0']" in failure(scenario("half", tp=2))


def test_a_plugin_that_did_not_load_is_seen_in_the_log(scenario: Scenario) -> None:
    assert "Failed to load plugin eyas_serve" in failure(scenario("unplugged"))


def test_a_grandchild_that_ignores_sigterm_is_ended(scenario: Scenario) -> None:
    with Server(scenario("stubborn")) as server:
        assert "grandchild" in server.log.read_text()


def test_an_exception_inside_stops_the_tree(scenario: Scenario) -> None:
    with pytest.raises(KeyError), Server(scenario("stubborn")):
        raise KeyError


def test_a_taken_port_is_refused_before_start(scenario: Scenario, tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        assert "cannot be listened on" in failure(scenario("ok", port=taken.getsockname()[1]))
    assert not (tmp_path / "run").exists()


def test_an_engine_whose_keeper_could_not_be_told_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A signal's exception, or a dead keeper, between the engine's start and the keeper's knowing of it."""
    begun, real = list[subprocess.Popen[bytes]](), subprocess.Popen

    def popen(*args: Any, **kwargs: Any) -> subprocess.Popen[bytes]:
        begun.append(real(*args, **kwargs))
        if len(begun) == 3:
            assert begun[0].stdin is not None
            begun[0].stdin.close()
        return begun[-1]

    monkeypatch.setattr(subprocess, "Popen", popen)
    with pytest.raises(ValueError, match="closed file"):
        Child(["sleep", "60"], {**os.environ, "EYAS_STATUS_DIR": str(tmp_path)}, tmp_path / "log")
    assert begun[2].returncode == -signal.SIGKILL
    begun[1].wait(10)


def test_another_server_that_takes_the_port_meanwhile_is_not_taken_for_ours(scenario: Scenario, tmp_path: Path) -> None:
    """As of two launches within one loading time: each has found the port free."""
    others = list[subprocess.Popen[bytes]]()

    def listen(event: Event) -> None:
        if event.kind == "start":
            (tmp_path / "health").write_text("")
            port = event.facts["url"].rpartition(":")[2]
            others.append(subprocess.Popen([sys.executable, "-m", "http.server", port, "--bind", "127.0.0.1",
                                            "--directory", str(tmp_path)], stderr=subprocess.DEVNULL))

    try:
        with pytest.raises(EngineFailure, match="answers there, which is not this engine's") as caught:
            Server(scenario("slow"), listen=listen).start()
    finally:
        for other in others:
            other.kill()
            other.wait()
    assert f"process {others[0].pid}" in str(caught.value)


def test_a_run_folder_that_cannot_be_is_refused(scenario: Scenario, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(InvalidInput, match=r"cannot be made.*--run-dir"):
        Server(scenario("ok", run_dir=tmp_path / "file")).start()


def test_a_start_that_fails_early_leaves_no_key_and_no_lock(scenario: Scenario, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("pass\u00e9-word-1234")
    server = Server(scenario("ok", api_key_file=tmp_path / "key"))  # kept, and with it whatever it still holds
    with pytest.raises(InvalidInput, match="letters beyond ASCII"):
        server.start()
    assert not (tmp_path / "run" / "engine-key.yaml").exists()
    with Server(scenario("ok")):
        pass


def test_invented_acceptance_is_refused(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_SIMULATE_ACC_LEN", "3")
    with pytest.raises(InvalidInput, match="invented"):
        Server(scenario("ok")).start()


def test_interpreter_without_sglang(scenario: Scenario, tmp_path: Path) -> None:
    assert "sglang is not installed" in failure(scenario("ok", engine_python=Path(sys.executable)))
    assert "cannot be run" in failure(scenario("ok", engine_python=tmp_path / "none"))
    bare = tmp_path / "bare"
    bare.write_text('#!/bin/sh\necho \'{"sglang": "0.5.20", "torch": null, "eyas-native": null, "plugin": false}\'\n')
    bare.chmod(0o755)
    text = failure(scenario("ok", engine_python=bare))
    assert "eyas-serve not installed there. Wanted: the guard beside sglang" in text
    assert f"Run in a checkout of eyas: {bare} -m pip install" in text
    assert "eyas-serve and eyas-native not" in failure(scenario("ok", engine_python=bare, device="cpu"))


def signal_launch(name: str, number: signal.Signals, folder: Path, python: Path) -> tuple[int, float, int]:
    """Exit code of the real command, seconds from the signal to its end, and how many of its processes are left."""
    heed = ["env", "--default-signal=INT"]  # a shell starts background jobs, such as a test run, with SIGINT ignored
    words = [*heed, sys.executable, "-m", "eyas_serve.cli", "launch", "--target", str(folder), "--port", "0",
             "--run-dir", str(folder / "run"), "--engine-python", str(python)]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, text=True, start_new_session=True,
                               env={**os.environ, "FAKE_SCENARIO": name})
    assert process.stdout is not None
    until = "loading target weights" if name == "stall" else "READY"
    assert any(until in line for line in process.stdout)
    start = time.monotonic()
    os.kill(process.pid, number)
    process.communicate(timeout=30)
    return process.returncode, time.monotonic() - start, len(orphans(str(folder)))


def test_closing_does_not_wait_for_a_lock_that_a_signal_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    client, lock = Client("http://127.0.0.1:9"), threading.Lock()
    monkeypatch.setattr(client_module, "CLOSING", 0.1)
    with lock, monkeypatch.context() as patched:
        patched.setattr(client._http, "close", lambda: lock.acquire() and lock.release())
        start = time.monotonic()
        client.close()
        assert 0.1 <= time.monotonic() - start < 2
    client.close()
    assert client._http.is_closed


SIGNALS = [(name, number, code) for name in ("stall", "stubborn") for number, code in (
    (signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGKILL, -9))]


@pytest.fixture(scope="module")
def signalled(fake_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Future]:
    """All of them side by side: they mostly wait."""
    with ThreadPoolExecutor(len(SIGNALS)) as pool:
        return {(name, number): pool.submit(signal_launch, name, number, tmp_path_factory.mktemp(name), fake_python)
                for name, number, _ in SIGNALS}


@pytest.mark.parametrize(("name", "number", "code"), SIGNALS)
def test_signals_end_the_whole_tree(signalled: dict[tuple[str, int], Future], name: str, number: signal.Signals,
                                    code: int) -> None:
    returned, seconds, left = signalled[name, number].result()
    assert returned == code
    assert seconds < 10
    assert not left


def test_the_command_says_why_and_ends_with_1(scenario: Scenario) -> None:
    config = scenario("dies")
    done = subprocess.run([sys.executable, "-m", "eyas_serve.cli", "launch", "--target", str(config.target), "--port",
                           "0", "--run-dir", str(config.run_dir), "--engine-python", str(config.engine_python)],
                          capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.startswith("error: SGLang at")
    assert "rank 5 lost its disk" in done.stderr
    assert "Traceback" not in done.stderr
