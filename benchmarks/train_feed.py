"""What a host does for each batch of a large target's states, beside the way without reading ahead that trained before.

    python benchmarks/train_feed.py --out OUT.json [--store bf16|e4m3] [--hidden 7168] [--threads 1] [--folder FOLDER]

States of four documents of 2,048 tokens lie in a file and are mapped, as a store's are; a batch is checked for values
that are not finite and packed. `before` is bf16 made of e4m3, `isfinite` and `cat`; `now` is `Sample.finite` and
`HostBatch.of`, here without pinned memory, which a GPU's host has and uses again; bf16 is made of e4m3 by the GPU then.
torchrun gives each process one thread unless OMP_NUM_THREADS is set. Prints seconds a batch, their ratio, and bytes/s;
an H200 takes about 0.55 s for such a batch of Kimi-K2's width.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eyas_contract.contract import write_text_atomic
from eyas_draft.batches import HostBatch
from eyas_draft.states import States
from eyas_draft.store import Sample

DOCUMENTS, LENGTH, AUX = 4, 2048, 3


def mapped(folder: Path, hidden: int, dtype: torch.dtype) -> list[Sample]:
    """Random states in files, mapped."""
    samples = []
    for number in range(DOCUMENTS):
        states = list[States]()
        for layers in (AUX, 1):
            path, width = folder / f"{number}-{layers}", layers * hidden
            path.write_bytes(torch.randn(LENGTH, width).to(dtype).view(torch.uint8).numpy().tobytes())
            values = torch.from_numpy(np.memmap(path, dtype=np.uint8, mode="c")).view(dtype).view(LENGTH, width)
            states.append(States(values, torch.ones(LENGTH, layers) if dtype == torch.float8_e4m3fn else None))
        samples.append(Sample(str(number), torch.zeros(LENGTH, dtype=torch.int32), torch.ones(LENGTH, dtype=torch.bool),
                              *states))
    return samples


def before(samples: Sequence[Sample]) -> tuple[Tensor, Tensor]:
    """As it was."""
    plain = [(sample.aux_tke, sample.last_te) for sample in samples]
    assert all(torch.isfinite(states).all() for pair in plain for states in pair)
    return torch.cat([aux for aux, _ in plain]), torch.cat([last for _, last in plain])


def now(samples: Sequence[Sample]) -> HostBatch:
    """As training reads."""
    assert all(sample.finite for sample in samples)
    return HostBatch.of(samples, pinned=False)


def seconds(work: Callable[[], object], times: int) -> list[float]:
    """Of each call, after one that does not count."""
    work()
    taken = []
    for _ in range(times):
        begun = time.perf_counter()
        work()
        taken.append(time.perf_counter() - begun)
    return taken


def main() -> None:
    """Measure in turn and say the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--folder", type=Path, help="where the states lie; the temporary folder where absent")
    parser.add_argument("--store", choices=("bf16", "e4m3"), default="bf16", help="what states are stored as")
    for name, default in (("hidden", 7168), ("threads", 1), ("times", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        dtype = torch.bfloat16 if options.store == "bf16" else torch.float8_e4m3fn
        samples = mapped(Path(name), options.hidden, dtype)
        taken = {"before": list[float](), "now": list[float]()}
        for _ in range(3):
            taken["before"] += seconds(lambda: before(samples), options.times)
            taken["now"] += seconds(lambda: now(samples), options.times)
    median = {way: statistics.median(rows) for way, rows in taken.items()}
    size = DOCUMENTS * LENGTH * (AUX + 1) * options.hidden * dtype.itemsize
    result: dict[str, Any] = {
        "machine": {"processor": platform.processor() or platform.machine(), "cores": len(os.sched_getaffinity(0)),
                    "torch": torch.__version__},
        "store": options.store, "hidden": options.hidden, "threads": options.threads, "bytes_a_batch": size,
        "seconds": {way: [round(x, 4) for x in rows] for way, rows in taken.items()},
        "median_seconds": median, "times_as_fast": median["before"] / median["now"],
        "gb_per_second": {way: size / value / 1e9 for way, value in median.items()}}
    write_text_atomic(options.out, json.dumps(result, indent=1) + "\n")
    print(f"before {median['before']:.3f} s a batch, now {median['now']:.3f} s: "
          f"{result['times_as_fast']:.2f} times as fast, {result['gb_per_second']['now']:.1f} GB/s\n{options.out}")


if __name__ == "__main__":
    main()
