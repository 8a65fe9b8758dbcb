"""A query's result depends on the keys it sees alone: decode, tree and prefill agree bit for bit, on any threads.

This is what makes greedy output with a draft equal to greedy output without one.
"""

from __future__ import annotations

import random

import pytest
import references
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from pools import DTYPES, Extend, Pool
from test_attention import ISAS, run_extend

import eyas_native


def decode_rows(
    pool: Pool, q: torch.Tensor, v_dim: int, lists: list[torch.Tensor], *, scale: float, window: int
) -> torch.Tensor:
    """One decode request per row of q, over its list of slots."""
    table = torch.zeros(len(lists), max(len(slots) for slots in lists), dtype=torch.int32)
    for row, slots in enumerate(lists):
        table[row, : len(slots)] = slots
    out = torch.empty(*q.shape[:2], v_dim, dtype=q.dtype)
    lens = torch.tensor([len(slots) for slots in lists])
    eyas_native.decode_attention(
        q, pool.k, pool.v, out, table, torch.arange(len(lists)), lens, scale=scale, window=window
    )
    return out


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@settings(max_examples=6, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    heads=st.sampled_from([(9, 3), (4, 4), (8, 1)]),
    dim=st.sampled_from([64, 40]),
    tree=st.booleans(),
    window=st.sampled_from([0, 3, 100]),
)
def test_extend_equals_decode_over_the_same_keys(
    isa: str, dtype: torch.dtype, seed: int, heads: tuple[int, int], dim: int, tree: bool, window: int
) -> None:
    eyas_native.set_isa(isa)
    extend = Extend.random(seed, batch=2, longest_prefix=600, largest_tree=70)
    pool = Pool.random(seed, dtype=dtype, heads=heads[1], dim=dim, v_dim=dim, longest=680, requests=2)
    q = torch.randn(sum(extend.lengths), heads[0], dim).to(dtype)
    tree_mask = extend.tree_mask() if tree else None
    out, _ = run_extend(pool, extend, q, dim, rows=[1, 0], scale=0.2, window=window, tree_mask=tree_mask)
    lists = [
        pool.req_to_token[1 - b, : extend.seq_lens[b]][row]
        for b in range(2)
        for row in extend.seen(b, tree=tree)
    ]
    assert torch.equal(out, decode_rows(pool, q, dim, lists, scale=0.2, window=window))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
@pytest.mark.parametrize("window", [0, 5, 100])
@pytest.mark.parametrize(("heads", "dim"), [((6, 2), 64), ((2, 2), 40)])
def test_an_overflowed_key_reaches_only_who_sees_it(
    isa: str, dtype: torch.dtype, tree: bool, window: int, heads: tuple[int, int], dim: int
) -> None:
    """A rejected token whose states overflowed must not spoil the accepted ones, whatever is computed beside them."""
    eyas_native.set_isa(isa)
    nodes, prefix = 70, 61  # the second block has prefix, tree and end
    chain, rng = list(range(-1, nodes - 1)), random.Random(window)
    extend = Extend([prefix], [references.random_parents(rng, nodes) if tree else chain])
    pool = Pool.random(7, dtype=dtype, heads=heads[1], dim=dim, v_dim=dim, longest=prefix + nodes, requests=1)
    q = torch.randn(nodes, heads[0], dim).to(dtype)
    options = {"rows": [0], "scale": 0.2, "window": window, "tree_mask": extend.tree_mask() if tree else None}
    keys = extend.seen(0, tree=tree)
    seen = references.last_seen(keys, window)
    lists = [pool.req_to_token[0, : prefix + nodes][row] for row in keys]
    clean, _ = run_extend(pool, extend, q, dim, **options)
    for rank, value in [(2, float("nan")), (60, float("inf")), (63, float("nan")), (100, float("-inf"))]:
        slot = int(pool.req_to_token[0, rank])
        k, v = pool.k.clone(), pool.v.clone()
        k[slot], v[slot] = value, value
        for poisoned in (Pool(pool.k, v, pool.req_to_token), Pool(k, v, pool.req_to_token)):
            out, lse = run_extend(poisoned, extend, q, dim, **options)
            blind = ~seen[:, rank]
            assert torch.equal(out[blind], clean[blind])
            assert lse[blind].isfinite().all()
            assert not out[~blind].isfinite().any()
            assert torch.equal(decode_rows(poisoned, q, dim, lists, scale=0.2, window=window)[blind], clean[blind])


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES)
def test_threads_and_batch_do_not_matter(isa: str, dtype: torch.dtype) -> None:
    eyas_native.set_isa(isa)
    lens = [random.Random(8).randint(1, 2000) for _ in range(6)] + [2000]
    pool = Pool.random(8, dtype=dtype, heads=2, dim=64, v_dim=64, longest=2000, requests=1)
    q = torch.randn(7, 6, 64).to(dtype)
    lists = [pool.req_to_token[0, :length] for length in lens]
    results = []
    for threads in (1, 2, 5):
        eyas_native.set_threads(threads)
        results.append(decode_rows(pool, q, 64, lists, scale=0.125, window=0))
        alone = [decode_rows(pool, q[i : i + 1], 64, lists[i : i + 1], scale=0.125, window=0) for i in range(7)]
        results.append(torch.cat(alone))
    assert all(torch.equal(results[0], other) for other in results[1:])


def test_threads_do_not_matter_for_trees() -> None:
    extend = Extend.random(11, batch=3, longest_prefix=1500, largest_tree=64)
    pool = Pool.random(11, dtype=torch.float32, heads=3, dim=64, v_dim=64, longest=1600, requests=3)
    q = torch.randn(sum(extend.lengths), 9, 64)
    results = []
    for threads in (1, 2, 3, 8):
        eyas_native.set_threads(threads)
        out, lse = run_extend(pool, extend, q, 64, rows=[0, 1, 2], scale=0.125, tree_mask=extend.tree_mask())
        results.append(torch.cat([out, lse[..., None]], dim=-1))
    assert all(torch.equal(results[0], other) for other in results[1:])
