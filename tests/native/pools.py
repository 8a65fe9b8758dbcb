"""Random KV pools and requests for attention's tests: scattered slots, ragged lengths, strided views."""

from __future__ import annotations

import random
from dataclasses import dataclass

import references
import torch

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Relative: rounding of the result to its dtype. Absolute: a float32 score of size s is off by about s * 2**-23, which
# changes weights by as much; scores here stay below 30 and values below 4.
TOLERANCE = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11 * 2}
SCORE_ERROR = 30 * 4 * 2.0**-23


@dataclass
class Pool:
    k: torch.Tensor
    v: torch.Tensor
    req_to_token: torch.Tensor

    @classmethod
    def random(
        cls, seed: int, *, dtype: torch.dtype, heads: int, dim: int, v_dim: int, longest: int, requests: int
    ) -> Pool:
        generator = torch.Generator().manual_seed(seed)
        slots = requests * longest + 7
        fused = torch.randn(slots, heads, dim + v_dim, generator=generator).to(dtype)
        table = torch.randperm(slots, generator=generator)[: requests * longest].view(requests, longest)
        return cls(fused[..., :dim], fused[..., dim:], table.to(torch.int32).contiguous())

    def keys(self, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        slots = self.req_to_token[row, :length].long()
        return self.k[slots], self.v[slots]


@dataclass
class Extend:
    """Requests with queries of their own: prefixes and trees."""

    prefixes: list[int]
    parents: list[list[int]]

    @classmethod
    def random(cls, seed: int, *, batch: int, longest_prefix: int, largest_tree: int) -> Extend:
        rng = random.Random(seed)
        sizes = [rng.randint(1, largest_tree) for _ in range(batch)]
        prefixes = [rng.choice([0, 1, 63, 64, 65, 511, 512, rng.randint(0, longest_prefix)]) for _ in range(batch)]
        return cls([min(p, longest_prefix) for p in prefixes], [references.random_parents(rng, n) for n in sizes])

    @property
    def lengths(self) -> list[int]:
        return [len(parents) for parents in self.parents]

    @property
    def starts(self) -> list[int]:
        return [sum(self.lengths[:b]) for b in range(len(self.lengths))]

    @property
    def seq_lens(self) -> list[int]:
        return [prefix + length for prefix, length in zip(self.prefixes, self.lengths, strict=True)]

    def masks(self) -> list[torch.Tensor]:
        return [references.tree_mask(parents) for parents in self.parents]

    def tree_mask(self) -> torch.Tensor:
        return torch.cat([mask.flatten() for mask in self.masks()])

    def seen(self, b: int, *, tree: bool, causal: bool = True) -> torch.Tensor:
        """bool [queries, keys] of request b."""
        length = self.lengths[b]
        own = torch.ones(length, length, dtype=torch.bool)
        if tree:
            own = self.masks()[b]
        elif causal:
            own = own.tril()
        return torch.cat([torch.ones(length, self.prefixes[b], dtype=torch.bool), own], dim=1)


def assert_close(found: torch.Tensor, wanted: torch.Tensor, dtype: torch.dtype) -> None:
    torch.testing.assert_close(found.double(), wanted, rtol=TOLERANCE[dtype], atol=SCORE_ERROR)
