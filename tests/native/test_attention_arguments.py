"""Attention refuses what it cannot do, names the argument, writes nothing and never crashes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import eyas_native

T = torch.tensor


def arguments() -> dict[str, Any]:
    """Two requests of 3 and 2 queries after 4 and 0 keys."""
    return {
        "q": torch.randn(5, 4, 16),
        "k_buffer": torch.randn(20, 2, 16),
        "v_buffer": torch.randn(20, 2, 8),
        "out": torch.full((5, 4, 8), 77.0),
        "req_to_token": torch.arange(20, dtype=torch.int32).view(2, 10),
        "req_pool_indices": T([1, 0]),
        "seq_lens": T([7, 2]),
        "extend_lens": T([3, 2]),
        "extend_start": T([0, 3]),
        "scale": 0.25,
        "tree_mask": torch.ones(13, dtype=torch.bool),
    }


TABLE = torch.arange(20, dtype=torch.int32).view(2, 10)
BAD: list[tuple[str, Any]] = [
    ("q", torch.randn(5, 3, 16)),  # heads of no multiple
    ("q", torch.randn(5, 4, 12)),
    ("q", torch.randn(5, 64)),
    ("q", torch.randn(5, 4, 16).double()),
    ("q", torch.randn(5, 4, 16).bfloat16()),  # not out's dtype
    ("q", torch.randn(5, 4, 32)[..., ::2]),
    ("q", None),
    ("q", torch.randn(5, 4, 16, device="meta")),
    ("k_buffer", torch.randn(20, 1, 16)),
    ("k_buffer", torch.randn(20, 2, 16).half()),
    ("v_buffer", torch.randn(19, 2, 8)),
    ("out", torch.zeros(5, 4, 9)),
    ("out", torch.zeros(4, 4, 8)),
    ("req_to_token", TABLE.long()),
    ("req_to_token", TABLE[:, :6]),  # seq_lens beyond its columns
    ("req_to_token", TABLE - 1),
    ("req_to_token", TABLE + 14),
    ("req_pool_indices", T([2, 0])),
    ("req_pool_indices", T([-1, 0])),
    ("req_pool_indices", T([1])),
    ("seq_lens", T([11, 2])),
    ("seq_lens", T([-1, 2])),
    ("seq_lens", T([7, 2], dtype=torch.int32)),
    ("extend_lens", T([8, 2])),
    ("extend_lens", T([-1, 2])),
    ("extend_lens", T([3.0, 2.0])),
    ("extend_start", T([0, 4])),
    ("extend_start", T([-1, 3])),
    ("extend_start", T([2**62, 3])),
    ("tree_mask", torch.ones(12, dtype=torch.bool)),
    ("tree_mask", torch.ones(13)),
    ("tree_keys", -1),
    ("tree_keys", 3),  # more than the second request's keys
    ("scale", float("nan")),
    ("logit_cap", -1.0),
    ("window", -1),
    ("lse", torch.zeros(5, 3)),
]


@pytest.mark.parametrize(("name", "value"), BAD, ids=[f"{name}-{i}" for i, (name, _) in enumerate(BAD)])
def test_bad_argument_is_named(name: str, value: Any) -> None:
    good = arguments()
    eyas_native.tree_attention(**good)
    assert not (good["out"] == 77.0).any()
    bad = {**arguments(), name: value}
    with pytest.raises(eyas_native.ArgumentError) as raised:
        eyas_native.tree_attention(**bad)
    named = {"req_to_token": "req_to_token seq_lens", "seq_lens": "seq_lens extend_lens"}.get(name, name)
    assert any(one in str(raised.value) for one in named.split())
    assert name == "out" or (bad["out"] == 77.0).all(), "written although refused"


@pytest.mark.parametrize(
    ("mask", "named"), [(None, "tree_keys"), (torch.ones(9, dtype=torch.bool), "tree_mask")], ids=["missing", "short"]
)
def test_tree_keys_need_their_mask(mask: torch.Tensor | None, named: str) -> None:
    eyas_native.tree_attention(**{**arguments(), "tree_mask": torch.ones(10, dtype=torch.bool), "tree_keys": 2})
    with pytest.raises(eyas_native.ArgumentError) as raised:
        eyas_native.tree_attention(**{**arguments(), "tree_mask": mask, "tree_keys": 2})
    assert raised.value.where == named


def test_a_mask_beyond_64_bits_is_refused() -> None:
    """2**42 queries by 2**22 keys: 0 entries, in 64 bits. One row of memory stands for all queries."""
    queries, keys = 2**42, 2**22
    q = torch.zeros(1, 1, 16).expand(queries, 1, 16)
    with pytest.raises(eyas_native.ArgumentError, match=f"{queries} times {keys}") as raised:
        eyas_native.tree_attention(
            q, torch.zeros(1, 1, 16), torch.zeros(1, 1, 16), q, torch.zeros(1, keys, dtype=torch.int32), T([0]),
            T([keys]), T([queries]), T([0]), scale=1.0, tree_mask=torch.ones(8, dtype=torch.bool), tree_keys=keys,
        )  # fmt: skip
    assert raised.value.where == "tree_mask"


def test_all_mismatches_at_once() -> None:
    bad = {**arguments(), "out": torch.zeros(5, 4, 9), "seq_lens": T([1]), "extend_start": T([0.0, 1.0])}
    with pytest.raises(eyas_native.ArgumentError) as raised:
        eyas_native.tree_attention(**bad)
    assert {"out", "extend_start"} <= set(raised.value.where.split(", "))


def test_error_survives_pickle_and_holds_four_facts() -> None:
    import pickle

    with pytest.raises(eyas_native.ArgumentError) as raised:
        eyas_native.tree_attention(**{**arguments(), "req_pool_indices": T([2, 0])})
    error = pickle.loads(pickle.dumps(raised.value))
    assert isinstance(error, ValueError)
    assert (error.where, error.found) == ("req_pool_indices", "2 for request 0")
    assert "rows of req_to_token" in error.wanted
    assert error.remedy in str(error)


def test_nothing_to_do() -> None:
    empty = arguments() | {"req_pool_indices": T([], dtype=torch.int64), "seq_lens": T([], dtype=torch.int64)}
    empty |= {"extend_lens": empty["seq_lens"], "extend_start": empty["seq_lens"], "tree_mask": None}
    eyas_native.tree_attention(**empty)
    assert (empty["out"] == 77.0).all()
