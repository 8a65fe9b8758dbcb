"""The results file of `several_gpus.sh`, and what it is written about: begin, the end of a part, the verdict.

    python several_report.py begin --parts capture,train --out FILE [--target T --draft D --prompts P] [--cpu]
    python several_report.py end --part capture --code 0 --seconds 12 --out FILE
    python several_report.py summary --out FILE

The file: `{"machine", "settings", "ok", "parts": {NAME: {"state", "seconds", "checks", "numbers"}}}`. A check is
`{"check", "ranks", "found", "wanted", "ok"}`; `ok` is null where this machine cannot decide it, and `why` says so. No
torch here: this runs between the parts, whose time is short.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

from host import expose_plugin, nvidia_smi, processor

from eyas_contract.contract import read_json, write_text_atomic
from eyas_serve.interpreter import find_interpreter

LIMITS = {"capture": 330, "killed": 200, "train": 330, "serve": 260}  # seconds: 234, 84, 117, 211 on two H200s
ON_A_CPU = 20  # times as long: nothing is measured there, and starts take minutes


def sizes(cpu: bool) -> list[int]:
    """Numbers of ranks to run with: powers of two up to the number of GPUs; 1 and 2 on a CPU."""
    return [1, 2] if cpu else [n for n in (1, 2, 4, 8) if n <= len(visible())]


def visible() -> list[str]:
    """The GPUs that may be used, as CUDA_VISIBLE_DEVICES names them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    return [str(i) for i in range(len(nvidia_smi("name")))] if named is None else named.split(",")


def machine(cpu: bool) -> dict[str, Any]:
    """What this is."""
    gpus = [] if cpu else nvidia_smi("name,driver_version")
    return {"gpus": [name for name, _ in gpus], "gpu_count": len(gpus), "driver": gpus[0][1] if gpus else None,
            "processor": processor(), "cores": len(os.sched_getaffinity(0)), "torch": version("torch"),
            "sglang": find_interpreter(None, "cpu" if cpu else "cuda").sglang, "python": sys.version.split()[0],
            "date": time.strftime("%F %T")}


def begin(options: argparse.Namespace) -> None:
    """Write the file with no part run; print each part and the seconds that it may take."""
    if options.target is None and not options.cpu:
        sys.exit("give --target: a small Llama with its tokenizer (or --cpu)")
    try:
        ranks = sizes(options.cpu)
    except (OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"nvidia-smi shows no GPU ({error}): give --cpu")
    expose_plugin(options.work / "entry", "eyas-serve")  # `machine` asks the interpreter what it has
    given = {name: path.name for name in ("target", "draft", "prompts") if (path := getattr(options, name))}
    fresh = {"state": "not run", "seconds": 0.0, "checks": [], "numbers": []}
    parts = dict.fromkeys(options.parts.split(","), fresh)
    everything = {"machine": machine(options.cpu), "settings": {"ranks": ranks, **given}, "ok": False, "parts": parts}
    save(options.out, everything)
    for name in parts:
        print(name, LIMITS[name] * (ON_A_CPU if options.cpu else max(len(ranks) - 1, 1)))


def add(out: Path, part: str, kind: str, row: dict[str, Any]) -> None:
    """One more row of a part's `checks` or `numbers`."""
    everything = load(out)
    everything["parts"][part]["state"] = "running"
    everything["parts"][part][kind].append(row)
    save(out, everything)


def end(out: Path, part: str, code: int, seconds: float) -> None:
    """How a part ended, and whether everything so far is well."""
    everything = load(out)
    state = "done" if code == 0 else "out of time" if code in (124, 137) else f"failed (exit code {code})"
    everything["parts"][part] |= {"state": state, "seconds": seconds}
    everything["ok"] = all(p["state"] == "done" and all(row["ok"] is not False for row in p["checks"])
                           for p in everything["parts"].values())
    save(out, everything)


def summary(out: Path) -> int:
    """Print a line for each check; 0 where all is well."""
    everything = load(out)
    for name, found in everything["parts"].items():
        print(f"{name}: {found['state']}, {found['seconds']:.0f} s")
        for row in found["checks"]:
            mark = {True: "ok", False: "FAILED", None: "not decided"}[row["ok"]]
            print(f"  {mark:<12}{row['ranks']} ranks  {row['check']}: {json.dumps(row['found'])[:160]} "
                  f"(wanted: {row['wanted']}){'; ' + row['why'] if 'why' in row else ''}")
    return 0 if everything["ok"] else 1


def load(out: Path) -> dict[str, Any]:
    """The file."""
    everything: dict[str, Any] = read_json(out, "results of several_gpus.sh")
    return everything


def save(out: Path, everything: dict[str, Any]) -> None:
    """Replace the file."""
    write_text_atomic(out, json.dumps(everything, indent=1) + "\n")


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
    more = parser()
    more.add_argument("word", choices=["begin", "end", "summary"])
    more.add_argument("--parts", default="")
    more.add_argument("--part", default="")
    more.add_argument("--code", type=int, default=0)
    more.add_argument("--seconds", type=float, default=0.0)
    options = more.parse_args()
    if options.word == "begin":
        begin(options)
    elif options.word == "end":
        end(options.out, options.part, options.code, options.seconds)
    else:
        sys.exit(summary(options.out))


if __name__ == "__main__":
    main()
