"""Faults of a node with 8 ranks and 64 shards, scripted: the right verdict, soon, and nothing left behind."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fake_engine import PHASES, WORDS
from rich.console import Console

from eyas_contract import EngineFailure, InvalidInput
from eyas_serve import ServeConfig, Server
from eyas_serve.api_key import read_key
from eyas_serve.events import Event
from eyas_serve.view import LiveView

RANKS = [f"tp{n}-pp0-dp0" for n in range(8)]
Node = Callable[..., ServeConfig]


@pytest.fixture
def node(scenario: Callable[..., ServeConfig], monkeypatch: pytest.MonkeyPatch) -> Node:
    """`node(plan)` -> the config of a server of 8 ranks that plays it."""
    def make(plan: dict[str, Any] | None = None, **settings: Any) -> ServeConfig:
        monkeypatch.setenv("FAKE_PLAN", json.dumps(plan or {}))
        return scenario("node", tp=8, **settings)

    return make


def fate(phase: str, how: str, rank: int | str = 5) -> dict[str, Any]:
    return {"die": {"rank": rank, "in": phase, "how": how}}


def verdict(config: ServeConfig) -> tuple[str, dict[str, Any]]:
    """The message, and the facts told to machines."""
    assert config.run_dir is not None
    with pytest.raises(EngineFailure) as caught:
        Server(config).start()
    events = [json.loads(line) for line in (config.run_dir / "events.jsonl").read_text().splitlines()]
    assert events[-1]["event"] == "failed"
    return str(caught.value), next((event for event in events if event["event"] == "verdict"), {})


@pytest.mark.parametrize("phase", PHASES[:-1])
def test_rank_5_of_8_is_killed(node: Node, phase: str) -> None:
    text, facts = verdict(node(fate(phase, "kill")))
    assert (facts["rank"], facts["phase"]) == (RANKS[5], phase)
    assert "rank tp5-pp0-dp0 (pid" in text
    assert facts["cause"] in ("killed", "host_out_of_memory")


def test_the_engine_itself_is_killed(node: Node) -> None:
    text, facts = verdict(node(fate("capturing target graphs", "leave", "main")))
    assert facts["exit_code"] == -9
    assert "in capturing target graphs" in text


def test_killed_in_the_first_generation(node: Node) -> None:
    text, facts = verdict(node({"die": {"rank": "http", "in": "warm-up", "how": "kill"}}))
    assert facts["exit_code"] == -9
    assert "warm-up" in text


CAUSES = [("exception", "unknown", "rank 5 lost its disk"), ("nccl", "nccl", "--shm-size"),
          ("oom", "out_of_memory", "2.50 GiB more wanted, 1.12 GiB of 139.81 GiB free on GPU 5"),
          ("kv", "no_room_for_kv_cache", "Raise --mem-fraction"), ("kernel", "no_kernels", "SM120"),
          ("backend", "unsupported_backend", "triton"), ("port", "port_taken", "ss -ltnp")]


@pytest.mark.parametrize(("how", "cause", "words"), CAUSES)
def test_rank_5s_exception_comes_first_with_its_cause(node: Node, how: str, cause: str, words: str) -> None:
    text, facts = verdict(node(fate("capturing target graphs", how)))
    assert (facts["cause"], facts["rank"]) == (cause, RANKS[5])
    assert f"tp5-pp0-dp0: {WORDS[how].splitlines()[0].rstrip('.')}" in text
    assert words in text
    assert "peer" not in text.split("Wanted")[0].replace("peers", "")


@pytest.mark.parametrize("chatter", [False, True])
def test_a_stall_shows_every_rank(node: Node, chatter: bool) -> None:
    text, _ = verdict(node({"hold": "loading target weights", "chatter": chatter}, stall_seconds=1.5))
    assert "no progress for" in text
    assert "50 % of 100 MiB" in text
    for rank in RANKS:
        assert re.search(f"{rank}: (sleeping|running)", text)  # a busy machine may catch one awake


def test_a_stall_that_is_only_reported(node: Node) -> None:
    said: list[Event] = []

    def listen(event: Event) -> None:
        said.append(event)
        if sum(event.kind == "stall" for event in said) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Server(node({"hold": "loading target weights"}, stall_seconds=1.0, on_stall="report"), listen=listen).start()
    assert set(next(event for event in said if event.kind == "stall").facts["processes"]) == set(RANKS)


@pytest.mark.parametrize("garble", [False, True])
def test_a_flood_of_100_mb_before_the_death(node: Node, garble: bool) -> None:
    config = node({"flood": 100, "garble": garble} | fate("capturing target graphs", "exception"), log_rotate_mb=32)
    text, facts = verdict(config)
    assert "tp5-pp0-dp0: RuntimeError: rank 5 lost its disk" in text
    assert facts["phase"] == "capturing target graphs"
    parts = list((config.run_dir or Path()).glob("server.log*"))
    assert len(parts) >= 4
    assert sum(part.stat().st_size for part in parts) > 99 << 20


def test_ready_with_every_rank_and_the_live_table(node: Node) -> None:
    drawn = io.StringIO()
    view = LiveView(Console(file=drawn, force_terminal=True, width=160))
    with Server(node({"seconds": 1.5}), listen=view) as server:
        assert len(server.progress.rows()) == 8
    for words in (*RANKS, "0.1 GiB", "MiB/s", "READY"):
        assert words in drawn.getvalue()


def test_a_draft_that_nothing_is_accepted_of_is_a_verdict(node: Node, tmp_path: Path) -> None:
    settings = {"draft": tmp_path / "draft", "preflight": False}
    text, _ = verdict(node({"histogram": [40]}, **settings))
    assert "acceptance length 1.00 over 40 rounds" in text
    assert "the probe" in text
    said: list[str] = []
    with Server(node({"histogram": [40]}, guard="report", **settings), said.append):
        pass
    assert any("guard, report only" in line and "of no use" in line for line in said)


def test_an_api_key_is_in_no_process_list_and_no_log(node: Node, tmp_path: Path) -> None:
    key = "very-secret-word-1234"
    file = tmp_path / "key"
    file.write_text(key + "\n")
    with Server(node(api_key_file=file, environment={"NCCL_DEBUG": "INFO"})) as server:
        assert server.child is not None
        for process in server.child.members():
            assert key not in " ".join(process.cmdline())
        assert server.client.info()["version"] == "0.5.20"
        run_dir = server.run_dir
    for path in run_dir.rglob("*"):
        assert path.is_dir() or key not in path.read_text()
    assert json.loads((run_dir / "engine.json").read_text())["declared"] == {"NCCL_DEBUG": "INFO"}
    with pytest.raises(InvalidInput, match="process list"):
        read_key(ServeConfig(target=tmp_path, extra="--api-key x"))


def start(config: ServeConfig, *words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "eyas_serve.cli", "launch", "--target", str(config.target), "--port", "0", "--tp", "8",
         "--run-dir", str(config.run_dir), "--engine-python", str(config.engine_python), "--json-events", *words],
        stdout=subprocess.PIPE, text=True, start_new_session=True)


@pytest.mark.parametrize("phase", [*PHASES[:-1], "warm-up", "serving"])
def test_sigterm_in_every_phase(node: Node, phase: str) -> None:
    process = start(node({} if phase == "serving" else {"hold": phase}))
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "ready" or event.get("phase") == phase:
            break
    began = time.monotonic()
    os.kill(process.pid, signal.SIGTERM)
    process.communicate(timeout=10)
    assert process.returncode == 143
    assert time.monotonic() - began < 10


def test_a_rank_that_dies_while_serving(node: Node) -> None:
    process = start(node())
    assert process.stdout is not None
    for line in process.stdout:
        if json.loads(line)["event"] == "ready":
            break
    status = json.loads((Path(node().run_dir or "") / "ranks" / f"{RANKS[5]}.json").read_text())
    os.kill(status["pid"], signal.SIGKILL)
    rest, _ = process.communicate(timeout=10)
    facts = [json.loads(line) for line in rest.splitlines()]
    assert process.returncode == 1
    assert next(event for event in facts if event["event"] == "verdict")["rank"] == RANKS[5]
