"""Writes a safetensors file from pieces of others, byte for byte, with the standard library and in constant memory."""

from __future__ import annotations

import json
import os
import struct
from collections.abc import Mapping
from pathlib import Path

from eyas_contract.safetensors_header import TensorInfo

CHUNK = 4 * 1024 * 1024


def literal(name: str, dtype: str, shape: tuple[int, ...], data: bytes) -> tuple[TensorInfo, bytes]:
    """A new small tensor for `write_tensors`: its description and its bytes (little-endian)."""
    return TensorInfo(name, dtype, shape, Path(), 0, len(data)), data


def int64(name: str, values: list[int]) -> tuple[TensorInfo, bytes]:
    """An I64 vector."""
    return literal(name, "I64", (len(values),), struct.pack(f"<{len(values)}q", *values))


def booleans(name: str, values: list[bool]) -> tuple[TensorInfo, bytes]:
    """A BOOL vector."""
    return literal(name, "BOOL", (len(values),), bytes(values))


def write_tensors(path: Path, tensors: Mapping[str, TensorInfo | tuple[TensorInfo, bytes]],
                  metadata: Mapping[str, str]) -> None:
    """Write a file atomically: tensors in order of name, data copied from where each TensorInfo points.

    Args:
        path: file to write; replaced only when the new one is whole and synced.
        tensors: new name -> where its bytes are, or a literal.
        metadata: text to text.
    """
    header: dict[str, object] = {"__metadata__": dict(sorted(metadata.items()))} if metadata else {}
    position = 0
    for name in sorted(tensors):
        entry = tensors[name]
        info = entry[0] if isinstance(entry, tuple) else entry
        end = position + info.end - info.start
        header[name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [position, end]}
        position = end
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("wb") as sink:
        sink.write(struct.pack("<Q", len(raw)) + raw)
        for name in sorted(tensors):
            entry = tensors[name]
            if isinstance(entry, tuple):
                sink.write(entry[1])
            else:
                with entry.file.open("rb") as source:
                    source.seek(entry.start)
                    left = entry.end - entry.start
                    while left:
                        chunk = source.read(min(CHUNK, left))
                        assert chunk, "the header was checked against the file's size"
                        sink.write(chunk)
                        left -= len(chunk)
        sink.flush()
        os.fsync(sink.fileno())
    temporary.replace(path)
