"""How often the 80 % intervals of `eyas-draft advise` hold what then comes: simulated runs of many true curves.

    python benchmarks/advise_coverage.py --out advise_coverage.json [--curves 800]

Each true curve is drawn at random (`truths`); runs on fractions of a million tokens are measured at some epochs with
normal noise of 0.01, of which a share is common to a run's measurements. The outcome is one measurement of a new run.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from eyas_draft.curve import Fit, Point, outcomes

DATA, NOISE = 1e6, 0.01  # distinct tokens of the whole store; standard deviation of a measurement
PLACES = {"2x data": (2, 1), "4x data": (4, 1), "8x data": (8, 1), "2x epochs": (1, 2), "4x epochs": (1, 4)}
THREE, FOUR = (0.25, 0.5, 1.0), (1.0, 2.0, 3.0, 4.0)
DESIGNS = [(THREE, FOUR, 0.0), (THREE, FOUR, 0.25), (THREE, FOUR, 0.5), (THREE, FOUR, 0.72),
           (THREE, (0.5, 1.0, 1.5, 2.0, 2.5, 3.0), 0.25), ((0.5, 1.0), (1.0, 2.0, 3.0), 0.5),
           (THREE, (1.0, 2.0, 3.0), 0.0)]  # fractions, epochs at which they are measured, share of common noise


def truths(count: int) -> Iterator[Fit]:
    """True curves: 0.3 to 0.9 below their ceiling at three epochs' worth of the whole store."""
    rng = np.random.default_rng(0)
    for _ in range(count):
        exponent = rng.uniform(0.15, 0.6)
        ceiling, below = rng.uniform(2.6, 3.6), rng.uniform(0.3, 0.9)
        yield Fit(ceiling, below * (3 * DATA)**exponent, exponent, rng.uniform(2, 20), 0.0)


def coverage(fractions: tuple[float, ...], epochs: tuple[float, ...], common: float, curves: int) -> dict[str, Any]:
    """Share of outcomes within their intervals, and the intervals' median width, at each place."""
    rng = np.random.default_rng(1)
    held: list[list[bool]] = []
    widths = []
    for truth in truths(curves):
        places = [(DATA * more, epochs[-1] * longer) for more, longer in PLACES.values()]
        points = []
        for run, fraction in enumerate(fractions):
            noise = noises(rng, common, len(epochs))
            points += [Point(run, DATA * fraction, epoch, truth.predict(DATA * fraction, epoch) + of_point)
                       for epoch, of_point in zip(epochs, noise, strict=True)]
        lows, highs = np.quantile(outcomes(points, places), [0.1, 0.9], axis=0)
        came = [truth.predict(*place) + noises(rng, common, 1)[0] for place in places]
        held.append([low <= value <= high for low, value, high in zip(lows, came, highs, strict=True)])
        widths.append(highs - lows)
    return {"fractions": fractions, "epochs": epochs, "common_noise": common,
            "held": dict(zip(PLACES, np.mean(held, 0).round(3).tolist(), strict=True)),
            "width": dict(zip(PLACES, np.median(widths, 0).round(4).tolist(), strict=True))}


def noises(rng: np.random.Generator, common: float, count: int) -> list[float]:
    """Of a run's measurements."""
    shared = common**0.5 * rng.standard_normal()
    return [NOISE * (shared + (1 - common)**0.5 * float(rng.standard_normal())) for _ in range(count)]


def main() -> None:
    """Run every design, print it and write all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--curves", type=int, default=800, help="true curves of each design")
    options = parser.parse_args()
    rows = []
    for design in DESIGNS:
        rows.append(coverage(*design, options.curves))
        print(json.dumps(rows[-1]))
    options.out.write_text(json.dumps({"wanted": 0.8, "noise": NOISE, "curves": options.curves, "designs": rows},
                                      indent=1) + "\n")


if __name__ == "__main__":
    main()
