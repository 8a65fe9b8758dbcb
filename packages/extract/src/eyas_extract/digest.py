"""Digests of the tensors of a store: XXH3-128 for what is written, SHA-256 for what older versions wrote."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any

import xxhash

from eyas_contract import TensorRecord
from eyas_contract.safetensors_header import TensorInfo

BLOCK = 1 << 20  # bytes at a time: they stay in a core's own cache
NEXT_LINE = "next_line"  # in a shard's header: first input line that is in no shard yet
PLACE = "next_line_xxh3_128"  # beside it, since a run goes on by it and no tensor's digest covers it
HASHERS: dict[str, Any] = {"sha256": hashlib.sha256, "xxh3_128": xxhash.xxh3_128}


def digest_of(file: int, info: TensorInfo) -> str:
    """XXH3-128 (hex) of a tensor's bytes in an open file.

    Read into one small buffer: a map of the file would cost a fault for every few pages.
    """
    hasher, start = xxhash.xxh3_128(), info.start
    buffer = memoryview(bytearray(min(BLOCK, info.end - start)))
    while start < info.end:
        done = os.preadv(file, [buffer[:info.end - start]], start)
        if not done:
            break  # cut meanwhile: the digest will not be the one wanted
        hasher.update(buffer[:done])
        start += done
    return hasher.hexdigest()


def record_of(file: int, info: TensorInfo) -> TensorRecord:
    """What a manifest says of a tensor in an open file."""
    return TensorRecord(info.name, info.dtype, info.shape, xxh3_128=digest_of(file, info))


def place(next_line: int) -> dict[str, str]:
    """A shard's place in the input, as its header says it."""
    return {NEXT_LINE: str(next_line), PLACE: xxhash.xxh3_128(str(next_line).encode()).hexdigest()}


def place_fault(metadata: Mapping[str, str]) -> str:
    """Why a header's place in the input cannot be believed; empty where it can, or where an older version wrote no
    digest of it."""
    value, recorded = metadata.get(NEXT_LINE, ""), metadata.get(PLACE)
    if recorded is None or recorded == xxhash.xxh3_128(value.encode()).hexdigest():
        return ""
    return f"its {NEXT_LINE} {value!r:.40} is not the one that was written (xxh3_128)"
