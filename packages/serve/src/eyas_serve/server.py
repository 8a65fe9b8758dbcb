"""A guarded SGLang server as a context manager: started, watched, proven, and stopped whole."""

from __future__ import annotations

import atexit
import os
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any

from eyas_contract import EngineFailure
from eyas_contract.checkpoint_files import weight_sizes
from eyas_contract.commands import duration, save_config
from eyas_contract.outputs import lock, require_place
from eyas_serve import processes, proof
from eyas_serve.api_key import read_key, write_engine_config
from eyas_serve.before_start import check_draft, choose_port, cores, network_remarks
from eyas_serve.child import Child
from eyas_serve.client import Client
from eyas_serve.config import ServeConfig
from eyas_serve.events import Event, Listener, as_lines, into_file
from eyas_serve.flags import MODULE, engine_arguments, engine_environment
from eyas_serve.in_flight import in_flight
from eyas_serve.interpreter import Interpreter, find_interpreter
from eyas_serve.log_writer import put_aside
from eyas_serve.progress import Progress
from eyas_serve.record import shareable, write_record
from eyas_serve.verdicts import judge

POLL = 0.2  # seconds
DYING = 3.0  # seconds for the engine to end by itself after a refusal or a rank's death, so that its log is whole


class Server:
    """SGLang with a draft. Use as `with Server(config) as server:`, or call `start` and `stop`.

    Args:
        config: what to serve.
        report: takes the lines of progress; silent by default.
        listen: takes every event, those for a live view included.

    Attributes:
        url: once started.
        client: a Client for it, once started.
        engine: the interpreter and its versions, once started.
        log: the engine's whole output; earlier parts have numbers.
        acceptance_length: of the first speculative request, once started; None without a draft.
    """

    def __init__(self, config: ServeConfig, report: Callable[[str], None] = lambda line: None,
                 listen: Listener = lambda event: None) -> None:
        self.config = config
        self.listeners: list[Listener] = [as_lines(report), listen]
        self.engine: Interpreter | None = None
        self.child: Child | None = None
        self.url = ""
        self.acceptance_length: float | None = None
        self._key_file: Path | None = None
        self._lock: int | None = None  # held while the run folder is ours

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.stop()

    def start(self) -> Server:
        """Check, launch, wait until every rank is proven and a first generation came back.

        Raises:
            InvalidInput: a draft that cannot work with this target, or settings that cannot be.
            EngineFailure: no usable interpreter, port taken, the engine died, stalled, its guard did not report, or
                nothing of the draft was accepted.
        """
        config = self.config
        self.engine, key = find_interpreter(config.engine_python, config.device), read_key(config)
        port = choose_port(config.host, config.port)
        remarks = [*network_remarks(config, key), *check_draft(config, self.engine.sglang)]
        engine_environment(config, Path(), cores())  # refused, where it is, before anything is written
        atexit.register(self.stop)  # a signal between the end of this method and the caller's `with` body
        try:
            self._begin(self.engine, port, key, remarks)
            self._wait()
            self._prove()
            self._forget_key_file()
        except BaseException as error:
            self.stop(grace=0.0)
            if isinstance(error, EngineFailure):
                self.tell("failed", found=error.found, remedy=error.remedy)
            raise
        return self

    def _begin(self, engine: Interpreter, port: int, key: str, remarks: list[str]) -> None:
        """Write down what is started, and start it."""
        config = self.config
        self._prepare_run_dir()
        for remark in remarks:
            self.tell("remark", remark)
        environment = engine_environment(config, self.status_dir, cores())
        command = [str(engine.python), "-m", MODULE, *engine_arguments(config, port)]
        if key:
            self._key_file = write_engine_config(key, self.run_dir)
            command += ["--config", str(self._key_file)]
        write_record(self.run_dir, command, environment, config.environment, engine)
        self.url, self.port = f"http://{_reachable(config.host)}:{port}", port
        self.tell("start", f"SGLang {engine.sglang} on {config.host}:{port}, log {self.log}", url=self.url,
                  log=str(self.log), command=command)
        self.client = Client(self.url, api_key=key, look=self.look)
        self.started, self._oom_kills = time.monotonic(), processes.oom_kills()
        self.child = Child(command, environment, self.log, config.log_rotate_mb << 20, [key] if key else [])

    def tell(self, kind: str, text: str = "", fleeting: bool = False, **facts: Any) -> None:
        """An event for everyone who listens."""
        event = Event(kind, text, facts, fleeting)
        for listener in self.listeners:
            listener(event)

    def stop(self, grace: float = 5.0) -> None:
        """End the engine and all its processes; does nothing where none runs."""
        if self.child is not None:
            self.child.stop(grace)
            self.child = None
            self.client.close()
            self.tell("stopped")
        self._forget_key_file()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
        atexit.unregister(self.stop)

    def watch(self) -> None:
        """Wait until the engine ends by itself or loses a rank.

        Raises:
            EngineFailure: always, for it should not end.
        """
        try:
            while True:
                self.look()
                time.sleep(POLL)
        except EngineFailure as error:
            self.stop(grace=0.0)
            self.tell("failed", found=error.found, remedy=error.remedy)
            raise

    def _prepare_run_dir(self) -> None:
        self.run_dir = self.config.run_dir or Path(tempfile.mkdtemp(prefix="eyas-serve-"))
        self.log, self.status_dir = self.run_dir / "server.log", self.run_dir / "ranks"
        require_place(self.status_dir / "rank", "a folder for the server's log and records, by --run-dir")
        self._lock = lock(self.run_dir)  # a second server would take the first one's ranks and log for old ones
        put_aside(self.log)
        for old in self.status_dir.iterdir():
            old.unlink()
        save_config(shareable(self.config), self.run_dir)
        events = self.run_dir / "events.jsonl"
        events.unlink(missing_ok=True)
        self.listeners.append(into_file(events))

    def _forget_key_file(self) -> None:
        if self._key_file is not None:
            self._key_file.unlink(missing_ok=True)
            self._key_file = None

    def _wait(self) -> None:
        """Until the server answers its health check and every rank is ready."""
        assert self.child is not None
        draft = weight_sizes(self.config.draft) if self.config.draft else []
        self.progress = Progress(self.status_dir, self.log, shards={
            "target": weight_sizes(self.config.target), "draft": draft})
        self._stalls, self._uses, self._used_at = 0, dict[int, processes.Use | None](), time.monotonic()
        while True:
            self.look()
            if self.progress.log.plugin_fault:
                raise self._failure(self.progress.log.plugin_fault, "the guard inside SGLang",
                                    "Without it nothing would be checked. See the log.")
            self._check_stall()
            if self.client.healthy():
                self.look()
                if others := self.child.strangers(self.port):  # begun while ours was loading, say by a second launch
                    raise self._failure(f"process {others[0]} answers there, which is not this engine's, in "
                                        f"{self.progress.phase()}", "the port free until the engine listens on it",
                                        "Stop the other server, or choose another --port.")
                if self.progress.all_ready():
                    for remark in self.progress.remarks():
                        self.tell("remark", f"guard, report only: {remark}")
                    return
                raise self._failure(f"the server is up, but of its ranks only {sorted(self.progress.ranks)} reported "
                                    f"({'; '.join(self.progress.describe())})", "the guard's handshake from every rank",
                                    "The plug-in was not loaded: is SGLANG_PLUGINS set without eyas_serve?")
            time.sleep(POLL)

    def look(self) -> None:
        """Tell what is new; raise where the engine died, lost a rank, or was refused by the guard."""
        assert self.child is not None
        lines = self.progress.poll()
        facts: dict[str, Any] = {"phase": self.progress.phase(), "seconds": round(time.monotonic() - self.started, 1),
                 "ranks": [row.plain() for row in self.progress.rows()]}
        if lines:
            self.tell("progress", "\n".join(lines), **facts)
        elif self.acceptance_length is None:
            self.tell("progress", fleeting=True, **facts)
        if self.child.exit_code() is not None:
            raise self._died()
        if self.progress.error() or self.progress.gone:
            deadline = time.monotonic() + DYING
            while self.child.exit_code() is None and time.monotonic() < deadline:
                time.sleep(POLL)
            raise self._died()

    def _check_stall(self) -> None:
        """After so long without progress, tell every rank's state and stacks; stop there if that is asked."""
        limit, still = self.config.stall_seconds, self.progress.still_for()
        if still < limit / 2:
            self._stalls, self._uses = 0, {}
        elif not self._uses:
            self._used_at = time.monotonic()
            self._uses = {status.pid: processes.use_of(status.pid) for status in self.progress.ranks.values()}
        if still <= limit * (self._stalls + 1):
            return
        self._stalls += 1
        found = self._stalled(still)
        if self.config.on_stall == "stop":
            raise self._failure(found, f"some progress every {duration(limit)} (--stall-seconds)",
                                "It was stopped. A slow disk needs a larger limit, or --on-stall report.")

    def _stalled(self, still: float) -> str:
        assert self.engine is not None
        seconds = time.monotonic() - self._used_at
        pids = {name: status.pid for name, status in self.progress.ranks.items()}
        doing = {name: processes.compare_use(pid, self._uses.get(pid), seconds) for name, pid in pids.items()}
        dump = self.run_dir / f"stacks-{self._stalls}.txt"
        where = processes.dump_stacks(processes.find_py_spy(self.engine.python), pids, dump)
        frames = processes.innermost(dump)
        found = f"no progress for {duration(still)} in: {'; '.join(self.progress.describe())}\n" + "".join(
            f"  {name}: {text}{f'; at {frames[name]}' if name in frames else ''}\n" for name, text in doing.items())
        found += f"  {where}"
        self.tell("stall", f"STALL: {found}", phase=self.progress.phase(), still=round(still, 1), processes=doing,
                  frames=frames, ranks=[row.plain() for row in self.progress.rows()])
        return found

    def _prove(self) -> None:
        """A generation; with a draft it must go through speculation, and of some few something be accepted."""
        seconds = duration(time.monotonic() - self.started)
        if self.config.node_rank:
            self.progress.serves()
            self.tell("ready", f"READY after {seconds}: node {self.config.node_rank} serves node 0", url=self.url)
            return
        self.tell("progress", "warm-up: first generation", phase="warm-up", seconds=0, ranks=[])
        def look() -> None:
            self.look()
            self._check_stall()

        try:
            [first] = in_flight(lambda config: proof.prove(self.client, config), [self.config], 1, look)
        except EngineFailure as error:
            if error.where != self.url:  # already whose verdict it is
                raise
            raise self._failure(error.found, error.wanted, error.remedy) from error
        note, room = "", self.client.room
        if self.config.draft is not None:
            self.acceptance_length = first.acceptance.length
            note = f", {first.text}" + (f", {room} requests at a time" if room else "")
            if self.acceptance_length < self.config.acceptance_floor:
                useless = proof.useless(self.client, self.config, first)
                if self.config.guard == "enforce":
                    raise useless
                self.tell("remark", f"guard, report only: {useless}")
        self.progress.serves()
        seconds = duration(time.monotonic() - self.started)
        self.tell("ready", f"READY after {seconds}: {self.url}{note}", url=self.url, log=str(self.log),
                  seconds=round(time.monotonic() - self.started, 1), acceptance_length=self.acceptance_length,
                  room=room)

    def _died(self) -> EngineFailure:
        code = self.child.exit_code() if self.child else None
        if self.child is not None and code is not None:
            self.child.stop(grace=0.0)
        self.progress.log.finish()
        self.progress.poll()
        verdict = judge(self.progress, code, processes.oom_kills() - self._oom_kills)
        self.tell("verdict", rank=verdict.rank, cause=verdict.cause.name if verdict.cause else "unknown",
                  phase=verdict.phase, exit_code=code)
        return self._failure(verdict.found, "a running server", verdict.remedy)

    def _failure(self, found: str, wanted: str, remedy: str) -> EngineFailure:
        return EngineFailure(f"SGLang at {self.url}", found, wanted, f"{remedy} Whole log: {self.log}".strip())


def _reachable(host: str) -> str:
    """Where a server that listens on every address is reached from here."""
    return {"0.0.0.0": "127.0.0.1", "::": "[::1]"}.get(host, f"[{host}]" if ":" in host else host)
