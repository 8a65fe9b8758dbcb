"""`eyas_native.cuda` without a GPU: its checks take tensors of the CPU for CUDA's, its calls go to a library given."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import CDLL

import pytest

from eyas_native import cuda_core


@contextmanager
def cuda_on_host(library: CDLL | None = None) -> Iterator[None]:
    """Until the block ends. Without a library only what stands before the call can be tried."""
    need = cuda_core.Faults.need
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            cuda_core.Faults, "need", lambda self, true, text: need(self, true or "wanted a CUDA device" in text, text)
        )
        if library is not None:
            patch.setattr(cuda_core, "library", lambda: library)
        yield
