"""Reads safetensors headers (and single small tensors) with the standard library, trusting nothing in the file.

Format: 8 bytes little-endian header length, JSON header `{name: {dtype, shape, data_offsets}}`, then the data.
Source: the safetensors format specification (README of huggingface/safetensors).
"""

from __future__ import annotations

import json
import math
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas_contract.errors import CorruptFile, InvalidInput

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
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

    size = path.stat().st_size
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


def _tensor(name: str, entry: Any, path: Path, base: int) -> tuple[TensorInfo | None, str]:
    """The TensorInfo of one header entry, or None and what is wrong with it."""
    if not isinstance(entry, dict):
        return None, "is not an object"
    dtype, shape, offsets = entry.get("dtype"), entry.get("shape"), entry.get("data_offsets")
    if dtype not in DTYPE_BITS:
        return None, f"has dtype {dtype!r}"
    for label, value, ok in (("shape", shape, True), ("data_offsets", offsets, isinstance(offsets, list)
                                                      and len(offsets) == 2)):
        if not ok or not isinstance(value, list) or not all(type(v) is int and v >= 0 for v in value):
            return None, f"has {label} {value!r}"
    assert isinstance(shape, list)
    assert isinstance(offsets, list)
    bits = math.prod(shape) * DTYPE_BITS[dtype]
    if bits % 8 or offsets[1] - offsets[0] != bits // 8:
        return None, f"of shape {shape} and {dtype} has {offsets[1] - offsets[0]} bytes"
    return TensorInfo(name, dtype, tuple(shape), path, base + offsets[0], base + offsets[1]), ""


def read_checkpoint(folder: Path) -> dict[str, TensorInfo]:
    """All tensors of a model folder: `model.safetensors`, or the shards that the index names, or every file.

    Raises:
        InvalidInput: no weights, an index that leads out of the folder or names absent files or tensors.
        CorruptFile: a damaged file.
    """
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        files = [folder / "model.safetensors"]
    elif index.is_file():
        files = _indexed_files(folder, index)
    else:
        files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise InvalidInput(str(folder), "no *.safetensors file", "a checkpoint, by eyas-contract",
                           "Give the folder that holds the weights.")
    result: dict[str, TensorInfo] = {}
    for file in files:
        result |= read_header(file).tensors
    return result


def _indexed_files(folder: Path, index: Path) -> list[Path]:
    wanted = "`weight_map` of tensor names to files in the same folder, by the Hugging Face format"
    try:
        names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise InvalidInput(str(index), f"unreadable ({error!r})", wanted, "Restore the file.") from error
    bad = [n for n in names if not isinstance(n, str) or Path(n).name != n or not (folder / n).is_file()]
    if bad:
        raise InvalidInput(str(index), f"files {bad[:5]} are absent or outside the folder", wanted,
                           "Fetch the missing shards.")
    return [folder / name for name in names]


def read_values(info: TensorInfo) -> list[Any]:
    """The values of a small integer, bool or float32/64 tensor, flat."""
    code = _STRUCT[info.dtype]
    with info.file.open("rb") as source:
        source.seek(info.start)
        raw = source.read(info.end - info.start)
    return list(struct.unpack(f"<{len(raw) // struct.calcsize(code)}{code}", raw))
