"""What the parts of `several_gpus.sh` share: arguments, their words in the results file, and the inputs made here."""

from __future__ import annotations

import json
import random
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil

sys.path.extend(str(Path(__file__).parent.parent / "tests" / name) for name in ("", "serve", "integration"))

from host import expose_plugin, nvidia_smi
from several_report import add, parser, sizes, visible

import tiny

MIB_LEFT = 16  # of a GPU's memory that a stopped server may leave in use: the driver's own rounding


class Part:
    """One part: its arguments, and its object in the results file, which is rewritten whole at every word."""

    def __init__(self, name: str) -> None:
        options = parser().parse_args()
        self.name, self.out, self.cpu = name, options.out, options.cpu
        self.device, self.dtype = ("cpu", "float32") if options.cpu else ("cuda", "bfloat16")
        self.sizes, self.gpus = sizes(options.cpu), [] if options.cpu else visible()
        self.work: Path = options.work / name
        self.work.mkdir(parents=True, exist_ok=True)
        self.target: Path = options.target or tiny.target_folder()
        self.draft: Path | None = options.draft
        self.prompts: Path | None = options.prompts

    def check(self, check: str, ranks: int, found: Any, wanted: str, ok: bool | None, why: str = "") -> None:
        """A check with its figure."""
        row = {"check": check, "ranks": ranks, "found": found, "wanted": wanted, "ok": ok}
        self._put("checks", row | ({"why": why} if why else {}))

    def skip(self, check: str, ranks: int, wanted: str, why: str) -> None:
        """A check that this machine cannot decide."""
        self.check(check, ranks, None, wanted, None, why)

    def nothing_left(self, ranks: int, variable: str, memory: list[int]) -> None:
        """Check that engines, told by an environment variable that names this part's folder, have ended, and that the
        GPUs' memory is as it was (MiB)."""
        left = living(variable, str(self.work))
        self.check("no process of an engine is left", ranks, left, "none", not left)
        check, wanted = "no GPU memory is left in use", f"MiB on each GPU beyond the start's, at most {MIB_LEFT}"
        if self.cpu:
            self.skip(check, ranks, wanted, "no GPU")
            return
        mib = memory_left(memory)
        self.check(check, ranks, mib, wanted, max(mib) <= MIB_LEFT)

    def number(self, **row: Any) -> None:
        """A figure that is not judged."""
        self._put("numbers", row)

    def _put(self, kind: str, row: dict[str, Any]) -> None:
        print(f"[{time.strftime('%T')}] {self.name}: {json.dumps(row)[:1000]}", flush=True)
        add(self.out, self.name, kind, row)


def part(name: str) -> Part:
    """The part that this process is. SIGTERM becomes an exit, so that `finally` ends what runs."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    result = Part(name)
    for distribution in ("eyas-extract", "eyas-serve"):
        expose_plugin(result.work / distribution.replace("-", "_"), distribution)
    return result


def gpu_memory() -> list[int]:
    """MiB in use on each GPU."""
    return [int(row[0]) for row in nvidia_smi("memory.used")]


def memory_left(before: list[int], seconds: float = 10.0) -> list[int]:
    """MiB in use beyond `before` on each GPU, once nothing more is given back or the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        left = [now - then for now, then in zip(gpu_memory(), before, strict=True)]
        if max(left) <= MIB_LEFT or time.monotonic() > deadline:
            return left
        time.sleep(0.5)


def living(variable: str, marker: str, seconds: float = 10.0) -> list[str]:
    """Command lines of living processes with `marker` in an environment variable, waited for until the time is over."""
    deadline = time.monotonic() + seconds
    while True:
        found = []
        for process in psutil.process_iter():
            try:
                if marker in process.environ().get(variable, "") and process.status() != psutil.STATUS_ZOMBIE:
                    found.append(" ".join(process.cmdline())[:80])
            except psutil.Error:
                continue
        if not found or time.monotonic() > deadline:
            return found
        time.sleep(0.1)


def conversations(path: Path, count: int, turns: tuple[int, int], seed: int) -> Path:
    """JSONL of conversations of `turns` (least, most) questions, each answered."""
    draw, rows = random.Random(seed), []
    for number in range(count):
        spoken = [tiny.conversation(draw) for _ in range(draw.randint(*turns))]
        rows.append({"id": f"row-{number}", "messages": [
            {"role": role, "content": text} for pair in spoken for role, text in zip(("user", "assistant"), pair,
                                                                                     strict=True)]})
    return tiny.write_jsonl(path, rows)
