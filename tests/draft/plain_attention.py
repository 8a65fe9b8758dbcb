"""Attention of a draft as it is defined, for the tests' references."""

from __future__ import annotations

import torch
from torch import Tensor


class PlainAttention:
    """Scores over the keys a query may see, listed one by one; autograd does the rest."""

    def __init__(self, num_layers: int) -> None:
        self.blocks: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(num_layers)]

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        blocks = self.blocks[layer]
        blocks.append((k, v))
        groups = q.shape[1] // k.shape[1]
        rows = []
        for t in range(q.shape[0]):
            seen = [(blocks[0][0][s], blocks[0][1][s]) for s in range(t + 1)] + [(b[0][t], b[1][t]) for b in blocks[1:]]
            keys = torch.stack([s[0] for s in seen]).repeat_interleave(groups, dim=1)
            values = torch.stack([s[1] for s in seen]).repeat_interleave(groups, dim=1)
            weights = (torch.einsum("hd,shd->hs", q[t], keys) * q.shape[-1] ** -0.5).softmax(-1)
            rows.append(torch.einsum("hs,shd->hd", weights, values))
        return torch.stack(rows)


class BranchOf(PlainAttention):
    """The prefix's keys, and those that one branch made in this round."""

    def __init__(self, prefix: PlainAttention, own: list[list[tuple[Tensor, Tensor]]]) -> None:
        super().__init__(0)
        self.prefix, self.own = prefix, own

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.own[layer].append((k, v))
        seen = [self.prefix.blocks[layer][0], *self.own[layer]]
        keys, values = (torch.cat([block[part] for block in seen]) for part in (0, 1))
        groups = q.shape[1] // keys.shape[1]
        weights = (torch.einsum("hd,shd->hs", q[0], keys.repeat_interleave(groups, dim=1)) * q.shape[-1] ** -0.5)
        return torch.einsum("hs,shd->hd", weights.softmax(-1), values.repeat_interleave(groups, dim=1))[None]
