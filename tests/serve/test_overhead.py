"""The statistics of `benchmarks/guard_overhead.py`: a ratio of throughputs measured in pairs."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from guard_overhead import ratio_of


def test_ratio_by_hand() -> None:
    found = ratio_of([(90.0, 100.0), (110.0, 100.0)])
    assert found["ratio"] == pytest.approx((0.9 * 1.1) ** 0.5)
    half = 12.706 * abs(0.5 * 0.2006707)  # t of one degree times the standard error of log 0.9 and log 1.1
    assert found["interval"][1] / found["ratio"] == pytest.approx(2.718281828**half, rel=1e-3)


@pytest.mark.parametrize(("on", "verdict"), [((99.5, 99.6, 99.55), "yes"), ((97.0, 97.1, 97.05), "no"),
                                             ((95.0, 101.0, 103.0), "undecided")])
def test_verdict(on: tuple[float, ...], verdict: str) -> None:
    assert ratio_of([(speed, 100.0) for speed in on])["costs_at_most_1%"] == verdict


def test_the_interval_covers_the_truth_though_the_machine_drifts() -> None:
    rng, hits = random.Random(3), 0
    for _ in range(300):
        pairs = []
        for i in range(8):
            drift = 1 + 0.05 * i  # from pair to pair; within a pair noise of 1 %
            pairs.append((drift * 98 * rng.gauss(1, 0.01), drift * 100 * rng.gauss(1, 0.01)))
        low, high = ratio_of(pairs)["interval"]
        hits += low <= 0.98 <= high
    assert 0.91 <= hits / 300 <= 0.99
