"""Reads safetensors headers (and single small tensors) with the standard library, trusting nothing in the file.

Format: 8 bytes little-endian header length, JSON header `{name: {dtype, shape, data_offsets}}`, then the data.
Source: the safetensors format specification (README of huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
import stat
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas_contract.errors import CorruptFile, InvalidInput

MAX_HEADER_BYTES = 16 * 1024 * 1024  # far above real files (0.3 MiB for 3000 tensors); the format allows 100 MB
MAX_DIMENSIONS, MAX_EXTENT = 16, 2**62
MAX_VALUE_BYTES = 64 * 1024 * 1024
DTYPE_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "U16": 16, "I16": 16, "F16": 16,
              "BF16": 16, "U32": 32, "I32": 32, "F32": 32, "U64": 64, "I64": 64, "F64": 64, "F4": 4}
_STRUCT = {"BOOL": "?", "U8": "B", "I8": "b", "I16": "h", "U16": "H", "I32": "i", "U32": "I", "I64": "q", "U64": "Q",
           "F32": "f", "F64": "d"}


@dataclass(frozen=True)
class TensorInfo:
    """Where one tensor lies: dtype name, shape, absolute byte range [start, end) in `file`."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int


@dataclass(frozen=True)
class Header:
    """A parsed header: tensors by name, and the string metadata."""

    tensors: dict[str, TensorInfo]
    metadata: dict[str, str]


def read_header(path: Path) -> Header:
    """Parse and validate one file's header; reads nothing of the data.

    Raises:
        CorruptFile: not a safetensors file, cut, or offsets that overlap, leave gaps, or disagree with shapes.
    """
    def corrupt(found: str) -> CorruptFile:
        return CorruptFile(str(path), found, "a whole safetensors file, by its format",
                           "Copy or write the file again.")

    status = path.stat()
    if not stat.S_ISREG(status.st_mode):
        raise corrupt("no regular file")
    size = status.st_size
    with path.open("rb") as source:
        prefix = source.read(8)
        if len(prefix) < 8:
            raise corrupt(f"{size} bytes, too short for a header")
        length = struct.unpack("<Q", prefix)[0]
        if length > MAX_HEADER_BYTES or 8 + length > size:
            raise corrupt(f"a header of {length} bytes in a file of {size}")
        raw = source.read(length)
    try:
        plain = json.loads(raw.decode("utf-8"), object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise corrupt(f"a header that is not JSON ({error})") from error
    if not isinstance(plain, dict):
        raise corrupt(f"a header that is a JSON {type(plain).__name__}")
    metadata = plain.pop("__metadata__", None) or {}
    if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
        raise corrupt("metadata that is not text to text")
    tensors = {}
    for name, entry in plain.items():
        if not _is_text(name):
            raise corrupt(f"tensor {name!r}, whose name is no text")
        info, fault = _tensor(name, entry, path, 8 + length)
        if info is None:
            raise corrupt(f"tensor {name!r} {fault}")
        tensors[name] = info
    position = 8 + length
    for info in sorted(tensors.values(), key=lambda t: (t.start, t.end)):
        if info.start != position:
            raise corrupt(f"tensor {info.name!r} starts at byte {info.start}, but the one before it ends at {position}")
        position = info.end
    if position != size:
        raise corrupt(f"{size} bytes, but the header describes {position}")
    return Header(tensors, metadata)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key stands twice")
    return result


def _is_text(name: str) -> bool:
    """False for half a surrogate pair, which safetensors refuses and no terminal prints."""
    try:
        name.encode("utf-8")
    except UnicodeEncodeError:
        return False
    return True


def _tensor(name: str, entry: Any, path: Path, base: int) -> tuple[TensorInfo | None, str]:
    """The TensorInfo of one header entry, or None and what is wrong with it."""
    if not isinstance(entry, dict):
        return None, "is not an object"
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if not isinstance(dtype, str) or dtype not in DTYPE_BITS:
        return None, f"has dtype {repr(dtype)[:80]}"
    for label, value, ok in (("shape", shape, True), ("data_offsets", offsets, isinstance(offsets, list)
                                                      and len(offsets) == 2)):
        if not ok or not isinstance(value, list) or len(value) > MAX_DIMENSIONS \
                or not all(type(v) is int and 0 <= v <= MAX_EXTENT for v in value):
            return None, f"has {label} {repr(value)[:80]}"
    assert isinstance(shape, list)
    assert isinstance(offsets, list)
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits % 8 or offsets[1] - offsets[0] != bits // 8:
        return None, f"of shape {shape} and {dtype} has {offsets[1] - offsets[0]} bytes"
    return TensorInfo(name, dtype, tuple(shape), path, base + offsets[0], base + offsets[1]), ""


def read_values(info: TensorInfo) -> list[Any]:
    """The values of a small integer, bool or float32/64 tensor, flat.

    Raises:
        InvalidInput: more than 64 MiB, which no map or norm has.
    """
    code = _STRUCT[info.dtype]
    if info.end - info.start > MAX_VALUE_BYTES:
        raise InvalidInput(f"{info.file}: {info.name}", f"{info.end - info.start} bytes",
                           f"at most {MAX_VALUE_BYTES} for a tensor that is read whole", "Export it again.")
    with info.file.open("rb") as source:
        source.seek(info.start)
        raw = source.read(info.end - info.start)
    return list(struct.unpack(f"<{len(raw) // struct.calcsize(code)}{code}", raw))
