"""Many short samples through `eyas-extract run`: memory while it works, and how long a resumed run takes to go on.

    python benchmarks/capture_scale.py --target TARGET --work FOLDER --out benchmarks/results/capture_scale.json

Writes the rows, starts the command, kills it by SIGKILL at half of its shards, starts it again, lets it finish. Memory
is the command's own resident set (the engine's apart), read every half second; the scan is the time from the second
start to the first new shard's request, less the start of the engine, as the command's own log times tell.
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
from pathlib import Path
from typing import Any

from host import processor

from eyas_contract import Manifest

TURNS = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten")


def write_rows(path: Path, count: int) -> None:
    draw = random.Random(1)
    with path.open("w", encoding="utf-8") as sink:
        for number in range(count):
            start, end = sorted(draw.sample(range(11), 2))
            sink.write(json.dumps({"id": f"s{number}", "messages": [
                {"role": "user", "content": f"count from {TURNS[start]} to {TURNS[end]}"},
                {"role": "assistant", "content": " ".join(TURNS[start:end + 1])}]}) + "\n")


def shards(store: Path) -> int:
    return sum(1 for path in store.glob("shard-*.safetensors"))


def resident(pid: int) -> float:
    """MiB."""
    try:
        return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20
    except (OSError, IndexError):
        return 0.0


def watched(command: list[str], store: Path, kill_at: int) -> dict[str, Any]:
    """Run the command; memory by number of shards; killed when there are `kill_at`."""
    before, start = shards(store), time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    samples: list[tuple[int, float]] = []
    first = 0.0
    while process.poll() is None:
        there = shards(store)
        if there > before and not first:
            first = time.perf_counter() - start
        samples.append((there, resident(process.pid)))
        if kill_at and there >= kill_at:
            process.send_signal(signal.SIGKILL)
        time.sleep(0.5)
    working = [(n, mib) for n, mib in samples if n > before + 2]
    third = max(len(working) // 3, 1)
    return {"code": process.returncode, "seconds": round(time.perf_counter() - start, 1), "shards": shards(store),
            "first_new_shard_seconds": round(first, 1), "resident_mib_most": round(max((m for _, m in samples)), 1),
            "resident_mib_first_third": round(sum(m for _, m in working[:third]) / third, 1),
            "resident_mib_last_third": round(sum(m for _, m in working[-third:]) / third, 1)}


def scan_seconds(data: Path, store: Path) -> dict[str, float]:
    """What a resume reads before it can go on, piece by piece."""
    from eyas_extract.conversations import count_lines, file_sha256, read_conversations

    result = {}
    for name, call in (("manifest", lambda: Manifest.load(store)), ("digest", lambda: file_sha256(data)),
                       ("count", lambda: count_lines(data)),
                       ("rows", lambda: sum(1 for _ in read_conversations(data, 1 << 60)))):
        start = time.perf_counter()
        call()
        result[name] = round(time.perf_counter() - start, 3)
    return {**result, "whole": round(sum(result.values()), 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--count", type=int, default=100_000)
    parser.add_argument("--engine", default="sglang", choices=["hf", "sglang"])
    parser.add_argument("--device", default="cpu")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    data, store = options.work / "rows.jsonl", options.work / "store"
    write_rows(data, options.count)
    command = [str(Path(sys.executable).parent / "eyas-extract"), "run", "--engine", options.engine, "--target",
               str(options.target), "--data", str(data), "--out", str(store), "--device", options.device]
    half = options.count * 22 // 16384 // 2
    rows = {"machine": {"processor": processor(), "cores": os.cpu_count()},
            "samples": options.count, "engine": options.engine, "killed": watched(command, store, half),
            "scan_seconds": scan_seconds(data, store)}
    options.out.write_text(json.dumps(rows, indent=1) + "\n")
    rows["resumed"] = watched(command, store, 0)
    manifest = Manifest.load(store)
    rows["store"] = {"samples": manifest.num_samples, "tokens": manifest.num_tokens, "complete": manifest.complete}
    options.out.write_text(json.dumps(rows, indent=1) + "\n")
    print(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
