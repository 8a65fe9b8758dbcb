"""The statistics of `benchmarks/guard_overhead.py`: a ratio of throughputs measured in pairs."""

from __future__ import annotations

import random
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from guard_overhead import compare, ratio_of, server_names, sign_test_cut


@pytest.mark.parametrize(("count", "cut"), [(2, 0), (5, 0), (6, 1), (10, 2), (20, 6), (100, 40), (1000, 469)])
def test_ranks_of_the_interval_are_those_of_the_sign_tests_tables(count: int, cut: int) -> None:
    assert sign_test_cut(count) == cut


def test_ratio_by_hand() -> None:
    found = ratio_of([(on, 100.0) for on in (99.0, 50.0, 101.0, 98.0, 100.0, 300.0)])
    assert found == {"ratio": 0.995, "interval": [0.5, 3.0], "pairs": 6, "costs_at_most_1%": "undecided"}
    assert ratio_of([(99.0, 100.0)] * 5)["interval"] is None


def test_two_servers_of_each_kind_are_compared_by_their_means() -> None:
    """Each server is 5 % slower than the one before it; what is on costs 2 % more, the guard alone nothing."""
    assert server_names(["on"], 1) == ["on", "off"]
    assert server_names([], 2) == ["off 1", "off 2"]
    names = server_names(["guard", "on"], 2)
    assert names == ["guard 1", "on 1", "off 1", "off 2", "on 2", "guard 2"]
    speeds = {name: 100 * 0.95**i * (0.98 if name.startswith("on") else 1.0) for i, name in enumerate(names)}
    found = compare([speeds] * 6)
    assert found["over_off"]["on"]["ratio"] == pytest.approx(0.98)
    assert found["over_off"]["on"]["costs_at_most_1%"] == "no"
    assert found["over_off"]["guard"]["ratio"] == pytest.approx(1)
    assert {kind: each["ratio"] for kind, each in found["alike"].items()} == pytest.approx(
        {"off": 1 / 0.95, "on": 1 / 0.95**3, "guard": 1 / 0.95**5})


def test_one_server_of_each_kind_says_nothing_of_chance() -> None:
    found = compare([{"on": 99.0, "off": 100.0}] * 6)
    assert found["over_off"]["on"]["ratio"] == pytest.approx(0.99)
    assert found["alike"] == {}


@pytest.mark.parametrize(("on", "verdict"), [((99.5, 99.6, 99.55), "yes"), ((97.0, 97.1, 97.05), "no"),
                                             ((95.0, 101.0, 103.0), "undecided")])
def test_verdict(on: tuple[float, ...], verdict: str) -> None:
    assert ratio_of([(speed, 100.0) for speed in on * 3])["costs_at_most_1%"] == verdict


def test_the_interval_covers_the_truth_though_the_machine_drifts() -> None:
    rng, hits = random.Random(3), 0
    for _ in range(300):
        pairs = []
        for i in range(12):
            drift = 1 + 0.05 * i  # from pair to pair; within a pair noise of 1 %
            pairs.append((drift * 98 * rng.gauss(1, 0.01), drift * 100 * rng.gauss(1, 0.01)))
        low, high = ratio_of(pairs)["interval"]
        hits += low <= 0.98 <= high
    assert hits / 300 >= 0.93  # the ranks' interval of 12 pairs is one of 96 %
