"""Runs eyas-extract in forked children and kills them with SIGKILL: at the n-th sync or rename, or after a time.

    killer.py '[{"argv": [...], "at": 3}, {"argv": [...], "after": 0.2}, {"argv": [...]}]'

Prints one exit status a job (-9 where it was killed). A process of its own, so that children are forked before any
thread pool exists.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import resource
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch

from eyas_extract.cli import main

for module in ("run", "regenerate"):  # loaded once, before the first fork
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
    code = 99
    try:
        main(job["argv"])
    except SystemExit as end:
        code = int(end.code or 0)
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


for work in json.loads(sys.argv[1]):
    pid = os.fork()
    if pid == 0:
        child(work)
    if "after" in work:
        time.sleep(work["after"])
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
