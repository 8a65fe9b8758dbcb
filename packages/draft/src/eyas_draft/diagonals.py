"""Merging the diagonals of training-time test into the causal prefix, all of them at once.

The statement for a GPU: the later steps' keys and values lie stacked, and every function is one chain of elementwise
operations and short sums that compiles into few passes. `attention.py` has the one for a CPU, key by key.

Shape suffixes: S diagonals, T tokens, Q query heads, G key/value heads, R = Q / G, D width of queries and keys, Z of
values; helpers that take either say D.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eyas_draft.regions import region


@region
def merge(q_tqd: Tensor, out_tqz: Tensor, lse_tq: Tensor, k_stgd: Tensor, v_stgz: Tensor) -> tuple[
        Tensor, Tensor, Tensor]:
    """Softmax over the prefix, whose output and log-sum-exp are given, and each row's own keys.

    Returns:
        out [T, Q, Z] in q's dtype, log-sum-exp [T, Q] and the diagonals' weights [S, T, Q] in lse's dtype.
    """
    wide = lse_tq.dtype
    scores = _dots(q_tqd, k_stgd, wide) * q_tqd.shape[-1] ** -0.5
    largest = torch.maximum(scores.amax(0), lse_tq)
    prefix, own = (lse_tq - largest).exp(), (scores - largest).exp()
    mass = prefix + own.sum(0)
    weights = own / mass
    out = out_tqz.to(wide) * (prefix / mass)[..., None] + _mix(weights, v_stgz)
    return out.to(q_tqd.dtype), largest + mass.log(), weights


@region
def merge_backward(grad_tqz: Tensor, q_tqd: Tensor, out_tqz: Tensor, dq_tqd: Tensor, weights_stq: Tensor,
                   k_stgd: Tensor, v_stgz: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients through the diagonals, given the merged output and the prefix's part of dq.

    Returns:
        dq [T, Q, D] whole, dk [S, T, G, D] and dv [S, T, G, Z].
    """
    wide, scale, heads = weights_stq.dtype, q_tqd.shape[-1] ** -0.5, k_stgd.shape[2]
    row = (grad_tqz.to(wide) * out_tqz.to(wide)).sum(-1)
    d_score = (_dots(grad_tqz, v_stgz, wide) - row) * weights_stq * scale
    dq = dq_tqd.to(wide) + _mix(d_score, k_stgd)
    dk = (_split(d_score, heads)[..., None] * _split_heads(q_tqd, heads).to(wide)).sum(3)
    dv = (_split(weights_stq, heads)[..., None] * _split_heads(grad_tqz, heads).to(wide)).sum(3)
    return dq.to(q_tqd.dtype), dk.to(k_stgd.dtype), dv.to(v_stgz.dtype)


def _dots(x_tqd: Tensor, y_stgd: Tensor, dtype: torch.dtype) -> Tensor:
    """Every query head with the S keys of its own row: [S, T, Q]."""
    wide = _split_heads(x_tqd, y_stgd.shape[2]).to(dtype) * y_stgd[:, :, :, None].to(dtype)
    return wide.sum(-1).flatten(2)


def _mix(weights_stq: Tensor, y_stgd: Tensor) -> Tensor:
    """Sum over S of weight times the row of its head: [T, Q, D]."""
    wide = _split(weights_stq, y_stgd.shape[2])[..., None] * y_stgd[:, :, :, None].to(weights_stq.dtype)
    return wide.sum(0).flatten(1, 2)


def _split(x_stq: Tensor, heads: int) -> Tensor:
    """[S, T, Q] -> [S, T, G, R]."""
    return x_stq.view(*x_stq.shape[:2], heads, -1)


def _split_heads(x_tqd: Tensor, heads: int) -> Tensor:
    """[T, Q, D] -> [T, G, R, D]."""
    return x_tqd.view(x_tqd.shape[0], heads, -1, x_tqd.shape[2])
