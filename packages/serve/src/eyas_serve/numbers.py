"""Statistics of a benchmark: an interval for the acceptance length, percentiles."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

from eyas_serve.acceptance import Acceptance

LEVEL = 0.95


def acceptance_interval(histograms: Sequence[Sequence[int]]) -> tuple[float, float] | None:
    """95 % interval of the acceptance length over requests; None for fewer than two with rounds.

    Rounds of one request are alike, so the request is the unit: the ratio of sums, its variance by the delta method,
    Student's t.
    """
    each = [Acceptance(tuple(row)) for row in histograms if sum(row)]
    if len(each) < 2:
        return None
    count, length = len(each), Acceptance.of(row.histogram for row in each).length
    mean_rounds = sum(row.rounds for row in each) / count
    residuals = sum((row.rounds + row.accepted - length * row.rounds) ** 2 for row in each)
    error = math.sqrt(residuals / (count - 1) / count) / mean_rounds
    return length - student_t(count - 1) * error, length + student_t(count - 1) * error


def student_t(freedom: int, level: float = LEVEL) -> float:
    """Two-sided quantile of Student's t: exact for 1 and 2 degrees, then Cornish and Fisher's expansion."""
    p = (1 + level) / 2
    if freedom == 1:
        return math.tan(math.pi * (p - 0.5))
    if freedom == 2:
        return (2 * p - 1) * math.sqrt(2 / (4 * p * (1 - p)))
    z = NormalDist().inv_cdf(p)
    return (z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
            + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3))


def percentiles(values: Sequence[float], shares: Sequence[int] = (50, 90, 99)) -> dict[str, float] | None:
    """`p50`, ... by linear interpolation, and the mean; None without values."""
    ordered = sorted(values)
    if not ordered:
        return None
    result = {"mean": sum(ordered) / len(ordered)}
    for share in shares:
        at = (len(ordered) - 1) * share / 100
        low = math.floor(at)
        high = min(low + 1, len(ordered) - 1)
        result[f"p{share}"] = ordered[low] + (ordered[high] - ordered[low]) * (at - low)
    return result
