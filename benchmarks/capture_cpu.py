"""What the capture costs in processor time, without a GPU: of the engine's scheduler, and of each stage for a GB.

    PYTHONPATH=native/python:packages/contract/src:packages/extract/src \\
    python benchmarks/capture_cpu.py --out benchmarks/results/capture_cpu.json

A thread stands for SGLang's scheduler: per forward pass of 8,192 tokens, 1,500 small torch calls, each of which gives
the interpreter's lock away and wants it back. It hands states of SmolLM2's size to the capture's own ring, which writes
them to files in memory by its own process. The states are not computed or gathered: on a GPU that is the device's work.
As on a GPU, a thread waits for each buffer's copy before it tells the writer. Processor time, since seconds mean little
on a machine that does other work too.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import queue
import resource
import shutil
import threading
import time
from array import array
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import torch
from host import processor

from eyas_contract import CaptureSpec, store_tensors
from eyas_contract.contract import write_text_atomic
from eyas_extract.inside.ring import Ring, Slot
from eyas_extract.inside.sink import Piece
from eyas_extract.mask import Sample
from eyas_extract.protocol import Captor, CaptureSettings, Mark, read_rows, rows_file
from eyas_extract.shard_file import ShardFile

AUX, HIDDEN, TOKENS, CALLS, COPY = (1, 14, 26), 576, 8192, 1500, 0.001


def ring_of(root: Path) -> Ring:
    """The capture's ring, of which only the gathering is left out."""
    captor = Captor("0", "benchmark", AUX, HIDDEN, "BF16", "BF16", str(root), "0", "")
    ring = Ring(CaptureSettings(AUX, str(root), str(root), "BF16", slot_mib=64, slots=12, threads=4), captor, "cpu",
                lambda: "")
    for slot in ring.slots:
        for buffer in slot.host.values():
            buffer.fill_(1)
    waiting: queue.SimpleQueue[Slot] = queue.SimpleQueue()
    send = ring._send

    def send_all() -> None:
        while True:
            slot = waiting.get()
            time.sleep(COPY)
            send(slot)

    threading.Thread(target=send_all, daemon=True).start()
    replaced: dict[str, Callable[..., None]] = {"gather": lambda *_: None, "_largest": lambda *_: None,
                                                "_send": waiting.put}
    for name, function in replaced.items():
        setattr(ring, name, function)
    return ring


def used(thread: bool = False) -> tuple[float, int]:
    """Processor seconds of this process or thread so far, and how often it had to wait."""
    found = resource.getrusage(resource.RUSAGE_THREAD if thread else resource.RUSAGE_SELF)
    return found.ru_utime + found.ru_stime, found.ru_nvcsw


def measured(root: Path, length: int, forwards: int) -> dict[str, Any]:
    """One length of samples."""
    capture = CaptureSpec(AUX, HIDDEN, "pre_norm", store_tensors("BF16"), TOKENS)
    samples = [Sample(f"s{i}", i + 1, array("i", range(length)), b"\1" * length) for i in range(TOKENS // length)]
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    begun = used()[0]
    files = [ShardFile(root, capture, samples, {}) for _ in range(forwards)]
    layout = used()[0] - begun
    size = sum(file.path.stat().st_size for file in files) / 1e9
    ring = ring_of(root)
    ids = [[mark.request_id() for mark in file.marks()] for file in files]
    states = [torch.zeros(TOKENS, HIDDEN, dtype=torch.bfloat16) for _ in range(len(AUX) + 1)]
    left, right = torch.randn(24, 24), torch.randn(24, 24)

    def schedule(take: bool) -> dict[str, float]:
        seconds, waits = used(thread=True)
        for number in range(forwards):
            for _ in range(CALLS):
                torch.add(left, right)
            if take:
                ring.take(states, [Piece(Mark.parse(i) or Mark("", 0, 0), 0, at * length, length)
                                   for at, i in enumerate(ids[number])])
        after = used(thread=True)
        return {"ms": (after[0] - seconds) / forwards * 1e3, "waits": (after[1] - waits) / forwards}

    schedule(False)
    off, on = schedule(False), schedule(True)
    while not all(len(read_rows(rows_file(f.path), 0)[0]) == len(samples) + 1 for f in files if f.path.exists()):
        time.sleep(0.01)
    writer = psutil.Process(ring.writer.pid).cpu_times()
    ring.close()
    begun = used()[0]
    for file in files:
        file.finish({})
    digest = used()[0] - begun
    shutil.rmtree(root)
    return {"length": length, "gb": round(size, 2), "scheduler_ms_a_forward": {"off": off["ms"], "on": on["ms"]},
            "scheduler_waits_a_forward": {"off": off["waits"], "on": on["waits"]},
            "processor_seconds_a_gb": {"layout": layout / size, "write": (writer.user + writer.system) / size,
                                       "digest": digest / size}}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 4096])
    parser.add_argument("--forwards", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    plain: dict[str, Any] = {"machine": {"processor": processor(), "cores": len(os.sched_getaffinity(0)),
                                         "torch": torch.__version__, "python": platform.python_version()}, "rows": []}
    for _ in range(options.rounds):
        for length in options.lengths:
            plain["rows"].append(measured(Path("/dev/shm/eyas-capture-cpu"), length, options.forwards))
            print(json.dumps(plain["rows"][-1]), flush=True)
            write_text_atomic(options.out, json.dumps(plain, indent=1) + "\n")


if __name__ == "__main__":
    main()
