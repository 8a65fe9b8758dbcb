"""Soft cross-entropy of every TTT step over the draft vocabulary.

Normaliser: each step's sum is divided by the number of rows scored at that step in the batch; steps are weighted
decay^i and summed (not averaged).

Source: EAGLE-3 (arXiv 2503.01840) section 3.2 and its released trainer: weights 0.8^i, soft targets.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

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
        correct.append((logits.detach().gather(1, best[wanted][:, None])[:, 0] >= logits.detach().amax(-1)).sum())
        summed = soft_cross_entropy(logits, targets[wanted])
        mean = summed / max(1, step.rows_n.numel())
        total = total + decay ** step.index * mean
        losses.append(mean.detach())
        scored.append(torch.tensor(step.rows_n.numel()))
    return TttLoss(total, torch.stack(losses).cpu(), torch.stack(correct).cpu(), torch.stack(scored))


def soft_cross_entropy(logits_nv: Tensor, targets_nv: Tensor) -> Tensor:
    """Sum over rows of -sum_v p_v log q_v (nats); rows of `targets_nv` sum to one.

    Overwrites `logits_nv` (float32 or wider), which holds the softmax afterwards.
    """
    result: Tensor = _SoftCrossEntropy.apply(logits_nv, targets_nv)  # type: ignore[no-untyped-call]
    return result


class _SoftCrossEntropy(torch.autograd.Function):
    """In few passes over [N, V] and with one such buffer: the gradient is softmax - target."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor) -> Tensor:
        largest = logits.amax(-1, keepdim=True)
        chosen = torch.linalg.vecdot(logits, targets)
        exponentials = logits.sub_(largest).exp_()
        total = exponentials.sum(-1, keepdim=True)
        ctx.save_for_backward(exponentials.div_(total), targets)
        loss: Tensor = ((total.log() + largest)[:, 0] - chosen).sum()
        return loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        softmax, targets = ctx.saved_tensors
        return (softmax - targets).mul_(grads[0]), None
