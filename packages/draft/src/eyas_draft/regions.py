"""Functions of training that may be compiled: elementwise chains whose memory traffic fusion saves.

Compiling is a matter of speed alone. A region is plain everywhere but inside `compiled()`, so measuring and decoding,
whose shapes change from call to call, never wait for a compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, ParamSpec, TypeVar

import torch

BACKEND = "inductor"
P = ParamSpec("P")
R = TypeVar("R")


class Region(Generic[P, R]):
    """A function, and its compiled form once one was asked for."""

    active = False  # of all regions together: set by `compiled`

    def __init__(self, function: Callable[P, R]) -> None:
        self.plain = function
        self._compiled: Callable[P, R] | None = None
        self.__doc__ = function.__doc__

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if not Region.active:
            return self.plain(*args, **kwargs)
        if self._compiled is None:
            self._compiled = torch.compile(self.plain, fullgraph=True, backend=BACKEND)
        return self._compiled(*args, **kwargs)


def region(function: Callable[P, R]) -> Region[P, R]:
    """Decorator: this function is a region."""
    return Region(function)


@contextmanager
def compiled(active: bool = True) -> Iterator[None]:
    """Use the compiled form of every region inside the block."""
    before = Region.active
    Region.active = active
    try:
        yield
    finally:
        Region.active = before
