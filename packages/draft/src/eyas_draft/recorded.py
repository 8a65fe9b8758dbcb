"""Work recorded once as a CUDA graph and replayed: no Python, no launch overhead between its kernels."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

WARM_UP = 2


def record(works: Sequence[Callable[[], None]], state: Sequence[Tensor]) -> list[Callable[[], None]]:
    """Record functions that always use the same memory; returns their replays.

    Args:
        works: run in order, a few times before they are recorded (kernels load, compilers compile).
        state: tensors that `works` change; they have their old values afterwards.
    """
    saved = [tensor.detach().clone() for tensor in state]
    try:
        return _recorded(works)
    finally:
        with torch.no_grad():
            for tensor, value in zip(state, saved, strict=True):
                tensor.copy_(value)


def _recorded(works: Sequence[Callable[[], None]]) -> list[Callable[[], None]]:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(WARM_UP):
            for work in works:
                work()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    replays, pool = [], torch.cuda.graph_pool_handle()
    for work in works:
        graph = torch.cuda.CUDAGraph()
        # "thread_local": the reading thread may pin memory meanwhile
        with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
            work()
        replays.append(graph.replay)
    return replays
