"""The draft vocabulary: which target tokens the draft can propose, and what leaving the others out costs."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas_contract import InvalidInput, VocabMap


@dataclass(frozen=True)
class Coverage:
    """What a draft vocabulary covers.

    Attributes:
        size, target_size: tokens in the draft's and the target's vocabulary.
        seen: distinct tokens among the trained ones.
        tokens: trained tokens counted.
        mass: share of the trained tokens that the draft can propose.
        lost_ids: the most frequent tokens left out, with their counts (20 at most).
        ceiling: acceptance length (bonus counted) of a chain of `ceiling_steps` that is wrong only where a token is
            outside the vocabulary, such tokens being independent of one another.
        ceiling_steps: length of that chain.
    """

    size: int
    target_size: int
    seen: int
    tokens: int
    mass: float
    lost_ids: tuple[tuple[int, int], ...]
    ceiling: float
    ceiling_steps: int


def choose_vocab(counts_v: Tensor, size: int, always: tuple[int, ...] = ()) -> VocabMap:
    """The `size` most frequent tokens; ties go to the smaller id.

    Args:
        counts_v: int64 [V_target], occurrences among trained tokens.
        size: rows of the draft's head; 0 or the target's size for the full vocabulary.
        always: ids included whatever their count (end-of-turn and other special tokens).

    Raises:
        InvalidInput: a size out of range, or no room for `always`.
    """
    total = counts_v.numel()
    if size in (0, total):
        return VocabMap(total, tuple(range(total)))
    if not len(set(always)) <= size < total:
        raise InvalidInput("--vocab-size", str(size),
                           f"{len(set(always))} (the special tokens seen) to {total} (the target's vocabulary)",
                           "Choose a size in that range, or 0 for the full vocabulary.")
    ranked = counts_v.clone()
    ranked[list(always)] = torch.iinfo(torch.int64).max
    chosen = torch.argsort(ranked, descending=True, stable=True)[:size]
    return VocabMap(total, tuple(sorted(chosen.tolist())))


def coverage(counts_v: Tensor, vocab: VocabMap, steps: int = 3) -> Coverage:
    """How much of the counted tokens `vocab` covers."""
    inside = torch.zeros_like(counts_v, dtype=torch.bool)
    inside[list(vocab.target_ids)] = True
    total = int(counts_v.sum())
    mass = int(counts_v[inside].sum()) / total if total else 0.0
    outside = counts_v.masked_fill(inside, 0)
    top = torch.topk(outside, min(20, outside.numel()))
    lost = tuple((int(i), int(n)) for i, n in zip(top.indices, top.values, strict=True) if n > 0)
    return Coverage(vocab.size, vocab.target_vocab_size, int((counts_v > 0).sum()), total, mass, lost,
                    sum(mass ** i for i in range(steps + 1)), steps)


def render(report: Coverage, decode: dict[int, str]) -> str:
    """Plain text for a terminal; `decode` gives the text of the lost ids where a tokenizer is at hand."""
    lines = [f"draft vocabulary {report.size} of {report.target_size} "
             f"({report.seen} distinct among {report.tokens} trained tokens)",
             f"covers {report.mass:.2%} of the trained tokens",
             f"ceiling of the acceptance length from coverage alone, chain of {report.ceiling_steps}: "
             f"{report.ceiling:.2f} (bonus counted)"]
    lines += [f"  left out: {token_id:>7} x{count:<6} {decode.get(token_id, '')!r}"
              for token_id, count in report.lost_ids]
    return "\n".join(lines)
