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
    Student's t. No length is below 1, a round's bonus token.
    """
    each = [Acceptance(tuple(row)) for row in histograms if sum(row)]
    if len(each) < 2:
        return None
    whole = Acceptance.of(row.histogram for row in each)
    count, length = len(each), whole.length
    mean_rounds = sum(row.rounds for row in each) / count
    residuals = sum((row.rounds + row.accepted - length * row.rounds) ** 2 for row in each)
    reach = student_t(count - 1) * math.sqrt(residuals / (count - 1) / count) / mean_rounds
    return max(length - reach, 1.0), length + reach


def student_t(freedom: int, level: float = LEVEL) -> float:
    """Two-sided quantile of Student's t: exact up to 30 degrees, then Cornish and Fisher's expansion."""
    if freedom > 30:
        z = NormalDist().inv_cdf((1 + level) / 2)
        return (z + (z**3 + z) / (4 * freedom) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * freedom**2)
                + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * freedom**3))
    low, high = 0.0, math.pi / 2
    for _ in range(60):  # halves the angle's interval down to the last bit
        middle = (low + high) / 2
        low, high = (middle, high) if _mass(freedom, middle) < level else (low, middle)
    return math.sqrt(freedom) * math.tan(low)


def _mass(freedom: int, angle: float) -> float:
    """Student's t within +-sqrt(freedom) tan(angle): a finite series (Abramowitz and Stegun, 26.7.3 and 26.7.4)."""
    cosine, odd = math.cos(angle), freedom % 2
    term, total = cosine if odd else 1.0, 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    inside = math.sin(angle) * total
    return (angle + inside) * 2 / math.pi if odd else inside


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
