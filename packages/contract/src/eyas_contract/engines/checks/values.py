"""A look at the numbers: small tensors whole, large ones in samples. NaN, infinity, tensors of zeros."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Iterator

from eyas_contract.engines.checks.case import Case
from eyas_contract.engines.findings import Finding
from eyas_contract.safetensors_header import TensorInfo

WHOLE_BYTES = 256 * 1024
SAMPLES, SAMPLE_BYTES = 16, 8 * 1024
_HALF_EXPONENT = {"BF16": 0x7F80, "F16": 0x7C00}


def check_values(case: Case) -> list[Finding]:
    """Sampled statistics: at most 256 KiB of each tensor are read."""
    strange, zero, looked = [], [], 0
    for info in case.tensors.values():
        if info.dtype not in ("BF16", "F16", "F32") or info.end == info.start:
            continue
        looked += 1
        finite, nonzero = _look(info)
        if not finite:
            strange.append(info.name)
        if not nonzero:
            zero.append(info.name)
    result = []
    if strange:
        result.append(Finding("values-nonfinite", "error", case.weights, ", ".join(strange), "finite numbers",
                              "the draft's scores are NaN: it proposes nothing useful, or the server stops",
                              "Export an earlier checkpoint of the run."))
    if zero and len(zero) == looked:
        hole = all(_is_hole(info) for info in case.tensors.values())
        result.append(Finding("values-placeholder", "note" if hole else "warning", case.weights,
                              f"all {looked} weights are zeros" + (" in files that are mostly holes" if hole else ""),
                              "trained weights, where this is more than a file of the right shape",
                              "a placeholder: names and shapes were checked, the numbers are none",
                              "Check the real file before serving it."))
    elif zero:
        result.append(Finding("values-zero", "error", case.weights, ", ".join(zero), "trained numbers",
                              "the layer computes nothing: cut copy, or a weight that was never saved",
                              "Copy or export the weights again."))
    return result


def _is_hole(info: TensorInfo) -> bool:
    """Whether most of a tensor's file was never written: made by truncating to size, not by saving."""
    status = info.file.stat()
    return status.st_blocks * 512 < status.st_size // 4


def _look(info: TensorInfo) -> tuple[bool, bool]:
    """Whether all numbers seen are finite, and whether any is not zero."""
    finite, nonzero = True, False
    for raw in _samples(info):
        if info.dtype == "F32":
            bits32 = set(struct.unpack(f"<{len(raw) // 4}I", raw[:len(raw) // 4 * 4]))
            finite &= not any(bits & 0x7F800000 == 0x7F800000 for bits in bits32)
            nonzero |= any(bits & 0x7FFFFFFF for bits in bits32)
        else:
            exponent = _HALF_EXPONENT[info.dtype]
            halves = array("H", raw[:len(raw) // 2 * 2])
            bits16 = set(halves)
            finite &= not any(bits & exponent == exponent for bits in bits16)
            nonzero |= any(bits & 0x7FFF for bits in bits16)
    return finite, nonzero


def _samples(info: TensorInfo) -> Iterator[bytes]:
    length = info.end - info.start
    with info.file.open("rb") as source:
        if length <= WHOLE_BYTES:
            source.seek(info.start)
            yield source.read(length)
            return
        step = (length - SAMPLE_BYTES) // (SAMPLES - 1) // 8 * 8
        for i in range(SAMPLES):
            source.seek(info.start + i * step)
            yield source.read(SAMPLE_BYTES)
