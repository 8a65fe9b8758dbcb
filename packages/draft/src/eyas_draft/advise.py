"""What more data or more epochs would bring: a curve fitted to short runs (`curve.py`), and how far it can be trusted.

Runs should have a constant rate (`--final-lr 1`), or points in the midst of a cosine are compared with ends of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from eyas_contract import InvalidInput
from eyas_contract.contract import read_json
from eyas_draft.curve import Fit, Point, fit, outcomes
from eyas_draft.metrics import read_rows


@dataclass(frozen=True)
class Advice:
    """What one choice would bring.

    Attributes:
        choice: in words.
        data, epochs: distinct tokens and passes.
        length, low, high: acceptance length expected, and an interval for what such a run would measure (80 %).
        tokens: trained in all; `hours` of them at the rate of the runs.
    """

    choice: str
    data: float
    epochs: float
    length: float
    low: float
    high: float
    tokens: float
    hours: float


def read_points(run: Path, number: int) -> tuple[list[Point], float]:
    """Measurements of a run after its first half epoch, and its tokens a second.

    Raises:
        InvalidInput: no metrics, or none with the numbers needed.
        CorruptFile: see `read_rows`.
    """
    path = run / "metrics.jsonl"
    wanted = "a run of eyas-draft train with measurements on held-out samples"
    if not path.is_file():
        raise InvalidInput(str(path), "no such file", wanted, "Give the run's folder.")
    points, tokens, seconds = [], 0, 0.0
    for row in read_rows(path):
        tokens += row.get("tokens", 0)
        seconds += row.get("seconds", 0.0)
        held = row.get("heldout")
        if held and tokens >= 0.5 * held["distinct_tokens"]:
            points.append(Point(number, held["distinct_tokens"], tokens / held["distinct_tokens"],
                                held["acceptance_length"]))
    if not points:
        raise InvalidInput(str(path), "no measurement after half an epoch", wanted,
                           "Train longer, or with a smaller --checkpoint-every and a --holdout above 0.")
    return points, tokens / seconds if seconds else 0.0


def advise(runs: Sequence[Path]) -> tuple[Fit, list[Advice]]:
    """Fit the runs and tell what 2, 4 and 8 times the data, or more epochs, would bring.

    Raises:
        InvalidInput: runs that cannot be compared, or too few.
    """
    _require_alike(runs)
    points: list[Point] = []
    rates = []
    for number, run in enumerate(runs):
        found, rate = read_points(run, number)
        points += found
        rates.append(rate)
    centre, rate = fit(points), float(np.median(rates))
    data = max(p.data for p in points)
    epochs = max(p.epochs for p in points if p.data == data)
    choices = [("as the largest run", 1.0, 1.0), ("2x data", 2.0, 1.0), ("4x data", 4.0, 1.0), ("8x data", 8.0, 1.0),
               ("2x epochs", 1.0, 2.0), ("4x epochs", 1.0, 4.0)]
    places = [(data * more, epochs * longer) for _, more, longer in choices]
    lows, highs = np.quantile(outcomes(points, places), [0.1, 0.9], axis=0)
    return centre, [_advice(text, *place, centre, float(low), float(high), rate)
                    for (text, _, _), place, low, high in zip(choices, places, lows, highs, strict=True)]


def _advice(text: str, data: float, epochs: float, centre: Fit, low: float, high: float, rate: float) -> Advice:
    length, tokens = centre.predict(data, epochs), data * epochs
    return Advice(text, data, round(epochs, 2), round(length, 4), round(min(low, length), 4),
                  round(max(high, length), 4), tokens, round(tokens / rate / 3600, 4) if rate else 0.0)


def _require_alike(runs: Sequence[Path]) -> None:
    """Runs may differ in fraction, epochs, folders and what is shown of them alone."""
    settings: list[dict[str, Any]] = [read_json(run / "config.resolved.json", "a run's settings") for run in runs]
    free = {"out", "fraction", "epochs", "max_steps", "checkpoint_every", "keep", "log_seconds", "verify_store",
            "compile", "cuda_graph", "resident", "max_bad_samples", "max_bad_steps", "log_to"}
    differing = sorted({key for other in settings[1:] for key in {*settings[0], *other} - free
                        if settings[0].get(key) != other.get(key)})
    if differing:
        raise InvalidInput("the runs", f"other settings: {', '.join(differing)}", "runs that differ in data and epochs "
                           "alone", "Train them with the same settings.")
    kept = [path for run in runs if (path := run / "data.json").is_file()]  # older runs have none
    if len({str(read_json(path, "a run's samples").get("sha256")) for path in kept}) > 1:
        raise InvalidInput("the runs", "other samples in their store, so others held out", "runs on fractions of one "
                           "store", "Train them anew on the store as it is now.")
