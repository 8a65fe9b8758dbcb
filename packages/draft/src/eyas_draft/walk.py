"""Expected acceptance length: real rounds walked over held-out answers, without running the target.

Where answers are the target's own greedy ones, the stored tokens are what it would accept. A draft token counts only
if all before it in its round are right, so the draft's inputs in that round are the stored tokens, and one unrolled
pass gives the outcome of a round begun at any position. The walk then visits only the positions at which rounds begin:
each round emits its accepted tokens and the target's own next one (the bonus). A mean over all positions instead
overrates the length, since rounds begin where the one before was rejected.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas_draft.batches import Batch
from eyas_draft.model import DraftModel
from eyas_draft.ttt import scored_positions, unroll


@dataclass(frozen=True)
class Walk:
    """Rounds of a chain.

    Attributes:
        histogram: rounds by accepted draft tokens, 0 to steps.
    """

    histogram: tuple[int, ...]

    @property
    def rounds(self) -> int:
        """Rounds walked."""
        return sum(self.histogram)

    @property
    def acceptance_length(self) -> float:
        """Tokens per round, bonus counted; the token of the prompt's pass is not."""
        return 1 + sum(i * n for i, n in enumerate(self.histogram)) / self.rounds if self.rounds else 1.0

    @property
    def standard_error(self) -> float:
        """Of the acceptance length, rounds being independent; 0 where there are fewer than two."""
        if self.rounds < 2:
            return 0.0
        mean = self.acceptance_length - 1
        spread = sum(n * (i - mean) ** 2 for i, n in enumerate(self.histogram)) / (self.rounds - 1)
        return float((spread / self.rounds) ** 0.5)

    @property
    def rates(self) -> tuple[float, ...]:
        """Share of the rounds that accept at least i + 1 draft tokens."""
        return tuple(sum(self.histogram[i:]) / max(1, self.rounds) for i in range(1, len(self.histogram)))


@torch.no_grad()
def walk(model: DraftModel, batches: Iterable[Batch], steps: int, draft_ids_v: Tensor) -> Walk:
    """Walk every assistant turn of the batches with a chain of `steps` draft tokens.

    Args:
        model: the draft.
        batches: held-out documents.
        steps: draft tokens per round.
        draft_ids_v: int64 [V], target id of each draft id.
    """
    histogram = [0] * (steps + 1)
    for batch in batches:
        accepted = _accepted(model, batch, steps, draft_ids_v.to(batch.input_ids_t.device)).tolist()
        for row, end in _turns(batch):
            for count in _rounds(accepted, row, end):
                histogram[count] += 1
    return Walk(tuple(histogram))


def _accepted(model: DraftModel, batch: Batch, steps: int, draft_ids_v: Tensor) -> Tensor:
    """int64 [T]: draft tokens that a round begun with the state of position t would have accepted."""
    alive = torch.ones_like(batch.loss_mask_t)
    accepted = torch.zeros_like(batch.input_ids_t)
    for step in unroll(model, batch, steps, scored_positions(batch)):
        right = torch.zeros_like(alive)
        proposed = draft_ids_v[model.lm_head(step.normed_th[step.rows_n]).argmax(-1)]
        right[step.rows_n] = proposed == batch.input_ids_t[step.sources_n + 1]
        alive &= right
        accepted += alive
    return accepted


def _turns(batch: Batch) -> list[tuple[int, int]]:
    """For each assistant turn: position of the last token before it, and the position after its last token."""
    mask, turns, start = batch.loss_mask_t.tolist(), [], 0
    for length in batch.lengths:
        end = start + length
        position = start + 1  # a turn that opens the document has no state before it
        while position < end:
            if mask[position] and not mask[position - 1]:
                last = next((p for p in range(position, end) if not mask[p]), end)
                turns.append((position - 1, last))
                position = last
            position += 1
        start = end
    return turns


def _rounds(accepted: Sequence[int], row: int, end: int) -> list[int]:
    """Accepted draft tokens of each round; a round needs the token after its bonus-to-be inside the turn."""
    counts = []
    while row + 2 < end:
        counts.append(accepted[row])
        row += accepted[row] + 1
    return counts
