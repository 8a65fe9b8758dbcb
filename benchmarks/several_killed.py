"""Part `killed` of `several_gpus.sh`: one of the most ranks dies by SIGKILL in the middle of an extraction.

The extraction starts its engine itself, finds it dead, starts another, and goes on; nothing committed is touched.
"""

from __future__ import annotations

import signal
import threading
import time
from pathlib import Path

import psutil
import torch
from several import gpu_memory, part
from several_capture import Capture, reference, scheduler_pids

from eyas_contract import Manifest
from eyas_extract.run import run

AHEAD = 2  # shards in flight


def killed(capture: Capture, ranks: int, theirs: torch.Tensor) -> None:
    """The last rank is killed once two shards are committed."""
    this, store = capture.part, capture.root / "killed"
    before: dict[str, tuple[int, int]] = {}
    dead: list[int] = []
    over = threading.Event()

    def kill() -> None:
        while not over.is_set():
            done = [shard.file for shard in Manifest.load(store).shards] if (store / "manifest.json").is_file() else []
            pids = scheduler_pids(psutil.Process()) if len(done) >= 2 else []
            if len(pids) == ranks:
                before.update({file: identity(store / file) for file in done})
                psutil.Process(pids[-1]).send_signal(signal.SIGKILL)
                dead.append(ranks - 1)
                return
            time.sleep(0.005)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    begun = time.monotonic()
    try:
        run(capture.config("killed", engine="sglang", tp=ranks, ahead=AHEAD, engine_args=capture.engine_args))
    finally:
        over.set()
        thread.join()
    changed = [file for file, was in before.items() if identity(store / file) != was]
    total = len(Manifest.load(store).shards)
    found = {"killed rank": dead, "shards": total, "committed before": len(before), "of these written again": changed}
    this.check("a killed rank costs only samples in flight", ranks, found,
               f"a rank killed, before the last {AHEAD + 1} shards, and no committed shard touched",
               bool(dead) and len(before) < total - AHEAD and not changed)
    capture.require_whole("killed", ranks)
    capture.require_right("killed", ranks, theirs)
    this.number(ranks=ranks, killed_run_seconds=round(time.monotonic() - begun, 1))


def identity(path: Path) -> tuple[int, int]:
    """What changes when a file is written again."""
    status = path.stat()
    return status.st_ino, status.st_mtime_ns


def main() -> None:
    """With the most ranks."""
    this = part("killed")
    ranks = this.sizes[-1]
    if ranks == 1:
        this.skip("a killed rank costs only samples in flight", 2, "several ranks", "one GPU")
        return
    capture = Capture(this)
    theirs = reference(capture)
    memory = [] if this.cpu else gpu_memory()
    killed(capture, ranks, theirs)
    this.nothing_left(ranks, "EYAS_CAPTURE", memory)


if __name__ == "__main__":
    main()
