"""What the parts of `several_gpus.sh` share: arguments, the one results file, the machine, the inputs made here.

The file: `{"machine", "settings", "ok", "parts": {NAME: {"state", "seconds", "checks", "numbers"}}}`. A check is
`{"check", "ranks", "found", "wanted", "ok"}`; `ok` is null where this machine cannot decide it, and `why` says so.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import psutil
import torch

TESTS = Path(__file__).parent.parent / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "serve"), str(TESTS / "integration")]

import capture
import probe
import tiny
from capture_scale import processor

from eyas_contract.contract import read_json, write_text_atomic
from eyas_serve.interpreter import find_interpreter

SECONDS_A_SIZE = 90  # of each part: with 1 and 2 GPUs three parts end within 9 minutes
MIB_LEFT = 16  # of a GPU's memory that a stopped server may leave in use: the driver's own rounding


class Part:
    """One part: its arguments, and its object in the results file, which is rewritten whole at every word."""

    def __init__(self, name: str, options: argparse.Namespace) -> None:
        self.name, self.options, self.out = name, options, options.out
        self.cpu: bool = options.cpu
        self.device, self.dtype = ("cpu", "float32") if options.cpu else ("cuda", "bfloat16")
        self.work: Path = options.work / name
        self.work.mkdir(parents=True, exist_ok=True)
        self.sizes = sizes(options.cpu)
        self.target: Path = options.target or tiny.target_folder()

    def check(self, check: str, ranks: int, found: Any, wanted: str, ok: bool | None, why: str = "") -> None:
        """A check with its figure."""
        row = {"check": check, "ranks": ranks, "found": found, "wanted": wanted, "ok": ok, **({"why": why} if why else {})}
        self._put("checks", row)

    def skip(self, check: str, ranks: int, wanted: str, why: str) -> None:
        """A check that this machine cannot decide."""
        self.check(check, ranks, None, wanted, None, why)

    def number(self, **row: Any) -> None:
        """A figure that is not judged."""
        self._put("numbers", row)

    def end(self, code: int, seconds: float) -> None:
        """How the part ended, and whether everything so far is well."""
        everything = read_json(self.out, "results")
        part = everything["parts"][self.name]
        state = "done" if code == 0 else "out of time" if code in (124, 137) else f"failed (exit code {code})"
        part |= {"state": state, "seconds": seconds}
        everything["ok"] = all(p["state"] == "done" and all(row["ok"] is not False for row in p["checks"])
                               for p in everything["parts"].values())
        write_text_atomic(self.out, json.dumps(everything, indent=1) + "\n")

    def _put(self, kind: str, row: dict[str, Any]) -> None:
        print(f"[{time.strftime('%T')}] {self.name}: {json.dumps(row)[:1000]}", flush=True)
        everything = read_json(self.out, "results")
        everything["parts"][self.name]["state"] = "running"
        everything["parts"][self.name][kind].append(row)
        write_text_atomic(self.out, json.dumps(everything, indent=1) + "\n")


def part(name: str) -> Part:
    """The part that this process is. SIGTERM becomes an exit, so that `finally` ends what runs."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    result = Part(name, parser().parse_args())
    known = {entry.name for entry in entry_points(group="sglang.srt.plugins")}
    for plugin, expose in (("eyas_extract", capture.expose_plugin), ("eyas_serve", probe.expose_plugin)):
        if plugin not in known:  # our packages are on PYTHONPATH only
            expose(result.work / plugin)
    return result


def sizes(cpu: bool) -> list[int]:
    """Numbers of ranks to run with: powers of two up to the number of GPUs; 1 and 2 on a CPU."""
    return [1, 2] if cpu else [n for n in (1, 2, 4, 8) if n <= torch.cuda.device_count()]


def machine(cpu: bool) -> dict[str, Any]:
    """What this is."""
    driver = [] if cpu else nvidia_smi("name,driver_version")
    return {"gpus": [row[0] for row in driver], "gpu_count": len(driver), "driver": driver[0][1] if driver else None,
            "processor": processor(), "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__,
            "sglang": find_interpreter(None, "cpu" if cpu else "cuda").sglang, "python": sys.version.split()[0],
            "date": time.strftime("%F %T")}


def nvidia_smi(query: str) -> list[list[str]]:
    """A row for each GPU."""
    done = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits"], capture_output=True,
                          text=True, check=True)
    return [[value.strip() for value in line.split(",")] for line in done.stdout.splitlines()]


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


def parser() -> argparse.ArgumentParser:
    """Arguments of every part."""
    result = argparse.ArgumentParser()
    result.add_argument("--target", type=Path)
    result.add_argument("--draft", type=Path)
    result.add_argument("--prompts", type=Path)
    result.add_argument("--out", type=Path, required=True)
    result.add_argument("--work", type=Path, required=True)
    result.add_argument("--cpu", action="store_true")
    return result


def main() -> None:
    """`begin` writes the file and prints the usual limit, `end` says how a part ended, `summary` prints the verdict."""
    more = parser()
    more.add_argument("word", choices=["begin", "end", "summary"])
    more.add_argument("--parts", default="")
    more.add_argument("--part", default="")
    more.add_argument("--code", type=int, default=0)
    more.add_argument("--seconds", type=float, default=0.0)
    options = more.parse_args()
    if options.word == "begin":
        ranks = sizes(options.cpu)
        if not ranks or (options.target is None and not options.cpu):
            sys.exit("no GPU: give --cpu" if not ranks else "give --target: a small Llama with its tokenizer")
        settings = {"ranks": ranks, **{name: str(getattr(options, name).name) for name in ("target", "draft", "prompts")
                                       if getattr(options, name)}}
        parts = {name: {"state": "not run", "seconds": 0.0, "checks": [], "numbers": []}
                 for name in options.parts.split(",")}
        write_text_atomic(options.out, json.dumps({"machine": machine(options.cpu), "settings": settings, "ok": False,
                                                   "parts": parts}, indent=1) + "\n")
        print((600 if options.cpu else SECONDS_A_SIZE) * max(len(ranks), 2))
    elif options.word == "end":
        Part(options.part, options).end(options.code, options.seconds)
    else:
        sys.exit(summary(read_json(options.out, "results")))


def summary(everything: dict[str, Any]) -> int:
    """Print a line for each check; 0 where all is well."""
    for name, found in everything["parts"].items():
        print(f"{name}: {found['state']}, {found['seconds']:.0f} s")
        for row in found["checks"]:
            mark = {True: "ok", False: "FAILED", None: "not decided"}[row["ok"]]
            print(f"  {mark:<12}{row['ranks']} ranks  {row['check']}: {json.dumps(row['found'])[:160]} "
                  f"(wanted: {row['wanted']}){'; ' + row['why'] if 'why' in row else ''}")
    return 0 if everything["ok"] else 1


if __name__ == "__main__":
    main()
