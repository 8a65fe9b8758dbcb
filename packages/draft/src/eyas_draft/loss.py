"""The loss of every TTT step over the draft vocabulary: soft cross-entropy, or another of `objectives.py`.

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
from eyas_draft.objectives import Mix, evaluate
from eyas_draft.regions import Region, region
from eyas_draft.ttt import unroll

BLOCK_ROWS = (4096, 64)  # of logits at a time, on a GPU and on a CPU
CROSS_ENTROPY: Mix = (("ce", 1.0),)


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
             decay: float, mix: Mix = CROSS_ENTROPY) -> TttLoss:
    """Unroll and score.

    Args:
        model: the draft.
        batch: packed documents.
        scored_t: bool [T], positions whose target distribution counts.
        teacher: target states [N, E] -> probabilities [N, V] (see `ttt.Teacher.probabilities`).
        steps: TTT steps.
        decay: weight of step i is decay^i.
        mix: what is minimised.
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
        summed, right = head_loss(step.normed_th[step.rows_n], model.lm_head.weight, targets, wanted, best,
                                  mix)
        mean = summed / max(1, step.rows_n.numel())
        total = total + decay ** step.index * mean
        losses.append(mean.detach())
        correct.append(right)
        scored.append(torch.tensor(step.rows_n.numel()))
    return TttLoss(total, torch.stack(losses).cpu(), torch.stack(correct).cpu(), torch.stack(scored))


def head_loss(hidden_nh: Tensor, head_vh: Tensor, targets_mv: Tensor, rows_n: Tensor,
              best_m: Tensor, mix: Mix = CROSS_ENTROPY) -> tuple[Tensor, Tensor]:
    """Sum over rows of the mix (for `ce` -sum_v p_v log q_v, nats), q = softmax(hidden @ head.T), p = targets[rows].

    Args:
        hidden_nh: [N, H].
        head_vh: [V, H].
        targets_mv: float32 or wider [M, V], rows summing to one.
        rows_n: int64 [N], the target row of each.
        best_m: int64 [M], largest entry of each target row.

    Returns:
        the sum, and the number of rows whose largest logit is at the target's largest probability.
    """
    dtype = _compute_dtype(hidden_nh)
    total, right = _HeadLoss.apply(  # type: ignore[no-untyped-call]
        hidden_nh.to(dtype), head_vh.to(dtype), targets_mv, rows_n, best_m, mix)
    return total, right


def fixed_head_loss(normed_th: Tensor, head_vh: Tensor, targets_mv: Tensor, best_m: Tensor, rows_m: Tensor,
                    valid_m: Tensor, inverse_t: Tensor, mix: Mix) -> tuple[Tensor, Tensor]:
    """`head_loss` over a fixed number of rows, some of which do not count; nothing here waits for the host.

    Args:
        normed_th: [T, H].
        head_vh: [V, H].
        targets_mv, best_m: float32 or wider [M, V], and the largest entry of each row.
        rows_m: int64 [M], the row of `normed_th` that each target scores (any, where it does not count).
        valid_m: bool [M], which count.
        inverse_t: int64 [T], the target that scores each row, M where none does.
        mix: what is minimised.

    Returns:
        as `head_loss`.
    """
    dtype = _compute_dtype(normed_th)
    total, right = _FixedHeadLoss.apply(  # type: ignore[no-untyped-call]
        normed_th.to(dtype), head_vh.to(dtype), targets_mv, best_m, rows_m, valid_m, inverse_t, mix)
    return total, right


def _compute_dtype(hidden: Tensor) -> torch.dtype:
    kind = hidden.device.type
    return torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype


class _HeadLoss(torch.autograd.Function):
    """Logits, softmax and both gradients in one go: rows are worked off in blocks that stay in the cache, and one
    [N, V] buffer in the compute dtype holds first the logits, then their gradient (softmax - target)."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, head: Tensor, targets: Tensor, rows: Tensor, best: Tensor,
                mix: Mix) -> tuple[Tensor, Tensor]:
        buffer = hidden @ head.T
        total = targets.new_zeros(())
        right = torch.zeros((), dtype=torch.int64, device=hidden.device)
        block = BLOCK_ROWS[hidden.device.type == "cpu"]
        for part, index in zip(torch.split(buffer, block), torch.split(rows, block), strict=True):
            logits, target = part.to(targets.dtype, copy=True), targets[index]
            largest = logits.amax(-1, keepdim=True)
            right += (logits.gather(1, best[index][:, None]) >= largest).sum()
            if mix != CROSS_ENTROPY:
                value, grad = evaluate(mix, logits, target)
                total += value.sum()
                part.copy_(grad)
                continue
            total += largest.sum() - (logits * target).sum()
            logits.sub_(largest).exp_()
            mass = logits.sum(-1, keepdim=True)
            total += mass.log().sum()
            part.copy_(logits.div_(mass).sub_(target))
        ctx.save_for_backward(buffer @ head, buffer.T @ hidden)
        ctx.mark_non_differentiable(right)
        return total, right

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_hidden, d_head = ctx.saved_tensors
        return d_hidden * grads[0].to(d_hidden.dtype), d_head * grads[0].to(d_head.dtype), *(None,) * 4


class _FixedHeadLoss(torch.autograd.Function):
    """`_HeadLoss` without a shape that depends on the data."""

    @staticmethod
    def forward(ctx: Any, normed: Tensor, head: Tensor, targets: Tensor, best: Tensor, rows: Tensor, valid: Tensor,
                inverse: Tensor, mix: Mix) -> tuple[Tensor, Tensor]:
        hidden = normed[rows]
        buffer = hidden @ head.T
        total = targets.new_zeros(())
        right = torch.zeros((), dtype=torch.int64, device=hidden.device)
        block = buffer.shape[0] if Region.active else BLOCK_ROWS[hidden.device.type == "cpu"]
        for part, target, first, counts in zip(*(torch.split(x, block) for x in (buffer, targets, best, valid)),
                                               strict=True):
            value, correct, grad = _score(part, target, first, counts, mix)
            total += value
            right += correct
            if block == buffer.shape[0]:
                buffer = grad
            else:
                part.copy_(grad)
        d_hidden = buffer @ head
        ctx.save_for_backward(torch.cat((d_hidden, d_hidden.new_zeros(1, d_hidden.shape[1])))[inverse],
                              buffer.T @ hidden)
        ctx.mark_non_differentiable(right)
        return total, right

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        d_normed, d_head = ctx.saved_tensors
        return (d_normed * grads[0].to(d_normed.dtype), d_head * grads[0].to(d_head.dtype), *(None,) * 6)


@region
def _score(logits_nv: Tensor, target_nv: Tensor, best_n: Tensor, valid_n: Tensor, mix: Mix) -> tuple[
        Tensor, Tensor, Tensor]:
    """Sum of the mix over the rows that count, how many of them are right, and the gradient by the logits."""
    wide = logits_nv.to(target_nv.dtype)
    value, grad = evaluate(mix, wide, target_nv)
    right = (wide.gather(1, best_n[:, None]).squeeze(1) >= wide.amax(-1)) & valid_n
    weight = valid_n.to(wide.dtype)
    return (value * weight).sum(), right.sum(), (grad * weight[:, None]).to(logits_nv.dtype)
