"""The curve of held-out acceptance length over what was trained on, fitted to measurements, and what it leaves open.

L = A - B * U ** -b, where U are the tokens' worth of what was seen: D tokens seen once, and for E epochs
D * (1 + R * (1 - exp(-(E - 1) / R))), so that a repeated token is worth ever less; R is how many repetitions are worth
anything. A and B come from least squares, b and R from a grid.

Source: the form of U from "Scaling Data-Constrained Language Models" (arXiv 2305.16264), equation 5.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eyas_contract import InvalidInput

Floats = npt.NDArray[np.float64]
EXPONENTS = np.geomspace(0.05, 1.5, 30)
REPETITIONS = np.geomspace(0.5, 64.0, 22)
COMMON = (0.0, 0.25, 0.5, 0.75, 0.9)  # shares of the noise that all measurements of a run have in common
DRAWS = 4000
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
    best: Fit | None = None
    for repetitions, most, lines in _lines(points, (), common=0.0):
        i = int(lines.squares.argmin())
        error, exponent = float(np.sqrt(lines.squares[i] / len(points))), float(EXPONENTS[i])
        if best is None or error < best.error:
            best = Fit(float(lines.level[i]), float(-lines.slope[i]) * most**exponent, exponent, repetitions, error)
    assert best is not None
    return best


@dataclass(frozen=True)
class Lines:
    """Least squares of lengths on a line in (U / the largest U) ** -b, for each of E exponents; P places.

    Attributes:
        level, slope: A, and -B in these units, (E,).
        squares: sum of the squared residuals, (E,).
        evidence: logarithm of the weight among all others, up to a constant, (E,).
        expected, deviation: of a new run's measurement at each place, (E, P), Student's t around it.
    """

    level: Floats
    slope: Floats
    squares: Floats
    evidence: Floats
    expected: Floats
    deviation: Floats


def outcomes(points: Sequence[Point], places: Sequence[tuple[float, float]], seed: int = 0) -> Floats:
    """What new runs may measure at places (distinct tokens, epochs), drawn as likely as they are: (`DRAWS`, places).

    The curve is one of the grid's with any A and a falling B, noise is normal and partly common to a run's
    measurements, and nothing of that is known beforehand (flat priors; 1 / sigma): the posterior predictive of a
    linear model for each grid point, which is Student's t, mixed by their evidence. `fit` must have taken the points.

    Source: Gelman et al., "Bayesian Data Analysis", 3rd edition, sections 14.2 and 14.7.
    """
    lines = [lines for common in COMMON for _, _, lines in _lines(points, places, common)]
    evidence, expected, deviation = (np.concatenate([getattr(line, name) for line in lines])
                                     for name in ("evidence", "expected", "deviation"))
    weights = np.exp(evidence - evidence.max())
    rng = np.random.default_rng(seed)
    drawn = rng.choice(len(weights), DRAWS, p=weights / weights.sum())
    values: Floats = expected[drawn] + deviation[drawn] * rng.standard_t(len(points) - 2, size=(DRAWS, 1))
    return values


def _lines(points: Sequence[Point], places: Sequence[tuple[float, float]],
           common: float) -> Iterator[tuple[float, float, Lines]]:
    """Of every R: R, the largest U, and the lines, with that share of the noise common to a run's measurements."""
    data, epochs, lengths = (np.array([getattr(p, name) for p in points]) for name in ("data", "epochs", "length"))
    new_data, new_epochs = np.array(places, dtype=np.float64).reshape(-1, 2).T
    runs = np.array([p.run for p in points])
    noise = (1 - common) * np.eye(len(points)) + common * (runs[:, None] == runs)
    white = np.linalg.inv(np.linalg.cholesky(noise))
    for repetitions in map(float, REPETITIONS):
        log_worth, log_new = (np.log(worth(d, e, repetitions)) for d, e in ((data, epochs), (new_data, new_epochs)))
        most = log_worth.max()
        # In units of the largest, so that B is a length for every exponent, and flat for each alike.
        x, new_x = (np.exp(-EXPONENTS[:, None] * (logs - most)) for logs in (log_worth, log_new))
        yield repetitions, float(np.exp(most)), _regressed(white, x, lengths, new_x)


def _regressed(white: Floats, x: Floats, lengths: Floats, new_x: Floats) -> Lines:
    """Generalised least squares of lengths on 1 and each row of x; on 1 alone where lengths would fall with more."""
    one, y, xs = white @ np.ones(len(lengths)), white @ lengths, x @ white.T
    s00, s01, s11 = one @ one, xs @ one, (xs * xs).sum(1)
    determinant = np.maximum(s00 * s11 - s01**2, 1e-300)
    slope = np.minimum((s00 * (xs @ y) - s01 * (one @ y)) / determinant, 0.0)
    level = (one @ y - slope * s01) / s00
    squares = ((y - level[:, None] * one - slope[:, None] * xs) ** 2).sum(1)
    free, noise = len(lengths) - 2, np.maximum(squares, 1e-12)
    evidence = np.log(np.diag(white)).sum() - 0.5 * np.log(determinant) - 0.5 * free * np.log(noise)
    spread = 1 + (s11[:, None] - 2 * s01[:, None] * new_x + s00 * new_x**2) / determinant[:, None]
    return Lines(level, slope, squares, evidence, level[:, None] + slope[:, None] * new_x,
                 np.sqrt(noise[:, None] / free * spread))
