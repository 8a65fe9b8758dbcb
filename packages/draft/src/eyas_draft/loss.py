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

BLOCK_ROWS = (4096, 64)  # of logits at a time, on a GPU and on a CPU


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
        wanted = place[step.sources_n]
        summed, right = head_loss(step.normed_th[step.rows_n], model.lm_head.weight, targets, wanted, best)
        mean = summed / max(1, step.rows_n.numel())
        total = total + decay ** step.index * mean
        losses.append(mean.detach())
        correct.append(right)
        scored.append(torch.tensor(step.rows_n.numel()))
    return TttLoss(total, torch.stack(losses).cpu(), torch.stack(correct).cpu(), torch.stack(scored))


def head_loss(hidden_nh: Tensor, head_vh: Tensor, targets_mv: Tensor, rows_n: Tensor,
              best_m: Tensor) -> tuple[Tensor, Tensor]:
    """Sum over rows of -sum_v p_v log q_v (nats) with q = softmax(hidden @ head.T) and p = targets[rows].

    Args:
        hidden_nh: [N, H].
        head_vh: [V, H].
        targets_mv: float32 or wider [M, V], rows summing to one.
        rows_n: int64 [N], the target row of each.
        best_m: int64 [M], largest entry of each target row.

    Returns:
        the sum, and the number of rows whose largest logit is at the target's largest probability.
    """
    dtype = hidden_nh.dtype
    if torch.is_autocast_enabled(hidden_nh.device.type):
        dtype = torch.get_autocast_dtype(hidden_nh.device.type)
    total, right = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden_nh.to(dtype), head_vh.to(dtype), targets_mv, rows_n, best_m)
    return total, right


class _HeadLoss(torch.autograd.Function):
    """Logits, softmax and both gradients in one go: rows are worked off in blocks that stay in the cache, and one
    [N, V] buffer in the compute dtype holds first the logits, then their gradient (softmax - target)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, rows: Tensor,
                best: Tensor) -> tuple[Tensor, Tensor]:
        buffer = hidden @ head.T
        total = targets.new_zeros(())
        right = torch.zeros((), dtype=torch.int64, device=hidden.device)
        block = BLOCK_ROWS[hidden.device.type == "cpu"]
        for part, index in zip(torch.split(buffer, block), torch.split(rows, block), strict=True):
            logits, target = part.to(targets.dtype, copy=True), targets[index]
            largest = logits.amax(-1, keepdim=True)
            right += (logits.gather(1, best[index][:, None]) >= largest).sum()
            total += largest.sum() - (logits * target).sum()
            logits.sub_(largest).exp_()
            mass = logits.sum(-1, keepdim=True)
            total += mass.log().sum()
            part.copy_(logits.div_(mass).sub_(target))
        ctx.save_for_backward(buffer @ head, buffer.T @ hidden)
        ctx.mark_non_differentiable(right)
        return total, right

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        d_hidden, d_head = ctx.saved_tensors
        return d_hidden * grads[0].to(d_hidden.dtype), d_head * grads[0].to(d_head.dtype), None, None, None
