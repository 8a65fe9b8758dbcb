"""Digests of the tensors of a store: XXH3-128 for what is written, SHA-256 for what older versions wrote."""

from __future__ import annotations

import hashlib
import os
from typing import Any

import xxhash

from eyas_contract import TensorRecord
from eyas_contract.safetensors_header import TensorInfo

BLOCK = 1 << 20  # bytes at a time: they stay in a core's own cache
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
