"""What the checks and timings of the CUDA kernels share: values, trees, copies, comparisons."""

from __future__ import annotations

import math
import random
import struct
from array import array
from collections.abc import Iterable
from typing import Any

from eyas_native.driver import DeviceArray, Driver
from eyas_native.selftest import Memory

# What e4m3, fp16 and bf16 all hold exactly, so that one reference serves every dtype.
VALUES = [s * (8 + m) * 2.0**e for s in (1, -1) for e in range(-7, -2) for m in range(8)]


def _e4m3(x: float) -> bytes:
    fraction, exponent = math.frexp(abs(x))  # fraction in [0.5, 1)
    return bytes([(x < 0) << 7 | (exponent + 6) << 3 | int(16 * fraction) - 8])


CODES = {
    "bfloat16": {x: struct.pack("<f", x)[2:] for x in VALUES},
    "float16": {x: struct.pack("<e", x) for x in VALUES},
    "float8_e4m3fn": {x: _e4m3(x) for x in VALUES},
}


def bf16(numbers: Iterable[int]) -> bytes:
    """bf16 bytes of the numbers-th of 80 small values."""
    return b"".join(CODES["bfloat16"][VALUES[number]] for number in numbers)


def put(driver: Driver, memory: Memory) -> DeviceArray:
    """A copy on the device."""
    return driver.put(memory.dtype.name, memory.shape, memory.values)


def differing(driver: Driver, pairs: dict[str, tuple[DeviceArray, Memory]]) -> str:
    """Names of the arrays that are not equal bit for bit."""
    names = [name for name, (found, want) in pairs.items() if driver.get(want.values.typecode, found) != want.values]
    return f"{', '.join(names)} differ" if names else ""


def random_tree(rng: random.Random, n: int) -> list[int]:
    """Parents, -1 for the root."""
    return [-1] + [rng.randrange(max(0, i - 6), i) for i in range(1, n)]


def mask_of(trees: list[list[int]]) -> Memory:
    """u8 [B, n, n] of each tree's parents."""
    n, bits = len(trees[0]), []
    for parents in trees:
        rows: list[list[int]] = []
        for node, parent in enumerate(parents):
            rows.append([*(rows[parent] if node else [0] * n)])
            rows[-1][node] = 1
        bits += [bit for row in rows for bit in row]
    return Memory("B", (len(trees), n, n), bits)


def floats(driver: Driver, source: DeviceArray) -> array[float]:
    """bf16 or fp16 as floats."""
    if source.dtype == "float16":
        raw = driver.get("B", source).tobytes()
        return array("f", struct.unpack(f"<{len(raw) // 2}e", raw))
    return array("f", array("I", [half << 16 for half in driver.get("H", source)]).tobytes())


def relative_error(found: Any, wanted: Any) -> float:
    """||found - wanted|| / ||wanted||; NaN when anything found is."""
    distance = sum((a - b) ** 2 for a, b in zip(found, wanted, strict=True))
    return math.sqrt(distance / max(1e-30, sum(b * b for b in wanted)))
