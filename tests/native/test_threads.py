"""What a call on several threads leaves behind: little memory, and children that can compute."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import eyas_native

FORK = """
import os, signal, sys
import numpy as np
import eyas_native

def gathered():  # on several threads, by its size
    source, out = np.ones((4096, 512), np.float32), np.zeros((4096, 512), np.float32)
    eyas_native.hidden_gather([source], None, out)
    return bool(out.all())

eyas_native.set_threads(int(sys.argv[1]))
assert gathered() and eyas_native.build_info()["threads"] == 2
child = os.fork()
if child == 0:
    signal.alarm(20)  # ends a child that hangs
    first = gathered()
    eyas_native.set_threads(2)
    os._exit(0 if first and gathered() and eyas_native.build_info()["threads"] == 1 else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


@pytest.mark.parametrize("threads", [0, 2], ids=["as OpenMP", "set"])
def test_a_forked_child_computes(threads: int) -> None:
    """libgomp's threads do not survive a fork. Without torch, which has the same trouble."""
    environment = {**os.environ, "OMP_NUM_THREADS": "2"}
    run = subprocess.run(
        [sys.executable, "-c", FORK, str(threads)], env=environment, capture_output=True, text=True, timeout=60
    )
    assert run.returncode == 0, run.stderr


def resident_mib() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


def test_a_split_decode_keeps_what_its_rows_need() -> None:
    """16 requests of 2 heads in 32 pieces: 0.5 MB of partial results, 96 if each piece had room for the most rows."""
    requests, keys = 16, 16384
    k, v = torch.randn(keys, 2, 128), torch.randn(keys, 2, 128)
    q, out = torch.randn(requests, 2, 128), torch.zeros(requests, 2, 128)
    table = torch.arange(keys, dtype=torch.int32).expand(requests, keys)
    eyas_native.set_threads(16)

    def added() -> float:
        before = resident_mib()
        eyas_native.decode_attention(
            q, k, v, out, table, torch.arange(requests), torch.full((requests,), keys), scale=0.1
        )
        return resident_mib() - before

    with ThreadPoolExecutor(1) as fresh:  # what a call keeps, it keeps for its thread
        assert fresh.submit(added).result() < 32
