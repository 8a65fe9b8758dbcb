"""Decodes rows of floating-point tensors with the standard library: BF16, F16, F32, F64 -> arrays of float32."""

from __future__ import annotations

import struct
from array import array
from collections.abc import Sequence

from eyas_contract.errors import CorruptFile, InvalidInput
from eyas_contract.safetensors_header import DTYPE_BITS, MAX_VALUE_BYTES, TensorInfo

FLOATS = ("BF16", "F16", "F32", "F64")


def decode(dtype: str, raw: bytes) -> array[float]:
    """Little-endian bytes of a float dtype -> float32 values."""
    result = array("f")
    if dtype == "BF16":
        wide = bytearray(2 * len(raw))
        wide[2::4], wide[3::4] = raw[0::2], raw[1::2]
        result.frombytes(bytes(wide))
    elif dtype == "F32":
        result.frombytes(raw)
    else:
        code, size = ("e", 2) if dtype == "F16" else ("d", 8)
        result.extend(struct.unpack(f"<{len(raw) // size}{code}", raw))
    return result


def read_rows(info: TensorInfo, rows: Sequence[int] | None = None) -> list[array[float]]:
    """Rows of a tensor seen as [product of the other axes, last axis]; all of them, or some.

    Raises:
        InvalidInput: no float dtype, or more than 64 MiB in one row or in all rows wanted.
        CorruptFile: the file ends early.
    """
    if info.dtype not in FLOATS or not info.shape:
        raise InvalidInput(f"{info.file}: {info.name}", f"{info.dtype} {list(info.shape)}",
                           f"rows of {', '.join(FLOATS)}", "Write it again.")
    width = info.shape[-1]
    step = width * DTYPE_BITS[info.dtype] // 8
    count = (info.end - info.start) // step if step else 0
    chosen = range(count) if rows is None else rows
    if step * len(chosen) > MAX_VALUE_BYTES:
        raise InvalidInput(f"{info.file}: {info.name}", f"{step * len(chosen)} bytes wanted",
                           f"at most {MAX_VALUE_BYTES}", "Compare fewer positions.")
    result = []
    with info.file.open("rb") as source:
        for row in chosen:
            assert 0 <= row < count, (info.name, row, count)
            source.seek(info.start + row * step)
            raw = source.read(step)
            if len(raw) != step:
                raise CorruptFile(str(info.file), f"{info.name} ends early", f"{step} bytes a row", "Write it again.")
            result.append(decode(info.dtype, raw))
    return result
