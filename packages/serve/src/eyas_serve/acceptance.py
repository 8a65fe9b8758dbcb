"""Acceptance length and per-position rates, from the engine's histograms of accepted draft tokens.

A round is one verification of the target. It yields its accepted draft tokens and one bonus token of the target's own.
Acceptance length is tokens per round: 1 + accepted / rounds. The token that the prompt pass yields belongs to no round.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

DEFINITION = "1 + accepted draft tokens / rounds: the bonus token counted, the prompt pass's token not"


@dataclass(frozen=True)
class Acceptance:
    """Of one or more requests.

    Attributes:
        histogram: histogram[k] = rounds with k accepted draft tokens.
    """

    histogram: tuple[int, ...]

    @classmethod
    def of(cls, histograms: Iterable[Sequence[int]]) -> Acceptance:
        """Add up."""
        rows = list(histograms)
        width = max((len(row) for row in rows), default=0)
        return cls(tuple(sum(row[k] for row in rows if k < len(row)) for k in range(width)))

    @property
    def rounds(self) -> int:
        """Verifications by the target."""
        return sum(self.histogram)

    @property
    def accepted(self) -> int:
        """Draft tokens accepted, bonus tokens excluded."""
        return sum(k * count for k, count in enumerate(self.histogram))

    @property
    def length(self) -> float:
        """Tokens per round; 1.0 where nothing was ever accepted or there was no round."""
        return 1 + self.accepted / self.rounds if self.rounds else 1.0

    def conditional_rates(self) -> list[float]:
        """Share of rounds accepted at position k (from 1) among those accepted at k - 1."""
        reached = [sum(self.histogram[k:]) for k in range(len(self.histogram))]
        return [later / earlier for earlier, later in itertools.pairwise(reached) if earlier]

    def plain_rates(self) -> list[float]:
        """Share of all rounds accepted at position k (from 1)."""
        return [sum(self.histogram[k:]) / self.rounds for k in range(1, len(self.histogram))] if self.rounds else []
