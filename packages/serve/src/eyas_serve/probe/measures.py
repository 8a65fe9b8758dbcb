"""How far one set of rows is from another, in plain Python: a probe compares a few hundred thousand numbers."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import TypeAlias

Rows: TypeAlias = "Sequence[array[float]]"
MASSIVE = 10.0  # channels so many times above the median are left out: a few huge ones would hide all others


@dataclass(frozen=True)
class Distance:
    """Found rows against wanted rows.

    Attributes:
        error: median over rows of |found - wanted| / |wanted|; infinite where a value is not finite.
        first: the error of the first row.
        cosine: median over rows.
        finite: whether every found value is.
        zero: whether every found value is zero.
        size: median over rows of the root mean square of the found values; 1 after a norm whose weights are ones.
    """

    error: float
    first: float
    cosine: float
    finite: bool
    zero: bool
    size: float = 0.0


def distance(found: Rows, wanted: Rows) -> Distance:
    """Compare rows of equal number and width."""
    assert len(found) == len(wanted), (len(found), len(wanted))
    assert len(wanted), "no rows"
    assert all(len(f) == len(w) for f, w in zip(found, wanted, strict=True)), "widths differ"
    finite = all(math.isfinite(sum(row)) for row in found)
    zero = not any(map(any, found))
    if not finite:
        return Distance(math.inf, math.inf, 0.0, False, zero)
    kept = ordinary(wanted)
    pairs = [([row[i] for i in kept], [other[i] for i in kept]) for row, other in zip(found, wanted, strict=True)]
    errors = [relative_error(f, w) for f, w in pairs]
    size = median(math.hypot(*row) / math.sqrt(len(row)) for row in found)
    return Distance(median(errors), errors[0], median(cosine(f, w) for f, w in pairs), True, zero, size)


def ordinary(rows: Rows) -> list[int]:
    """Channels that are not massive activations."""
    sums = [sum(map(abs, column)) for column in zip(*rows, strict=True)]
    limit = MASSIVE * median(sums)
    return [i for i, total in enumerate(sums) if total <= limit] if limit > 0 else list(range(len(sums)))


def relative_error(found: Sequence[float], wanted: Sequence[float]) -> float:
    """|found - wanted| / |wanted|; infinite where wanted is zero and found is not."""
    off, size = math.dist(found, wanted), math.hypot(*wanted)
    return off / size if size else (math.inf if off else 0.0)


def cosine(found: Sequence[float], wanted: Sequence[float]) -> float:
    """Cosine of the angle; 0 where either is zero."""
    a, b, off = math.hypot(*found), math.hypot(*wanted), math.dist(found, wanted)
    return (a * a + b * b - off * off) / (2 * a * b) if a and b else 0.0


def theta_of(rows: Rows, positions: Sequence[int]) -> float | None:
    """The base frequency of plain rotary rows [cosines, sines]: the angle at position 1, in the middle dimension."""
    if 1 not in positions or not rows or len(rows[0]) < 8:
        return None
    row, half = rows[list(positions).index(1)], len(rows[0]) // 2
    angle = math.atan2(row[half + half // 2], row[half // 2])
    return math.exp(-math.log(angle) * half / (half // 2)) if angle > 0 else None
