"""Soft cross-entropy of every TTT step over the draft vocabulary.

Normaliser: each step's sum is divided by the number of rows scored at that step in the batch; steps are weighted
decay^i and summed (not averaged).

Source: EAGLE-3 (arXiv 2503.01840) section 3.2 and its released trainer: weights 0.8^i, soft targets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from eyas_draft.batches import Batch
from eyas_draft.model import DraftModel
from eyas_draft.ttt import unroll


@dataclass(frozen=True)
class TttLoss:
    """Loss and counts of one batch.

    Attributes:
        loss: scalar, to be differentiated.
        step_losses: detached mean cross-entropy per step (nats), [S].
        correct: rows per step where the draft's first choice is the target's, [S].
        scored: rows per step, [S].
    """

    loss: Tensor
    step_losses: Tensor
    correct: Tensor
    scored: Tensor


def ttt_loss(model: DraftModel, batch: Batch, scored_t: Tensor, teacher: Callable[[Tensor], Tensor], *, steps: int,
             decay: float) -> TttLoss:
    """Unroll and score.

    Args:
        model: the draft.
        batch: packed documents.
        scored_t: bool [T], positions whose target distribution counts.
        teacher: target states [N, E] -> probabilities [N, V] (see `ttt.Teacher.probabilities`).
        steps: TTT steps.
        decay: weight of step i is decay^i.
    """
    sources = torch.nonzero(scored_t).squeeze(1)
    place = torch.full_like(batch.input_ids_t, -1)
    place[sources] = torch.arange(sources.numel(), device=sources.device)
    targets = teacher(batch.last_te[sources])
    best = targets.argmax(-1)
    total = targets.new_zeros(())
    losses, correct, scored = [], [], []
    for step in unroll(model, batch, steps, scored_t):
        logits = model.lm_head(step.normed_th[step.rows_n])
        logits = logits if logits.dtype == torch.float64 else logits.float()
        wanted = place[step.sources_n]
        summed = soft_cross_entropy(logits, targets[wanted])
        mean = summed / max(1, step.rows_n.numel())
        total = total + decay ** step.index * mean
        losses.append(mean.detach())
        correct.append((logits.detach().argmax(-1) == best[wanted]).sum())
        scored.append(torch.tensor(step.rows_n.numel()))
    return TttLoss(total, torch.stack(losses).cpu(), torch.stack(correct).cpu(), torch.stack(scored))


def soft_cross_entropy(logits_nv: Tensor, targets_nv: Tensor) -> Tensor:
    """Sum over rows of -sum_v p_v log q_v (nats)."""
    return -(targets_nv * F.log_softmax(logits_nv, dim=-1)).sum()
