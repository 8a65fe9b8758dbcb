"""Runs the demo's commands, one after the other or in lanes side by side, and times each."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

BIN = Path(sys.executable).parent
Result = TypeVar("Result")
Command = tuple[str, list[object]]
"""A stage's name and the words of its command."""


class Stages:
    """Runs stages and remembers what each took. A failing command ends the demo with its name and exit code."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self._failed = threading.Event()

    def call(self, name: str, function: Callable[..., Result], *arguments: object) -> Result:
        """Run one Python step."""
        print(f"\n== {name}", flush=True)
        start = time.monotonic()
        result = function(*arguments)
        self.seconds[name] = round(time.monotonic() - start, 1)
        return result

    def command(self, name: str, *words: object) -> None:
        """Run one eyas command; its output is the user's progress."""
        start = time.monotonic()
        code = subprocess.run(self._announced(name, words), check=False).returncode
        self._finished(name, code, start)

    def lanes(self, *lanes: list[Command]) -> None:
        """Run lanes of commands side by side, each on its share of the cores; every line says whose it is.

        Work of many small operations runs faster as two processes of one core each than as one process of two.
        """
        cores = sorted(os.sched_getaffinity(0))
        share = max(len(cores) // len(lanes), 1)
        with ThreadPoolExecutor(len(lanes)) as pool:
            runs = [pool.submit(self._lane, lane, cores[i * share % len(cores):][:share])
                    for i, lane in enumerate(lanes)]
        for run in runs:
            run.result()

    def _lane(self, lane: list[Command], cores: list[int]) -> None:
        os.sched_setaffinity(0, cores)  # of this thread alone, and inherited by what it starts
        environment = {**os.environ, "OMP_NUM_THREADS": str(len(cores))}
        for name, words in lane:
            if self._failed.is_set():
                return
            start = time.monotonic()
            with subprocess.Popen(self._announced(name, words), stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                  env=environment) as process:
                assert process.stdout is not None
                for line in process.stdout:
                    last = line.rstrip().rpartition(b"\r")[2]  # a bar's last state
                    print(f"[{name}] {last.decode('utf-8', 'replace')}", flush=True)
            self._finished(name, process.returncode, start)

    def _announced(self, name: str, words: list[object] | tuple[object, ...]) -> list[str]:
        result = [str(BIN / str(words[0])), *map(str, words[1:])]
        print(f"\n== {name}: {' '.join([str(words[0]), *result[1:]])}", flush=True)
        return result

    def _finished(self, name: str, code: int, start: float) -> None:
        if code:
            self._failed.set()
            raise SystemExit(f"stage {name} failed with exit code {code}")
        self.seconds[name] = round(time.monotonic() - start, 1)
