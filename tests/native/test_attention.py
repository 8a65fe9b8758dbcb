"""Attention against float64, for every instruction set that runs here, dtype, head ratio, window and cap."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import references
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import DTYPES, Extend, Pool, assert_close

import eyas_native

ISAS = eyas_native.build_info()["isas"]
SHAPES = [(9, 3, 64, 64), (4, 4, 32, 32), (8, 1, 128, 96), (2, 2, 17, 5), (16, 2, 80, 80)]  # Hq, Hkv, D, Dv


def run_extend(pool: Pool, extend: Extend, q: torch.Tensor, v_dim: int, *, rows: list[int], **options: Any) -> Any:
    out = torch.full((*q.shape[:2], v_dim), float("nan")).to(q.dtype)
    lse = torch.full(q.shape[:2], float("nan"))
    eyas_native.tree_attention(
        q,
        pool.k,
        pool.v,
        out,
        pool.req_to_token,
        torch.tensor(rows),
        torch.tensor(extend.seq_lens),
        torch.tensor(extend.lengths, dtype=options.pop("index_dtype", torch.int64)),
        torch.tensor(extend.starts, dtype=torch.int32),
        lse=lse,
        **options,
    )
    return out, lse


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize(("queries", "keys", "window"), [(4, 20, 0), (3, 1, 0), (70, 33, 5)])
def test_a_step_of_a_draft_sees_the_prefix_and_a_choice_of_keys(
    isa: str, dtype: torch.dtype, queries: int, keys: int, window: int
) -> None:
    eyas_native.set_isa(isa)
    torch.manual_seed(queries)
    pool = Pool.random(keys, dtype=dtype, heads=2, dim=64, v_dim=64, longest=700, requests=2)
    q, out = torch.randn(2 * queries, 6, 64).to(dtype), torch.full((2 * queries, 6, 64), float("nan")).to(dtype)
    lens, step = torch.tensor([600, keys]), torch.full((2,), queries)  # the second request has no prefix
    chosen = torch.rand(2, queries, keys) < 0.4
    eyas_native.tree_attention(
        q, pool.k, pool.v, out, pool.req_to_token, torch.tensor([1, 0]), lens, step, torch.tensor([0, queries]),
        scale=0.125, window=window, tree_mask=chosen.flatten(), tree_keys=keys,
    )  # fmt: skip
    for b in range(2):
        prefix = torch.ones(queries, int(lens[b]) - keys, dtype=torch.bool)
        seen = references.last_seen(torch.cat([prefix, chosen[b]], 1), window)
        rows = slice(b * queries, (b + 1) * queries)
        wanted, _ = references.attend(q[rows], *pool.keys(1 - b, int(lens[b])), seen, scale=0.125)
        assert_close(out[rows], wanted, dtype)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    shape=st.sampled_from(SHAPES),
    mode=st.sampled_from(["tree", "causal", "all"]),
    window=st.sampled_from([0, 1, 5, 70, 600]),
    cap=st.sampled_from([0.0, 0.0, 3.0]),
)
def test_extend_equals_float64(
    isa: str, dtype: torch.dtype, seed: int, shape: tuple[int, int, int, int], mode: str, window: int, cap: float
) -> None:
    eyas_native.set_isa(isa)
    q_heads, kv_heads, dim, v_dim = shape
    extend = Extend.random(seed, batch=random.Random(seed).randint(1, 3), longest_prefix=700, largest_tree=90)
    pool = Pool.random(seed, dtype=dtype, heads=kv_heads, dim=dim, v_dim=v_dim, longest=800, requests=4)
    rows = random.Random(seed).sample(range(4), len(extend.lengths))
    q = torch.randn(sum(extend.lengths), q_heads, dim).to(dtype)
    options = {"scale": dim**-0.5, "logit_cap": cap, "window": window, "index_dtype": torch.int32}
    tree_mask = extend.tree_mask() if mode == "tree" else None
    out, lse = run_extend(pool, extend, q, v_dim, rows=rows, tree_mask=tree_mask, causal=mode == "causal", **options)
    for b, (start, length) in enumerate(zip(extend.starts, extend.lengths, strict=True)):
        seen = references.last_seen(extend.seen(b, tree=mode == "tree", causal=mode == "causal"), window)
        keys = pool.keys(rows[b], extend.seq_lens[b])
        wanted, wanted_lse = references.attend(q[start : start + length], *keys, seen, scale=dim**-0.5, cap=cap)
        assert_close(out[start : start + length], wanted, dtype)
        assert_close(lse[start : start + length], wanted_lse, torch.float32)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("window", [0, 100])
def test_decode_equals_float64(isa: str, dtype: torch.dtype, shape: tuple[int, int, int, int], window: int) -> None:
    eyas_native.set_isa(isa)
    q_heads, kv_heads, dim, v_dim = shape
    lens = [0, 1, 64, 1300, 513]
    pool = Pool.random(3, dtype=dtype, heads=kv_heads, dim=dim, v_dim=v_dim, longest=1300, requests=5)
    q = torch.randn(5, q_heads, dim).to(dtype)
    out = torch.full((5, q_heads, v_dim), float("nan")).to(dtype)
    tables = (pool.req_to_token, torch.tensor([4, 3, 2, 1, 0]), torch.tensor(lens))
    eyas_native.decode_attention(q, pool.k, pool.v, out, *tables, scale=0.3, window=window, logit_cap=30.0)
    for b, length in enumerate(lens):
        seen = references.last_seen(torch.ones(1, length, dtype=torch.bool), window)
        wanted, _ = references.attend(q[b : b + 1], *pool.keys(4 - b, length), seen, scale=0.3, cap=30.0)
        assert_close(out[b : b + 1], wanted, dtype)
    assert (out[0] == 0).all(), "a request without keys gets zeros"


def test_mixed_dtypes() -> None:
    pool = Pool.random(5, dtype=torch.bfloat16, heads=2, dim=64, v_dim=64, longest=100, requests=1)
    q = torch.randn(1, 4, 64)
    out = torch.empty_like(q)
    eyas_native.decode_attention(
        q, pool.k, pool.v, out, pool.req_to_token, torch.tensor([0]), torch.tensor([100]), scale=0.125
    )
    wanted, _ = references.attend(q, *pool.keys(0, 100), torch.ones(1, 100, dtype=torch.bool), scale=0.125)
    assert_close(out, wanted, torch.float32)


def test_numpy_arrays() -> None:
    pool = Pool.random(6, dtype=torch.float32, heads=2, dim=16, v_dim=16, longest=30, requests=1)
    q = np.random.default_rng(0).standard_normal((1, 2, 16), dtype=np.float32)
    out = np.empty_like(q)
    eyas_native.decode_attention(
        q, pool.k.numpy(), pool.v.numpy(), out, pool.req_to_token.numpy(), np.array([0]), np.array([30]), scale=0.25
    )
    seen = torch.ones(1, 30, dtype=torch.bool)
    wanted, _ = references.attend(torch.from_numpy(q), *pool.keys(0, 30), seen, scale=0.25)
    assert_close(torch.from_numpy(out), wanted, torch.float32)


@pytest.mark.parametrize("isa", ISAS)
def test_extreme_scores(isa: str) -> None:
    """Scores far apart: the weights of all but the largest underflow to exactly 0; NaN is not hidden."""
    eyas_native.set_isa(isa)
    k = torch.zeros(130, 1, 16)
    k[:, 0, 0] = torch.linspace(-1e4, 1e4, 130)
    v = torch.randn(130, 1, 16)
    out = torch.empty(1, 1, 16)
    tables = (torch.arange(130, dtype=torch.int32)[None], torch.tensor([0]), torch.tensor([130]))
    eyas_native.decode_attention(torch.ones(1, 1, 16), k, v, out, *tables, scale=1.0)
    assert torch.equal(out[0, 0], v[-1, 0])
    k[70, 0, 3] = float("nan")
    eyas_native.decode_attention(torch.ones(1, 1, 16), k, v, out, *tables, scale=1.0)
    assert out.isnan().all()
