"""A pool of keys and values addressed by token index, and the attention calls over it.

Request r owns `length` slots in a row; `req_to_token[r]` lists them, as SGLang's pool does.

Shape suffixes: T tokens of a call, Q query heads, G key/value heads, D width of queries and keys, Z of values, B
requests, L row length.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas_draft.ops import Ops


class KvPool:
    """Buffers of all layers.

    Args:
        ops: operations.
        num_layers, num_kv_heads, head_dim, value_dim: of the model; head_dim is that of queries and keys.
        requests: rows.
        length: slots per row.
        dtype, device: of the buffers.
    """

    def __init__(self, ops: Ops, *, num_layers: int, num_kv_heads: int, head_dim: int, value_dim: int, requests: int,
                 length: int, dtype: torch.dtype, device: torch.device) -> None:
        self.ops, self.length = ops, length
        shape = (num_layers, requests * length, num_kv_heads)
        self.keys = torch.zeros(*shape, head_dim, dtype=dtype, device=device)
        self.values = torch.zeros(*shape, value_dim, dtype=dtype, device=device)
        self.req_to_token = torch.arange(requests * length, dtype=torch.int32, device=device).view(requests, length)

    def slots(self, requests_t: Tensor, positions_t: Tensor) -> Tensor:
        """Slots of positions in the rows of requests, int64, broadcast together."""
        return self.req_to_token[requests_t, positions_t].long()

    def move(self, target_m: Tensor, source_m: Tensor) -> None:
        """Copy slots `source_m` to `target_m` in every layer; they may overlap."""
        self.keys[:, target_m] = self.keys[:, source_m]
        self.values[:, target_m] = self.values[:, source_m]


@dataclass(frozen=True)
class ExtendAttention:
    """`attend` of several new tokens per request: a prompt, accepted tokens, or a tree.

    Attributes:
        pool: where keys and values go.
        requests_b: int64 [B], rows.
        seq_lens_b: int64 [B], tokens after this call, the new ones included.
        extend_lens_b: int64 [B], new tokens.
        tree_mask: bool, flat, per request e*e over the new tokens; None for causal.
    """

    pool: KvPool
    requests_b: Tensor
    seq_lens_b: Tensor
    extend_lens_b: Tensor
    tree_mask: Tensor | None = None

    def slots(self) -> Tensor:
        """int64 [T], slots of the new tokens."""
        starts = self.extend_lens_b.cumsum(0) - self.extend_lens_b
        inside = torch.arange(int(self.extend_lens_b.sum()), device=starts.device)
        inside = inside - starts.repeat_interleave(self.extend_lens_b)
        prefix = (self.seq_lens_b - self.extend_lens_b).repeat_interleave(self.extend_lens_b)
        return self.pool.slots(self.requests_b.repeat_interleave(self.extend_lens_b), prefix + inside)

    def __call__(self, layer: int, q_tqd: Tensor, k_tgd: Tensor, v_tgz: Tensor) -> Tensor:
        """Write k and v, then attend; [T, Q, Z]."""
        pool, keys, values = self.pool, self.pool.keys[layer], self.pool.values[layer]
        pool.ops.kv_write(k_tgd.contiguous(), v_tgz.contiguous(), keys, values, self.slots())
        q_tqd = q_tqd.contiguous()
        out = q_tqd.new_empty(*q_tqd.shape[:2], v_tgz.shape[-1])
        pool.ops.tree_attention(q_tqd, keys, values, out, pool.req_to_token, self.requests_b, self.seq_lens_b,
                                self.extend_lens_b, self.extend_lens_b.cumsum(0) - self.extend_lens_b,
                                scale=q_tqd.shape[-1] ** -0.5, tree_mask=self.tree_mask, causal=True)
        return out


class BranchAttention:
    """`attend` of draft decoding: topk branches per request, each over the prefix and its own slots of earlier steps.

    A branch keeps its slots when its parent changes between steps: SGLang moves the hidden states to the chosen parent
    but not the keys and values, and so does this.

    Args:
        pool: the draft's.
        requests_b: int64 [B], rows.
        seq_lens_b: int64 [B], committed tokens.
        topk, steps: shape of the draft tree.

    Source: `assign_draft_cache_locs_contiguous` and `build_draft_decode_metadata` in SGLang.
    """

    def __init__(self, pool: KvPool, requests_b: Tensor, seq_lens_b: Tensor, topk: int, steps: int) -> None:
        self.pool, self.step = pool, 0
        device = requests_b.device
        self.seq_lens = seq_lens_b.repeat_interleave(topk)
        branch = torch.arange(topk, device=device).repeat(requests_b.numel())
        rows = requests_b.repeat_interleave(topk)
        offsets = torch.arange(steps, device=device)
        self.own_slots = pool.slots(rows[:, None], (self.seq_lens + branch * steps)[:, None] + offsets)
        self.table = pool.req_to_token[rows].clone()
        self.table.scatter_(1, self.seq_lens[:, None] + offsets, self.own_slots.to(torch.int32))
        self.everyone = torch.arange(rows.numel(), device=device)

    def __call__(self, layer: int, q_tqd: Tensor, k_tgd: Tensor, v_tgz: Tensor) -> Tensor:
        """Write this step's k and v, then attend; T is B * topk."""
        pool, keys, values = self.pool, self.pool.keys[layer], self.pool.values[layer]
        slots = self.own_slots[:, self.step].contiguous()
        pool.ops.kv_write(k_tgd.contiguous(), v_tgz.contiguous(), keys, values, slots)
        q_tqd = q_tqd.contiguous()
        out = q_tqd.new_empty(*q_tqd.shape[:2], v_tgz.shape[-1])
        pool.ops.decode_attention(q_tqd, keys, values, out, self.table, self.everyone, self.seq_lens + self.step + 1,
                                  scale=q_tqd.shape[-1] ** -0.5)
        return out
