"""Runs eyas-extract in forked children and kills them by SIGKILL at the n-th sync or rename, or call of any function.

One job a line on stdin: {"argv": [...], "at": 3} or {"argv": [...], "call": 70000} or {"argv": [...]}. Answers each
with its exit status (-9 where it was killed). Calls are counted rather than seconds, so that a kill falls into the work
on a machine of any speed; "calls": FILE writes their number there. A process of its own, so that children are forked
before any thread pool exists.
"""

from __future__ import annotations

import importlib
import json
import os
import resource
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from eyas_extract.cli import main

for module in ("run", "regenerate", "engine_run"):  # loaded once, before the first fork
    importlib.import_module(f"eyas_extract.{module}")


def die_at(number: int) -> None:
    """SIGKILL before the n-th call of os.fsync or Path.replace."""
    calls = 0

    def counted(function: Any) -> Any:
        def inner(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number:
                os.kill(os.getpid(), signal.SIGKILL)
            return function(*arguments)
        return inner

    os.fsync = counted(os.fsync)
    Path.replace = counted(Path.replace)  # type: ignore[method-assign]


def count_calls(job: dict[str, Any]) -> Callable[[], int]:
    """SIGKILL at the call numbered job["call"] of any function, Python's or C's; returns what tells their number."""
    calls, last = 0, job.get("call", 0)

    def event(frame: Any, kind: str, argument: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == last:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(event)
    return lambda: calls


def child(job: dict[str, Any]) -> None:
    """Run one command; never returns."""
    torch.set_num_threads(1)
    with Path(job.get("log", os.devnull)).open("w") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)
    if "at" in job:
        die_at(job["at"])
    if "file_limit" in job:
        resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_limit"], resource.RLIM_INFINITY))
    calls = count_calls(job) if "call" in job or "calls" in job else None
    code = 99
    try:
        main(job["argv"])
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.setprofile(None)
        if calls and "calls" in job:
            Path(job["calls"]).write_text(str(calls()))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


for line in sys.stdin:
    work = json.loads(line)
    pid = os.fork()
    if pid == 0:
        child(work)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
