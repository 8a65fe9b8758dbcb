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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
import pytest
from fake_engine import PHASES, WORDS
from leftovers import orphans
from rich.console import Console

from eyas_contract import EngineFailure, InvalidInput
from eyas_serve import ServeConfig, Server
from eyas_serve.api_key import read_key
from eyas_serve.events import Event
from eyas_serve.view import LiveView

RANKS = [f"tp{n}-pp0-dp0" for n in range(8)]
AT_A_TIME = 4  # launches: they mostly wait
SOON = 10.0  # seconds from an event to its verdict
Node = Callable[..., ServeConfig]


def make_config(folder: Path, python: Path, plan: dict[str, Any], **settings: Any) -> ServeConfig:
    """A server of 8 ranks and 64 shards that plays the plan; every file of it below the folder."""
    environment = {"FAKE_SCENARIO": "node", "FAKE_PLAN": json.dumps(plan), **settings.pop("environment", {})}
    return ServeConfig(**{"target": folder, "engine_python": python, "port": 0, "run_dir": folder / "run", "tp": 8,
                          "stall_seconds": 20.0, "environment": environment, **settings})


@pytest.fixture
def node(fake_python: Path, tmp_path: Path) -> Node:
    """`node(plan)` -> its config."""
    def make(plan: dict[str, Any] | None = None, **settings: Any) -> ServeConfig:
        return make_config(tmp_path, fake_python, plan or {}, **settings)

    return make


def fate(phase: str, how: str, rank: int | str = 5) -> dict[str, Any]:
    return {"die": {"rank": rank, "in": phase, "how": how}}


@dataclass(frozen=True)
class Outcome:
    """What came of a launch: its message, the facts told to machines, seconds from the event, processes left."""

    text: str
    facts: dict[str, Any]
    seconds: float
    left: list[psutil.Process]
    run_dir: Path
    code: int | None = None
    events: list[dict[str, Any]] = field(default_factory=list)


def verdict(config: ServeConfig) -> Outcome:
    """Start what must fail."""
    assert config.run_dir is not None
    with pytest.raises(EngineFailure) as caught:
        Server(config).start()
    events = [json.loads(line) for line in (config.run_dir / "events.jsonl").read_text().splitlines()]
    assert events[-1]["event"] == "failed"
    died, now = config.run_dir / "died", events[-1]["time"]
    return Outcome(str(caught.value), next((event for event in events if event["event"] == "verdict"), {}),
                   now - float(died.read_text()) if died.exists() else 0.0, orphans(str(config.run_dir)),
                   config.run_dir)


def test_a_peer_that_complains_of_a_killed_one_is_not_the_cause(node: Node) -> None:
    outcome = verdict(node({"mourns": 5} | fate("loading target weights", "kill")))
    assert (outcome.facts["rank"], outcome.facts["phase"]) == (RANKS[5], "loading target weights")
    assert outcome.facts["cause"] in ("killed", "host_out_of_memory")
    assert "rank tp5-pp0-dp0 (pid" in outcome.text


def test_rank_5_of_8_is_killed_while_serving(node: Node) -> None:
    """A peer that ends for want of it, and a trace from before READY, are not taken for the cause."""
    config, events = node({"mourns": 5}), list[Event]()
    with Server(config, listen=events.append) as server:
        os.kill(server.progress.ranks[RANKS[5]].pid, signal.SIGKILL)
        with pytest.raises(EngineFailure) as caught:
            server.watch()
    facts = next(event.facts for event in events if event.kind == "verdict")
    assert (facts["rank"], facts["phase"]) == (RANKS[5], "serving")
    assert facts["cause"] in ("killed", "host_out_of_memory")
    assert "lost a rank in serving: rank tp5-pp0-dp0 (pid" in str(caught.value)
    assert "refused" not in str(caught.value)


CAUSES = [("exception", "unknown", "rank 5 lost its disk"), ("nccl", "nccl", "--shm-size"),
          ("oom", "out_of_memory", "2.50 GiB more wanted, 1.12 GiB of 139.81 GiB free on GPU 5"),
          ("kv", "no_room_for_kv_cache", "Raise --mem-fraction"), ("kernel", "no_kernels", "SM120"),
          ("backend", "unsupported_backend", "triton"), ("port", "port_taken", "ss -ltnp")]
GRAPHS = "capturing target graphs"
HELD = {"hold": "loading target weights"}
FAULTS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # name -> plan, settings
    **{f"killed {phase}": (fate(phase, "kill"), {}) for phase in PHASES[:-1]},
    "engine killed": (fate(GRAPHS, "leave", "main"), {}),
    "killed warm-up": ({"die": {"rank": "http", "in": "warm-up", "how": "kill"}}, {}),
    **{how: (fate(GRAPHS, how), {}) for how, _, _ in CAUSES},
    "stall": (HELD, {"stall_seconds": 3.0}), "stall with chatter": (HELD | {"chatter": True}, {"stall_seconds": 3.0}),
    **{name: ({"flood": 100, "garble": name == "garbled flood"} | fate(GRAPHS, "exception"), {"log_rotate_mb": 32})
       for name in ("flood", "garbled flood")}}


@pytest.fixture(scope="module")
def outcomes(fake_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Callable[[], Outcome]]:
    """Every fault, several launches at a time; calling one gives its outcome or raises what its launch raised."""
    def play(name: str, plan: dict[str, Any], settings: dict[str, Any]) -> Outcome:
        return verdict(make_config(tmp_path_factory.mktemp(name.replace(" ", "-")), fake_python, plan, **settings))

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return {name: pool.submit(play, name, *fault).result for name, fault in FAULTS.items()}


Outcomes = dict[str, Callable[[], Outcome]]


@pytest.mark.parametrize("name", FAULTS)
def test_the_verdict_comes_soon_and_nothing_is_left(outcomes: Outcomes, name: str) -> None:
    outcome = outcomes[name]()
    assert (outcome.run_dir / "died").exists() == ("stall" not in name)
    assert outcome.seconds < SOON
    assert not outcome.left


@pytest.mark.parametrize("phase", PHASES[:-1])
def test_rank_5_of_8_is_killed(outcomes: Outcomes, phase: str) -> None:
    outcome = outcomes[f"killed {phase}"]()
    assert (outcome.facts["rank"], outcome.facts["phase"]) == (RANKS[5], phase)
    assert "rank tp5-pp0-dp0 (pid" in outcome.text
    assert outcome.facts["cause"] in ("killed", "host_out_of_memory")


def test_the_engine_itself_is_killed(outcomes: Outcomes) -> None:
    outcome = outcomes["engine killed"]()
    assert outcome.facts["exit_code"] == -9
    assert "in capturing target graphs" in outcome.text


def test_killed_in_the_first_generation(outcomes: Outcomes) -> None:
    outcome = outcomes["killed warm-up"]()
    assert outcome.facts["exit_code"] == -9
    assert "warm-up" in outcome.text


@pytest.mark.parametrize(("how", "cause", "words"), CAUSES)
def test_rank_5s_exception_comes_first_with_its_cause(outcomes: Outcomes, how: str, cause: str, words: str) -> None:
    text, facts = outcomes[how]().text, outcomes[how]().facts
    assert (facts["cause"], facts["rank"]) == (cause, RANKS[5])
    assert f"tp5-pp0-dp0: {WORDS[how].splitlines()[0].rstrip('.')}" in text
    assert words in text
    assert "peer" not in text.split("Wanted")[0].replace("peers", "")


@pytest.mark.parametrize("name", ["stall", "stall with chatter"])
def test_a_stall_shows_every_rank(outcomes: Outcomes, name: str) -> None:
    text = outcomes[name]().text
    assert "no progress for" in text
    assert "50 % of 100 MiB" in text
    for rank in RANKS:
        assert re.search(f"{rank}: (sleeping|running)", text)  # a busy machine may catch one awake


@pytest.mark.parametrize("name", ["flood", "garbled flood"])
def test_a_flood_of_100_mb_before_the_death(outcomes: Outcomes, name: str) -> None:
    outcome = outcomes[name]()
    assert "tp5-pp0-dp0: RuntimeError: rank 5 lost its disk" in outcome.text
    assert outcome.facts["phase"] == GRAPHS
    parts = list(outcome.run_dir.glob("server.log*"))
    assert len(parts) >= 4
    assert sum(part.stat().st_size for part in parts) > 99 << 20


def test_a_stall_that_is_only_reported(node: Node) -> None:
    said: list[Event] = []

    def listen(event: Event) -> None:
        said.append(event)
        if sum(event.kind == "stall" for event in said) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Server(node({"hold": "loading target weights"}, stall_seconds=1.0, on_stall="report"), listen=listen).start()
    assert set(next(event for event in said if event.kind == "stall").facts["processes"]) == set(RANKS)


def test_ready_with_every_rank_and_the_live_table(node: Node) -> None:
    drawn = io.StringIO()
    view = LiveView(Console(file=drawn, force_terminal=True, width=160))
    with Server(node({"seconds": 1.5}), listen=view) as server:
        assert len(server.progress.rows()) == 8
    for words in (*RANKS, "0.1 GiB", "MiB/s", "READY"):
        assert words in drawn.getvalue()


def test_a_draft_that_nothing_is_accepted_of_is_a_verdict(node: Node, tmp_path: Path) -> None:
    settings = {"draft": tmp_path / "draft", "preflight": False}
    text = verdict(node({"histogram": [40]}, **settings)).text
    assert "acceptance length 1.00 in the first generation, 40 rounds" in text
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
    assert json.loads((run_dir / "engine.json").read_text())["declared"]["NCCL_DEBUG"] == "INFO"
    with pytest.raises(InvalidInput, match="process list"):
        read_key(ServeConfig(target=tmp_path, extra="--api-key x"))


def start(config: ServeConfig) -> subprocess.Popen[str]:
    """The real command, in a session of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", "eyas_serve.cli", "launch", "--target", str(config.target), "--port", "0", "--tp", "8",
         "--run-dir", str(config.run_dir), "--engine-python", str(config.engine_python), "--json-events"],
        stdout=subprocess.PIPE, text=True, start_new_session=True, env={**os.environ, **config.environment})


def interrupt(phase: str, config: ServeConfig) -> Outcome:
    """SIGTERM in a phase; while `serving` also the death of rank 5, as `rank`."""
    assert config.run_dir is not None
    process = start(config)
    assert process.stdout is not None
    for line in process.stdout:
        event = json.loads(line)
        if event["event"] == "ready" or event.get("phase") == phase:
            break
    began = time.monotonic()
    if phase == "rank":
        status = json.loads((config.run_dir / "ranks" / f"{RANKS[5]}.json").read_text())
        os.kill(status["pid"], signal.SIGKILL)
    else:
        os.kill(process.pid, signal.SIGTERM)
    rest, _ = process.communicate(timeout=3 * SOON)
    return Outcome("", event, time.monotonic() - began, orphans(str(config.run_dir)), config.run_dir,
                   process.returncode, [json.loads(line) for line in rest.splitlines()])


INTERRUPTED = [*PHASES[:-1], "warm-up", "serving", "rank"]


@pytest.fixture(scope="module")
def interrupted(fake_python: Path, tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """As `outcomes`, of the command."""
    def play(phase: str) -> Outcome:
        plan = {} if phase in ("serving", "rank") else {"hold": phase}
        return interrupt(phase, make_config(tmp_path_factory.mktemp(phase.replace(" ", "-")), fake_python, plan))

    with ThreadPoolExecutor(AT_A_TIME) as pool:
        return {phase: pool.submit(play, phase).result for phase in INTERRUPTED}


@pytest.mark.parametrize("phase", INTERRUPTED[:-1])
def test_sigterm_in_every_phase(interrupted: Outcomes, phase: str) -> None:
    outcome = interrupted[phase]()
    assert outcome.facts["event"] == "ready" if phase == "serving" else outcome.facts["phase"] == phase
    assert outcome.code == 143
    assert outcome.seconds < SOON
    assert not outcome.left


def test_a_rank_that_dies_while_serving(interrupted: Outcomes) -> None:
    outcome = interrupted["rank"]()
    assert outcome.code == 1
    assert next(event for event in outcome.events if event["event"] == "verdict")["rank"] == RANKS[5]
    assert outcome.seconds < SOON
    assert not outcome.left
