"""SGLang as a child process, from the interpreter that has it; ended whole, also where this process is killed."""

from __future__ import annotations

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from eyas_contract import EngineFailure, InvalidInput
from eyas_contract.interpreters import located
from eyas_contract.keeper import kill_session
from eyas_contract.ports import free_port
from eyas_extract.protocol import READY, REFUSED, CaptureSettings
from eyas_extract.server import Server

INTERPRETER = "EYAS_ENGINE_PYTHON"
POLL = 0.1  # seconds
_PROBE = """
import importlib.metadata as m, importlib.util as u, json
print(json.dumps({"sglang": u.find_spec("sglang") and m.version("sglang"), "cpu": bool(u.find_spec("eyas_serve")),
                  "plugin": any(e.name == "eyas_extract" for e in m.entry_points(group="sglang.srt.plugins"))}))
"""


@dataclass(frozen=True)
class EngineSettings:
    """How to start it.

    Attributes:
        target: the target's folder.
        device, dtype: as SGLang names them.
        tp: ranks.
        python: interpreter with sglang; default $EYAS_ENGINE_PYTHON, else this one.
        port: 0 for a free one.
        host: where it listens.
        extra: further arguments of `sglang.launch_server`, shell-quoted.
        start_seconds: longest silence of its log while it starts.
    """

    target: Path
    device: str
    dtype: str
    tp: int = 1
    python: Path | None = None
    port: int = 0
    extra: str = ""
    start_seconds: float = 300.0
    host: str = "127.0.0.1"


class Engine:
    """A running engine.

    Args:
        settings: how to start it.
        capture: what it captures; None for nothing.
        run_dir: for its log.

    Attributes:
        server: to talk to, once started.

    Raises:
        EngineFailure: no usable interpreter; or it died, was refused by the capture, or stands still.
    """

    def __init__(self, settings: EngineSettings, capture: CaptureSettings | None, run_dir: Path) -> None:
        self.settings, self.capture, self.run_dir = settings, capture, run_dir
        self.log, self.status = run_dir / "server.log", Path(capture.status if capture else run_dir)
        for folder in (run_dir, self.status):
            folder.mkdir(parents=True, exist_ok=True)
        for old in (*self.status.glob(f"{READY}*"), *self.status.glob(f"{REFUSED}*")):
            old.unlink()
        python, version = find_interpreter(settings)
        self.port = settings.port or free_port()
        self.server = Server(f"http://{settings.host}:{self.port}")
        self.where = f"SGLang {version} at {self.server.url}"
        self.keeper = subprocess.Popen([sys.executable, "-m", "eyas_contract.keeper"], stdin=subprocess.PIPE,
                                       stdout=subprocess.DEVNULL, start_new_session=True)
        with self.log.open("ab") as sink:  # after the words of one that died
            self.log_start = sink.tell()
            self.process = subprocess.Popen(
                [str(python), "-m", _module(settings), *arguments(settings, self.port)], env=self._environment(),
                stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True)
        assert self.keeper.stdin is not None
        self.keeper.stdin.write(f"{self.process.pid}\n".encode())
        self.keeper.stdin.flush()
        try:
            self._wait()
        except BaseException:
            self.stop()
            raise

    def alive(self) -> bool:
        """Whether its launcher runs."""
        return self.process.poll() is None

    def stop(self) -> None:
        """End it and all its processes."""
        if self.alive():
            self.process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + 3.0
            while self.alive() and time.monotonic() < deadline:
                time.sleep(POLL)
        kill_session(self.process.pid)
        self.process.wait()
        assert self.keeper.stdin is not None
        self.keeper.stdin.close()
        self.keeper.wait()

    def _environment(self) -> dict[str, str]:
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **(self.capture.environment() if self.capture else {})}
        environment.setdefault("SGLANG_CUDA_COREDUMP_BEFORE_CRASH_WAIT_SECS", "0")  # else a dead engine hangs a minute
        if self.settings.device == "cpu":
            cores = sorted(os.sched_getaffinity(0))
            share = max(len(cores) // self.settings.tp, 1)
            ranks = [cores[i * share % len(cores):i * share % len(cores) + share] for i in range(self.settings.tp)]
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, rank)) for rank in ranks)
        return environment

    def _wait(self) -> None:
        """Until it answers and a rank has said that it captures."""
        size, moved = -1, time.monotonic()
        while True:
            refusal = next((p.read_text(encoding="utf-8") for p in self.status.glob(f"{REFUSED}*")), "").strip()
            if refusal or not self.alive():
                raise self._failure(f"it ended: {refusal or self._last_words()}", "a running engine")
            if self.server.healthy():
                if self.capture is None or any(self.status.glob(f"{READY}*")):
                    return
                raise self._failure("no rank says that it captures", "the capture plug-in, loaded by SGLang "
                                    "(is SGLANG_PLUGINS set without eyas_extract?)")
            if self.log.stat().st_size != size:
                size, moved = self.log.stat().st_size, time.monotonic()
            if time.monotonic() - moved > self.settings.start_seconds:
                raise self._failure(f"nothing new in its log for {self.settings.start_seconds:.0f} s", "some progress")
            time.sleep(POLL)

    def _last_words(self) -> str:
        lines = self.log.read_bytes()[self.log_start:].decode("utf-8", "replace").splitlines()
        faults = [line for line in lines if "Error" in line or "Exception" in line]
        return " | ".join(line.strip() for line in (faults or lines)[-3:]) or "it wrote nothing"

    def _failure(self, found: str, wanted: str) -> EngineFailure:
        return EngineFailure(self.where, found, f"{wanted}, by eyas-extract", f"Whole log: {self.log}")


def _module(settings: EngineSettings) -> str:
    """On a CPU, SGLang's kernels are put in their places by eyas-serve's main module, which then becomes SGLang."""
    return "eyas_serve.engine.main" if settings.device == "cpu" else "sglang.launch_server"


def arguments(settings: EngineSettings, port: int) -> list[str]:
    """Arguments of `sglang.launch_server`; the user's own come last and so win.

    Raises:
        InvalidInput: `extra` with unbalanced quotes.
    """
    words = ["--model-path", str(settings.target), "--host", settings.host, "--port", str(port), "--device",
             settings.device, "--dtype", settings.dtype, "--tp-size", str(settings.tp), "--skip-server-warmup",
             "--disable-radix-cache", "--skip-tokenizer-init"]
    if settings.device == "cpu":
        # Named apart: as `--attention-backend` SGLang would replace intel_amx where the processor has no AMX.
        words += ["--prefill-attention-backend", "intel_amx", "--decode-attention-backend", "intel_amx",
                  "--mem-fraction-static", "0.3", "--max-total-tokens", "16384"]
    try:
        return words + shlex.split(settings.extra)
    except ValueError as error:
        raise InvalidInput("--engine-args", f"{settings.extra!r} ({error})",
                           "shell-quoted arguments of sglang.launch_server", "Balance the quotes.") from error


def find_interpreter(settings: EngineSettings) -> tuple[Path, str]:
    """The interpreter and its SGLang's version.

    Raises:
        EngineFailure: it does not run, or lacks sglang, our plug-in, or (for a CPU) eyas-serve.
    """
    python = located(settings.python or os.environ.get(INTERPRETER) or sys.executable)
    where, choose = f"engine interpreter {python}", f"Name another with --engine-python or ${INTERPRETER}."
    try:
        done = subprocess.run([str(python), "-c", _PROBE], capture_output=True, text=True, timeout=60, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
    except (OSError, subprocess.SubprocessError, ValueError, IndexError) as error:
        raise EngineFailure(where, f"does not answer ({error})", "a Python with sglang", choose) from error
    missing = [name for name, there in (("sglang", found["sglang"]), ("eyas-extract", found["plugin"]),
                                        ("eyas-serve", found["cpu"] or settings.device != "cpu")) if not there]
    if missing:
        raise EngineFailure(where, f"{', '.join(missing)} not installed there", "sglang with the capture plug-in, and "
                            "on a CPU eyas-serve, which makes SGLang run there", choose)
    return python, str(found["sglang"])
