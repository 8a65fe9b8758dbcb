"""Attention over a KV pool by token slot. q, k, v in float32, bfloat16 or float16, arithmetic in float32.

B requests, T query rows, Hq and Hkv heads, D and Dv widths, S slots. A query's result depends, bit for bit, on the list
of keys that it sees and on nothing else: not on threads, not on the rest of the batch, and decode_attention over a list
equals tree_attention and prefill over the same list.
"""

from __future__ import annotations

from typing import Any

from eyas_native import _C
from eyas_native.arrays import optional, target, view


def decode_attention(
    q: Any,
    k_buffer: Any,
    v_buffer: Any,
    out: Any,
    req_to_token: Any,
    req_pool_indices: Any,
    seq_lens: Any,
    *,
    scale: float,
    logit_cap: float = 0.0,
    window: int = 0,
    lse: Any = None,
) -> None:
    """One query a request, over all of the request's keys.

    Args:
        q: [B, Hq, D]; the last axis contiguous, here and for every array of several axes.
        k_buffer: [S, Hkv, D].
        v_buffer: [S, Hkv, Dv], of k_buffer's dtype.
        out: [B, Hq, Dv] of q's dtype, written; zeros for a request without keys.
        req_to_token: i32 [R, L], pool slot of each token of each request.
        req_pool_indices: i64 [B], row of req_to_token.
        seq_lens: i64 [B], keys of each request, the query's own included.
        scale: factor of the scores, usually D ** -0.5.
        logit_cap: above 0, scores become cap * tanh(score / cap).
        window: above 0, only the last `window` keys are seen, the query's own counted.
        lse: f32 [B, Hq] or None, out: natural logarithm of the sum of exponents.

    Raises:
        ArgumentError: shapes, dtypes, strides, or an index outside its array; then nothing has been written.
    """
    _C.attention(
        view(q, "q"),
        view(k_buffer, "k_buffer"),
        view(v_buffer, "v_buffer"),
        target(out, "out"),
        optional(lse, "lse"),
        view(req_to_token, "req_to_token"),
        view(req_pool_indices, "req_pool_indices"),
        view(seq_lens, "seq_lens"),
        None,
        None,
        None,
        False,
        window,
        scale,
        logit_cap,
        0,
    )


def tree_attention(
    q: Any,
    k_buffer: Any,
    v_buffer: Any,
    out: Any,
    req_to_token: Any,
    req_pool_indices: Any,
    seq_lens: Any,
    extend_lens: Any,
    extend_start: Any,
    *,
    scale: float,
    logit_cap: float = 0.0,
    window: int = 0,
    tree_mask: Any = None,
    tree_keys: int = 0,
    causal: bool = True,
    lse: Any = None,
) -> None:
    """Several queries a request: a draft tree, or a prefill. Their own keys are the last of the request's.

    Args:
        q: [T, Hq, D], out: [T, Hq, Dv], lse: f32 [T, Hq] or None; rows of no request are left alone.
        k_buffer, v_buffer, req_to_token, req_pool_indices, scale, logit_cap: as in decode_attention.
        seq_lens: i64 [B], keys of each request, the queries' own included.
        extend_lens: i64 or i32 [B], queries of each request (e).
        extend_start: i64 or i32 [B], first row of q of each request.
        window: above 0, of the keys that a query sees it keeps the last `window` (for a tree node: by depth).
        tree_mask: bool or u8, flat, e * e per request back to back: which of the queries' own keys each query sees.
            The keys before them are always seen. None: causal.
        tree_keys: above 0, tree_mask holds e * tree_keys per request and chooses from its last tree_keys keys, be they
            the queries' own or not: the queries of one step of a draft. Needs a tree_mask.
        causal: without a mask, whether a query sees only keys up to its own.

    Raises:
        ArgumentError: shapes, dtypes, strides, or an index outside its array; then nothing has been written.
    """
    _C.attention(
        view(q, "q"),
        view(k_buffer, "k_buffer"),
        view(v_buffer, "v_buffer"),
        target(out, "out"),
        optional(lse, "lse"),
        view(req_to_token, "req_to_token"),
        view(req_pool_indices, "req_pool_indices"),
        view(seq_lens, "seq_lens"),
        view(extend_lens, "extend_lens"),
        view(extend_start, "extend_start"),
        optional(tree_mask, "tree_mask"),
        causal,
        window,
        scale,
        logit_cap,
        tree_keys,
    )
