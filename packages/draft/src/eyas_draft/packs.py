"""Batches of one fixed shape, so that a GPU's work can be recorded once and replayed.

A pack holds whole documents end to end and is filled up to its size with documents of padding that nothing scores and
no other document sees. Everything about it that a host must decide is one int32 vector, one copy to the device.

Shape suffixes: T tokens, M scored positions (and padding), B documents.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int32]
GRAIN = 64  # sizes are multiples of it: what matrix units like


@dataclass(frozen=True)
class PackSizes:
    """What every pack of a run has.

    Attributes:
        tokens: T.
        scored: M, room for the positions whose next token is trained.
        documents: B, padding included.
        longest: tokens of the longest document.
    """

    tokens: int
    scored: int
    documents: int
    longest: int

    @classmethod
    def of(cls, plans: Iterable[Sequence[int]], lengths: Sequence[int], trained: Sequence[int]) -> PackSizes:
        """The least sizes that hold every one of these batches (sample numbers)."""
        tokens = scored = documents = longest = 1
        for batch in plans:
            tokens = max(tokens, sum(lengths[i] for i in batch))
            scored = max(scored, sum(trained[i] for i in batch))
            documents = max(documents, len(batch))
            longest = max(longest, *(lengths[i] for i in batch))
        return cls._with_padding(tokens, scored, documents, longest)

    @classmethod
    def of_any(cls, most: int, lengths: Sequence[int], trained: Sequence[int]) -> PackSizes:
        """Sizes that hold whatever batch of `most` tokens at most, or of one longer sample, these samples can make."""
        longest = max(lengths)
        tokens = max(min(most, sum(lengths)), longest)
        documents = sum(end <= tokens for end in accumulate(sorted(lengths)))  # the shortest ones
        scored, room = 0.0, tokens
        for share, length in sorted(((t / n, n) for n, t in zip(lengths, trained, strict=True)), reverse=True):
            taken = min(room, length)  # those with most to score, the last of them cut to fit
            scored, room = scored + share * taken, room - taken
        return cls._with_padding(tokens, math.ceil(scored) + 1, documents, longest)  # 1: of rounding

    @classmethod
    def _with_padding(cls, tokens: int, scored: int, documents: int, longest: int) -> PackSizes:
        tokens, scored = (-(-n // GRAIN) * GRAIN for n in (tokens, scored))
        return cls(tokens, scored, documents + -(-tokens // longest), longest)

    @property
    def parts(self) -> dict[str, int]:
        """Names and lengths of a pack's numbers, in the order in which they lie."""
        t, m = self.tokens, self.scored
        return {"take": t, "positions": t, "ends": t, "place": t, "sources": m, "starts": m,
                "bounds": self.documents + 1}

    @property
    def total(self) -> int:
        """Numbers of a pack."""
        return sum(self.parts.values())


def split_parts(sizes: PackSizes, flat: Ints) -> dict[str, Ints]:
    """Views of a pack's numbers by name."""
    views, at = {}, 0
    for name, count in sizes.parts.items():
        views[name] = flat[at:at + count]
        at += count
    return views


def fill_pack(flat: Ints, sizes: PackSizes, firsts: Sequence[int], masks: Sequence[npt.NDArray[np.bool_]]) -> int:
    """Lay documents out in a pack; returns their tokens.

    Args:
        flat: int32 [sizes.total], overwritten.
            take [T]: row of the states' table (padding: a row of the pack, as others may hold NaN).
            positions [T]: from 0 in each document; ends [T]: index after the document's last token.
            place [T]: number among the scored of this position, M where it is none.
            sources [M]: scored positions, -1 for padding; starts [M]: where their documents begin.
            bounds [B+1]: where documents begin; empty ones lie at the end.
        firsts: for each document, the row of its first token in the states' table.
        masks: for each document, bool [tokens], True where the assistant produced the token.
    """
    parts = split_parts(sizes, flat)
    lengths = [len(mask) for mask in masks]
    used = sum(lengths)
    lengths += _padding(sizes.tokens - used, sizes.longest)
    assert len(lengths) <= sizes.documents, (len(lengths), sizes)
    counts = np.array(lengths)
    ends = counts.cumsum()
    starts = ends - counts
    parts["bounds"][:] = sizes.tokens
    parts["bounds"][:len(starts)] = starts
    parts["ends"][:] = np.repeat(ends, counts)
    parts["positions"][:] = np.arange(sizes.tokens) - np.repeat(starts, counts)
    parts["take"][:used] = np.repeat(np.asarray(firsts), counts[:len(masks)]) + parts["positions"][:used]
    parts["take"][used:] = firsts[0]
    scored = [np.flatnonzero(mask[1:]) + start for mask, start in zip(masks, starts, strict=False)]
    sources = np.concatenate(scored)
    parts["sources"][:] = -1
    parts["starts"][:] = 0
    parts["sources"][:len(sources)] = sources
    parts["starts"][:len(sources)] = np.repeat(starts[:len(masks)], [len(s) for s in scored])
    parts["place"][:] = sizes.scored
    parts["place"][sources] = np.arange(len(sources))
    return used


def _padding(tokens: int, longest: int) -> list[int]:
    """Lengths of the documents that fill up a pack."""
    return [longest] * (tokens // longest) + ([tokens % longest] if tokens % longest else [])
