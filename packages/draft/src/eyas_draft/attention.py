"""Attention of training-time test: the causal prefix of step 0 plus each later step's own diagonal.

At step i a query sees the step-0 keys up to its own position within its document, and of every later step only the key
at its own position. The prefix goes through a flash kernel, the diagonals (one key each) are merged in by their scores,
so no mask and no score matrix of all steps is ever held: memory grows with tokens times steps. (On a CPU, the
backward pass of short documents holds the scores of one step, which is faster there.)

The gradient of the merged softmax needs no kernel of its own: a flash backward that is given the merged output and the
merged log-sum-exp computes exactly the prefix part, because both enter it only through exp(score - lse) and the row
sum of grad * out.

Shape suffixes: T tokens, Q query heads, G key/value heads, D width of queries and keys, Z of values; B documents,
L longest document.

Source: EAGLE-3 (arXiv 2503.01840) section 3.2 for what is seen; `EagleDraftWorker.draft_forward` in SGLang's
`srt/speculative/eagle_worker_v2.py` for what serving computes: prefix of committed tokens, then own draft steps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eyas_draft.diagonals import merge, merge_backward

aten = torch.ops.aten
DENSE_UP_TO = 512  # tokens of the longest document in a batch
STACKED_ON = ("cuda",)  # device types on which the diagonals are merged all at once (`diagonals.py`)


class TttAttention:
    """The `attend` of one unrolled batch; remembers the keys and values of the steps so far.

    Args:
        layout: where the documents lie; or tokens per document, in order.
        num_layers: layers of the draft.
        device: where the batch lies.
    """

    def __init__(self, layout: Layout | Sequence[int], num_layers: int, device: torch.device) -> None:
        self.layout = layout if isinstance(layout, Layout) else Layout(layout, device)
        self._blocks: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(num_layers)]

    def __call__(self, layer: int, q_tqd: Tensor, k_tgd: Tensor, v_tgz: Tensor) -> Tensor:
        """Attend, and keep k and v for the later steps; [T, Q, D] -> [T, Q, Z]."""
        blocks = self._blocks[layer]
        blocks.append((k_tgd, v_tgz))
        diagonals = [tensor for block in blocks[1:] for tensor in block]
        out: Tensor = _PrefixAndDiagonals.apply(  # type: ignore[no-untyped-call]
            q_tqd, *blocks[0], self.layout, *diagonals)
        return out


class Layout:
    """Where each document lies, packed [T] and padded [B, L].

    Attributes:
        bounds: int32 [B+1], where each document begins, and the end of the last.
        longest: L, or more.
    """

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        sizes = torch.tensor(lengths, device=device)
        self.longest = max(lengths)
        self.num_documents = len(lengths)
        starts = sizes.cumsum(0) - sizes
        self.bounds = torch.nn.functional.pad(sizes.cumsum(0), (1, 0)).to(torch.int32)
        row = torch.arange(len(lengths), device=device).repeat_interleave(sizes)
        column = torch.arange(int(sizes.sum()), device=device) - starts.repeat_interleave(sizes)
        self.slot_t = row * self.longest + column

    @classmethod
    def fixed(cls, bounds: Tensor, longest: int) -> Layout:
        """For a GPU's kernels, which need no padding: bounds may be refilled in place, and documents be empty."""
        layout = cls.__new__(cls)
        layout.bounds, layout.longest, layout.num_documents = bounds, longest, bounds.numel() - 1
        return layout

    def pad(self, x_tnd: Tensor) -> Tensor:
        """[T, N, D] -> [B, N, L, D], zeros after each document's end."""
        padded = x_tnd.new_zeros(self.num_documents * self.longest, *x_tnd.shape[1:])
        padded[self.slot_t] = x_tnd
        return padded.view(self.num_documents, self.longest, *x_tnd.shape[1:]).transpose(1, 2)

    def unpad(self, x_bnld: Tensor) -> Tensor:
        """[B, N, L, D] -> [T, N, D]."""
        return x_bnld.transpose(1, 2).flatten(0, 1)[self.slot_t]


class _PrefixAndDiagonals(torch.autograd.Function):
    """softmax over [prefix of block 0, own key of block 1, own key of block 2, ...]; heads grouped as in GQA."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k0: Tensor, v0: Tensor, layout: Layout, *diagonals: Tensor) -> Tensor:
        out, lse = _flash(q, _spread(k0, q), _spread(v0, q), layout)
        if diagonals and q.device.type in STACKED_ON:
            out, lse, ctx.weights = merge(q, out, lse, torch.stack(diagonals[::2]), torch.stack(diagonals[1::2]))
        elif diagonals:
            scale, wide_q = q.shape[-1] ** -0.5, q.to(lse.dtype)
            scores = torch.stack([_rowwise(wide_q, k) for k in diagonals[::2]]) * scale
            merged = torch.logsumexp(torch.cat((lse[None], scores)), dim=0)
            weights = (scores - merged).exp_()
            wide = out.to(lse.dtype).mul_((lse - merged).exp_()[..., None])
            for weight, v in zip(weights, diagonals[1::2], strict=True):
                _grouped(wide, v).addcmul_(_grouped(weight[..., None], v), v.to(lse.dtype)[:, :, None])
            out, lse = wide.to(q.dtype), merged
            ctx.weights = weights
        ctx.layout = layout
        ctx.save_for_backward(q, k0, v0, out, lse, *diagonals)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k0, v0, out, lse, *diagonals = ctx.saved_tensors
        grad = grads[0].contiguous()
        dq, dk0, dv0 = _flash_backward(grad, q, _spread(k0, q), _spread(v0, q), out, lse, ctx.layout)
        results: list[Tensor | None] = []
        if diagonals and q.device.type in STACKED_ON:
            dq, dk, dv = merge_backward(grad, q, out, dq, ctx.weights, torch.stack(diagonals[::2]),
                                        torch.stack(diagonals[1::2]))
            results = [tensor for pair in zip(dk, dv, strict=True) for tensor in pair]
        elif diagonals:
            scale, wide = q.shape[-1] ** -0.5, lse.dtype
            dq_wide, grad_wide, q_wide = dq.to(wide), grad.to(wide), q.to(wide)
            row = (grad_wide * out).sum(-1)
            for weight, k, v in zip(ctx.weights, diagonals[::2], diagonals[1::2], strict=True):
                d_score = (_rowwise(grad_wide, v) - row).mul_(weight).mul_(scale)[..., None]
                _grouped(dq_wide, k).addcmul_(_grouped(d_score, k), k.to(wide)[:, :, None])
                results += [_gather(d_score * q_wide, k), _gather(weight[..., None] * grad_wide, v)]
            dq = dq_wide.to(q.dtype)
        return dq, _gather(dk0, k0), _gather(dv0, v0), None, *results


def use_dense(x: Tensor, layout: Layout) -> bool:
    """Whether scores are held in full: backward over short documents on a CPU, where that is faster than flash, and
    wide dtypes on a GPU, whose flash kernels take half precision only."""
    if x.device.type == "cpu":
        return layout.longest <= DENSE_UP_TO
    return x.dtype not in (torch.bfloat16, torch.float16)


def _spread(x_tgd: Tensor, q_tqd: Tensor) -> Tensor:
    """Key/value heads repeated to the number of query heads."""
    groups = q_tqd.shape[1] // x_tgd.shape[1]
    return x_tgd if groups == 1 else x_tgd.repeat_interleave(groups, dim=1)


def _grouped(x_tqd: Tensor, like_tgd: Tensor) -> Tensor:
    """[T, Q, D] seen as [T, G, Q/G, D]."""
    return x_tqd.view(x_tqd.shape[0], like_tgd.shape[1], -1, x_tqd.shape[2])


def _rowwise(x_tqd: Tensor, y_tgd: Tensor) -> Tensor:
    """Dot product of every query head with its key/value head of the same token: [T, Q], in x's dtype."""
    dots: Tensor = torch.linalg.vecdot(_grouped(x_tqd, y_tgd), y_tgd.to(x_tqd.dtype)[:, :, None])
    return dots.flatten(1)


def _gather(grad_tqd: Tensor, like_tgd: Tensor) -> Tensor:
    """Sum over the query heads that share a key/value head."""
    return grad_tqd.view(like_tgd.shape[0], like_tgd.shape[1], -1, like_tgd.shape[2]).sum(2).to(like_tgd.dtype)


def _flash(q: Tensor, k: Tensor, v: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Causal attention within each document: out [T, Q, Z] and log-sum-exp [T, Q] (float32 or wider)."""
    if q.device.type == "cpu":
        out, lse = aten._scaled_dot_product_flash_attention_for_cpu(*map(layout.pad, (q, k, _widen(v, q))), 0.0, True)
        lse = lse if lse.shape[1] == q.shape[1] else lse.transpose(1, 2)
        return layout.unpad(out)[..., :v.shape[-1]], layout.unpad(lse[..., None]).squeeze(-1)
    if use_dense(q, layout):
        scores = _padded_scores(q, k, layout)
        lse = scores.logsumexp(-1)
        weights = (scores - lse[..., None]).exp_().to(q.dtype)
        return layout.unpad(weights @ layout.pad(v)), layout.unpad(lse[..., None]).squeeze(-1)
    out, lse, *_ = aten._flash_attention_forward(q, k, _widen(v, q), layout.bounds, layout.bounds, layout.longest,
                                                 layout.longest, 0.0, True, False)
    return out[..., :v.shape[-1]], lse.T


def _widen(x_tnz: Tensor, like_tqd: Tensor) -> Tensor:
    """[T, N, Z] -> [T, N, D] by zeros: flash kernels take one width for all, and zeros change no other value."""
    more = like_tqd.shape[-1] - x_tnz.shape[-1]
    return torch.nn.functional.pad(x_tnz, (0, more)) if more else x_tnz


def _flash_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
                    layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v through the prefix part of a softmax whose whole output and log-sum-exp are given."""
    if use_dense(q, layout):
        return _dense_backward(grad, q, k, v, out, lse, layout)
    width = v.shape[-1]
    grad, v, out = (_widen(x, q) for x in (grad, v, out))
    if q.device.type == "cpu":
        padded = layout.pad(lse[..., None]).squeeze(-1)
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward(
            layout.pad(grad), *map(layout.pad, (q, k, v, out)), padded.contiguous(), 0.0, True)
        return layout.unpad(grads[0]), layout.unpad(grads[1]), layout.unpad(grads[2])[..., :width]
    unused = torch.zeros(2, dtype=torch.uint64, device=q.device)  # state of the dropout that is not used
    dq, dk, dv = aten._flash_attention_backward(
        grad, q, k, v, out, lse.T.contiguous(), layout.bounds, layout.bounds, layout.longest, layout.longest, 0.0,
        True, unused, unused)
    return dq, dk, dv[..., :width]


def _dense_backward(grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
                    layout: Layout) -> tuple[Tensor, Tensor, Tensor]:
    """`_flash_backward` with the scores held in full."""
    weights = (_padded_scores(q, k, layout) - layout.pad(lse[..., None])).exp_()
    d_out, row = layout.pad(grad), layout.pad((grad * out).sum(-1, keepdim=True, dtype=lse.dtype))
    d_score = (((d_out @ layout.pad(v).mT) - row) * weights * q.shape[-1] ** -0.5).to(q.dtype)
    return (layout.unpad(d_score @ layout.pad(k)), layout.unpad(d_score.mT @ layout.pad(q)),
            layout.unpad(weights.to(q.dtype).mT @ d_out))


def _padded_scores(q: Tensor, k: Tensor, layout: Layout) -> Tensor:
    """Causal scores [B, Q, L, L], float32 or wider."""
    scores = layout.pad(q * q.shape[-1] ** -0.5) @ layout.pad(k).mT
    future = torch.ones(layout.longest, layout.longest, dtype=torch.bool, device=q.device).triu(1)
    wide = scores if scores.dtype == torch.float64 else scores.float()
    return wide.masked_fill_(future, float("-inf"))
