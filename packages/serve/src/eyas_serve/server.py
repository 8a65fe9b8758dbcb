"""A guarded SGLang server as a context manager: started, watched, proven, and stopped whole."""

from __future__ import annotations

import atexit
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType

from eyas_contract import EngineFailure
from eyas_contract.commands import duration, save_config
from eyas_serve.before_start import check_draft, choose_port, cores
from eyas_serve.child import Child
from eyas_serve.client import Client
from eyas_serve.config import ServeConfig
from eyas_serve.flags import MODULE, engine_arguments, engine_environment
from eyas_serve.interpreter import Interpreter, find_interpreter
from eyas_serve.log import last_words
from eyas_serve.log_writer import put_aside
from eyas_serve.progress import Progress

POLL = 0.2  # seconds
DYING = 3.0  # seconds for the engine to end by itself after a refusal, so that its log is whole
PROOF_TOKENS = 8


class Server:
    """SGLang with a draft. Use as `with Server(config) as server:`, or call `start` and `stop`.

    Args:
        config: what to serve.
        report: takes the lines of progress; silent by default.

    Attributes:
        url: once started.
        client: a Client for it, once started.
        engine: the interpreter and its versions, once started.
        log: the engine's whole output.
    """

    def __init__(self, config: ServeConfig, report: Callable[[str], None] = lambda line: None) -> None:
        self.config, self.report = config, report
        self.engine: Interpreter | None = None
        self.child: Child | None = None
        self.url = ""

    def __enter__(self) -> Server:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.stop()

    def start(self) -> Server:
        """Check, launch, wait until every rank is proven and a first generation came back.

        Raises:
            InvalidInput: a draft that cannot work with this target, or settings that cannot be.
            EngineFailure: no usable interpreter, port taken, the engine died, stalled, or its guard did not report.
        """
        config = self.config
        self.engine = find_interpreter(config.engine_python, config.device)
        port = choose_port(config.host, config.port)
        for remark in check_draft(config, self.engine.sglang):
            self.report(remark)
        self._prepare_run_dir()
        command = [str(self.engine.python), "-m", MODULE, *engine_arguments(config, port)]
        environment = engine_environment(config, self.status_dir, cores())
        self.report(f"SGLang {self.engine.sglang} on {config.host}:{port}, log {self.log}")
        self.url = f"http://{config.host}:{port}"
        self.client = Client(self.url)
        started = time.monotonic()
        atexit.register(self.stop)  # a signal between the end of this method and the caller's `with` body
        try:
            self.child = Child(command, environment, self.log)
            self._wait()
            self._prove()
            self.report(f"READY after {duration(time.monotonic() - started)}: {self.url}")
        except BaseException:
            self.stop(grace=0.0)
            raise
        return self

    def stop(self, grace: float = 5.0) -> None:
        """End the engine and all its processes; does nothing where none runs."""
        if self.child is not None:
            self.child.stop(grace)
            self.child = None
            self.client.close()
        atexit.unregister(self.stop)

    def watch(self) -> None:
        """Wait until the engine ends by itself.

        Raises:
            EngineFailure: always, for it should not end.
        """
        assert self.child is not None
        while self.child.exit_code() is None:
            time.sleep(POLL)
        raise self._died()

    def _prepare_run_dir(self) -> None:
        run_dir = self.config.run_dir or Path(tempfile.mkdtemp(prefix="eyas-serve-"))
        self.log, self.status_dir = run_dir / "server.log", run_dir / "ranks"
        self.status_dir.mkdir(parents=True, exist_ok=True)
        put_aside(self.log)
        for old in self.status_dir.iterdir():
            old.unlink()
        save_config(self.config, run_dir)

    def _wait(self) -> None:
        """Until the server answers its health check and every rank is ready."""
        assert self.child is not None
        self.progress = Progress(self.status_dir, self.log)
        while True:
            self._look()
            if self.progress.log.plugin_fault:
                raise self._failure(self.progress.log.plugin_fault, "the guard inside SGLang",
                                    "Without it nothing would be checked. See the log.")
            if self.client.healthy():
                self._look()
                if self.progress.all_ready():
                    for remark in self.progress.remarks():
                        self.report(f"guard, report only: {remark}")
                    return
                raise self._failure(f"the server is up, but of its ranks only {sorted(self.progress.ranks)} reported "
                                    f"({'; '.join(self.progress.describe())})", "the guard's handshake from every rank",
                                    "The plug-in was not loaded: is SGLANG_PLUGINS set without eyas_serve?")
            time.sleep(POLL)

    def _look(self) -> None:
        """Report what is new; raise where the engine died, was refused by the guard, or has not moved for too long."""
        assert self.child is not None
        for line in self.progress.poll():
            self.report(line)
        if self.child.exit_code() is not None:
            raise self._died()
        if self.progress.error():
            deadline = time.monotonic() + DYING
            while self.child.exit_code() is None and time.monotonic() < deadline:
                time.sleep(POLL)
            raise self._died()
        if self.progress.still_for() > self.config.stall_seconds:
            raise self._failure(f"no progress for {duration(self.progress.still_for())} in: "
                                f"{'; '.join(self.progress.describe())}",
                                f"some progress every {duration(self.config.stall_seconds)} (--stall-seconds)",
                                "It was stopped. A slow disk needs a larger limit.")

    def _prove(self) -> None:
        """One generation; with a draft it must have gone through speculation."""
        self.report("warm-up: first generation")
        answer = self.client.generate([1, 2, 3, 4], PROOF_TOKENS, ignore_eos=True)
        if len(answer.output_ids) != PROOF_TOKENS:
            raise self._failure(f"{len(answer.output_ids)} tokens", f"{PROOF_TOKENS} tokens of a first generation",
                                "See the log.")
        if self.config.draft is not None and not sum(answer.histogram):
            raise self._failure("a first generation without a round of speculation", "the draft in use",
                                "An argument in --extra switched speculation off.")

    def _died(self) -> EngineFailure:
        self.progress.poll()
        code = self.child.exit_code() if self.child else None
        ended = "refused" if code is None else f"died (exit code {code})"
        complaint, words = self.progress.error(), last_words(self.log)
        found = f"the engine {ended}: {(complaint or words).rstrip('.')}"
        if complaint and words.splitlines()[0][:60] not in complaint and complaint[:60] not in words:
            found += f"\nlast words of its log:\n{words}\n"
        return self._failure(found, "a running server", "")

    def _failure(self, found: str, wanted: str, remedy: str) -> EngineFailure:
        return EngineFailure(f"SGLang at {self.url}", found, wanted, f"{remedy} Whole log: {self.log}".strip())
