"""What this build is, what runs here, and the two knobs: instruction set and threads."""

from __future__ import annotations

from typing import Any

from eyas_native import _C, cuda_core
from eyas_native.errors import ArgumentError

AVAILABLE = "available"


def status() -> dict[str, str]:
    """Each backend -> "available", or the reason why not. "cpu" and "cuda"."""
    return {"cpu": _cpu_status(), "cuda": _cuda_status()}


def _cpu_status() -> str:
    try:
        _C.isa()
    except ArgumentError as error:  # EYAS_NATIVE_ISA names what this machine lacks
        return str(error)
    return AVAILABLE


def _cuda_status() -> str:
    library = cuda_core.library_path()
    if not library.exists():
        return str(_C.build_info()["cuda_reason"]) or f"{library} is missing"
    return cuda_core.status()


def build_info() -> dict[str, Any]:
    """version, git, compiler, cpu_abi, cuda_compiler, cuda_archs, cuda_reason, isas (best first), threads.

    cuda_archs is a list as CMAKE_CUDA_ARCHITECTURES has it ("90-real", "120-virtual"), empty in a CPU-only build.
    """
    made = _C.build_info()
    archs = made.pop("cuda_archs").split()
    return {**made, "cuda_archs": archs, "isas": _C.isas().split(","), "threads": _C.threads()}


def isa() -> str:
    """The instruction set in use: the best of isas, the environment's EYAS_NATIVE_ISA, or what set_isa chose.

    Raises:
        ArgumentError: EYAS_NATIVE_ISA names one that cannot run here.
    """
    return str(_C.isa())


def set_isa(name: str | None) -> None:
    """Forces an instruction set for all later calls; None: back to the default.

    Raises:
        ArgumentError: it cannot run here.
    """
    _C.set_isa(name or "")


def set_threads(threads: int) -> None:
    """Threads per call, 1 to 1024; 0: as many as OpenMP would take (OMP_NUM_THREADS, torch.set_num_threads).

    Raises:
        ArgumentError: out of that range.
    """
    _C.set_threads(threads)
