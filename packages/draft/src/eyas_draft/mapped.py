"""Tensors of safetensors files as memory maps: nothing is read until used."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import torch
import xxhash
from torch import Tensor

from eyas_contract.safetensors_header import TensorInfo

DTYPES = {"BF16": torch.bfloat16, "F16": torch.float16, "F32": torch.float32, "F64": torch.float64,
          "I64": torch.int64, "I32": torch.int32, "U8": torch.uint8, "BOOL": torch.bool,
          "F8_E4M3": torch.float8_e4m3fn}
HASHERS: dict[str, Any] = {"sha256": hashlib.sha256, "xxh3_128": xxhash.xxh3_128}


def map_tensor(info: TensorInfo) -> Tensor:
    """The tensor as a copy-on-write map of its file; shape and dtype as the header says."""
    if info.end == info.start:
        return torch.empty(info.shape, dtype=DTYPES[info.dtype])
    raw = np.memmap(info.file, dtype=np.uint8, mode="c", offset=info.start, shape=(info.end - info.start,))
    return torch.from_numpy(raw).view(DTYPES[info.dtype]).view(info.shape)


def digest_of(info: TensorInfo, kind: str) -> str:
    """Digest (hex) of the tensor's bytes in the file; kinds as in `TensorRecord.digest`."""
    hasher = HASHERS[kind]()
    with info.file.open("rb") as source:
        source.seek(info.start)
        left = info.end - info.start
        while left:
            block = source.read(min(left, 1 << 24))
            if not block:
                break  # cut since its header was read: another digest
            hasher.update(block)
            left -= len(block)
    return str(hasher.hexdigest())
