"""What more data or more epochs would bring: a curve fitted to short runs, and how far it can be trusted.

Held-out acceptance length is taken as L = A - B * U ** -b, where U are the tokens' worth of what was seen: D tokens
seen once, and for E epochs D * (1 + R * (1 - exp(-(E - 1) / R))), so that a repeated token is worth ever less; R is
how many repetitions are worth anything. A and B come from least squares, b and R from a grid; what is uncertain is
told by fits to resampled runs and residuals (80 % intervals). Runs should have a constant rate (`--final-lr 1`), or
points in the midst of a cosine are compared with ends of one.

Source: the form of U from "Scaling Data-Constrained Language Models" (arXiv 2305.16264), equation 5.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eyas_contract import InvalidInput
from eyas_contract.contract import read_json
from eyas_draft.metrics import read_rows

Floats = npt.NDArray[np.float64]
EXPONENTS = np.geomspace(0.05, 1.5, 30)
REPETITIONS = np.geomspace(0.5, 64.0, 22)
RESAMPLINGS = 60
LEAST_POINTS, LEAST_RUNS = 6, 2


@dataclass(frozen=True)
class Point:
    """One measurement.

    Attributes:
        run: which run.
        data: distinct tokens of the run.
        epochs: passes over them so far.
        length: held-out acceptance length, bonus counted.
    """

    run: int
    data: float
    epochs: float
    length: float


@dataclass(frozen=True)
class Fit:
    """A, B, b and R of the module's formula; `error` is the root mean square of the residuals."""

    ceiling: float
    scale: float
    exponent: float
    repetitions: float
    error: float

    def predict(self, data: float, epochs: float) -> float:
        """Acceptance length after `epochs` passes over `data` tokens."""
        return float(self.ceiling - self.scale * worth(np.array([data]), np.array([epochs]), self.repetitions)[0]
                     ** -self.exponent)


@dataclass(frozen=True)
class Advice:
    """What one choice would bring.

    Attributes:
        choice: in words.
        data, epochs: distinct tokens and passes.
        length, low, high: acceptance length expected, and an interval that holds 80 % of the resampled fits.
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


def worth(data: Floats, epochs: Floats, repetitions: float) -> Floats:
    """U of the module's formula."""
    more = np.maximum(epochs - 1, 0.0)
    total: Floats = data * np.minimum(epochs, 1.0) + data * repetitions * (1 - np.exp(-more / repetitions))
    return total


def fit(points: Sequence[Point]) -> Fit:
    """Least squares over a grid of exponents and repetitions; lengths grow with data, never fall.

    Raises:
        InvalidInput: too few points or runs to tell data from epochs.
    """
    if len(points) < LEAST_POINTS or len({p.data for p in points}) < LEAST_RUNS:
        raise InvalidInput("the runs", f"{len(points)} measurements of {len({p.data for p in points})} amounts of data",
                           f"at least {LEAST_POINTS} of {LEAST_RUNS}", "Train on fractions: --fraction 0.25, 0.5, 1.")
    data, epochs, lengths = (np.array([getattr(p, name) for p in points]) for name in ("data", "epochs", "length"))
    best: Fit | None = None
    for repetitions in REPETITIONS:
        log_worth = np.log(worth(data, epochs, float(repetitions)))
        for exponent in EXPONENTS:
            x = np.exp(-exponent * log_worth)
            centred = x - x.mean()
            scale = max(0.0, float(-(centred @ lengths) / max(centred @ centred, 1e-300)))
            ceiling = float(lengths.mean() + scale * x.mean())
            error = float(np.sqrt(np.mean((lengths - ceiling + scale * x) ** 2)))
            if best is None or error < best.error:
                best = Fit(ceiling, scale, float(exponent), float(repetitions), error)
    assert best is not None
    return best


def resampled(points: Sequence[Point], centre: Fit, seed: int = 0) -> list[Fit]:
    """Fits to the same places with residuals drawn anew, whole runs' together, as their errors go together."""
    rng = np.random.default_rng(seed)
    runs = sorted({p.run for p in points})
    residuals = {run: np.array([p.length - centre.predict(p.data, p.epochs) for p in points if p.run == run])
                 for run in runs}
    fits = []
    for _ in range(RESAMPLINGS):
        drawn = []
        for run in runs:
            source = residuals[runs[rng.integers(len(runs))]]
            sign = rng.choice([-1.0, 1.0])
            for p in (p for p in points if p.run == run):
                shift = sign * source[rng.integers(len(source))]
                drawn.append(Point(run, p.data, p.epochs, centre.predict(p.data, p.epochs) + float(shift)))
        fits.append(fit(drawn))
    return fits


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
    others = resampled(points, centre)
    data = max(p.data for p in points)
    epochs = max(p.epochs for p in points if p.data == data)
    choices = [("as the largest run", 1.0, 1.0), ("2x data", 2.0, 1.0), ("4x data", 4.0, 1.0), ("8x data", 8.0, 1.0),
               ("2x epochs", 1.0, 2.0), ("4x epochs", 1.0, 4.0)]
    return centre, [_advice(text, data * more, epochs * longer, centre, others, rate)
                    for text, more, longer in choices]


def _advice(text: str, data: float, epochs: float, centre: Fit, others: Sequence[Fit], rate: float) -> Advice:
    spread = np.quantile([f.predict(data, epochs) for f in others], [0.1, 0.9])
    length, tokens = centre.predict(data, epochs), data * epochs
    return Advice(text, data, round(epochs, 2), round(length, 4), round(min(float(spread[0]), length), 4),
                  round(max(float(spread[1]), length), 4), tokens, round(tokens / rate / 3600, 4) if rate else 0.0)


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
