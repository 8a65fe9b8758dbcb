"""The CUDA kernels against float64 on a GPU; see cuda_fuzz.py."""

from __future__ import annotations

import random

import pytest
import torch

from eyas_native import cuda

STATUS = cuda.status()
pytestmark = pytest.mark.skipif(
    STATUS != "available" or not torch.cuda.is_available(), reason=f"CUDA kernels: {STATUS}"
)


@pytest.mark.parametrize(
    "name",
    ["tree_attn_gqa", "tree_attn_mla", "hidden_gather", "tree", "tree_from_mask", "target_only", "rejection", "graph",
     "lse_combine"],
)
def test_random_cases(name: str) -> None:
    from cuda_fuzz import KERNELS

    case, share = KERNELS[name]
    for i in range(max(1, round(60 * share))):
        torch.manual_seed(i)
        assert case(random.Random(i)) is None
