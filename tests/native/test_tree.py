"""tree_build, tree_from_mask and tree_validate against the references, bit for bit."""

from __future__ import annotations

import random

import pytest
import references
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import eyas_native

GARBAGE = 77


def outputs(batch: int, nodes: int) -> dict[str, torch.Tensor]:
    return {
        "positions": torch.full((batch * nodes,), GARBAGE),
        "retrive_index": torch.full((batch, nodes), GARBAGE),
        "retrive_next_token": torch.full((batch, nodes), GARBAGE),
        "retrive_next_sibling": torch.full((batch, nodes), GARBAGE),
    }


def assert_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), f"{name}: {found[name]} against {tensor}"


@settings(max_examples=150, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 4),
    topk=st.integers(1, 8),
    depth=st.integers(1, 5),
    nodes=st.integers(1, 70),
    mode=st.sampled_from([0, 1, 2, 3]),
)
def test_build_equals_reference(seed: int, batch: int, topk: int, depth: int, nodes: int, mode: int) -> None:
    drafted = references.draft_selection(seed, batch=batch, topk=topk, depth=depth, nodes=nodes)
    if mode == 2 and drafted.nodes > 32:
        mode = 3
    lens = [random.Random(seed).randrange(0, 90) for _ in range(batch)]
    wanted_mask = references.mask_bytes([references.tree_mask(parent) for parent in drafted.parents], lens, mode)
    mask = torch.full((len(wanted_mask) + 3,), GARBAGE, dtype=torch.uint8)
    found = outputs(batch, drafted.nodes)
    eyas_native.tree_build(
        drafted.parent_list,
        drafted.selected_index,
        torch.tensor(lens),
        topk=topk,
        depth=depth,
        num_nodes=drafted.nodes,
        mask_mode=mode,
        tree_mask=mask,
        **found,
    )
    assert bytes(mask[:-3].tolist()) == wanted_mask
    assert mask[-3:].tolist() == [GARBAGE] * 3, "written beyond the mask's end"
    assert_equal(found, references.tree_outputs(drafted.parents, lens))


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), batch=st.integers(1, 3), nodes=st.integers(1, 80))
def test_from_mask_equals_reference(seed: int, batch: int, nodes: int) -> None:
    rng = random.Random(seed)
    parents = [references.random_parents(rng, nodes) for _ in range(batch)]
    lens = [rng.randrange(1000) for _ in range(batch)]
    masks = torch.stack([references.tree_mask(parent) for parent in parents])
    found = outputs(batch, nodes)
    eyas_native.tree_from_mask(masks, torch.tensor(lens), **found)
    assert_equal(found, references.tree_outputs(parents, lens))
    assert eyas_native.tree_validate(masks) == ()


def test_trees_without_nodes_have_no_faults() -> None:
    for shape in ((0, 3, 3), (2, 0, 0)):
        assert eyas_native.tree_validate(torch.zeros(shape, dtype=torch.bool)) == ()


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), nodes=st.integers(2, 20))
def test_validate_finds_every_flipped_bit(seed: int, nodes: int) -> None:
    rng = random.Random(seed)
    mask = references.tree_mask(references.random_parents(rng, nodes))
    row, column = rng.randrange(nodes), rng.randrange(nodes)
    mask[row, column] = ~mask[row, column]
    proper = is_of_a_tree(mask)
    faults = eyas_native.tree_validate(mask[None])
    assert bool(faults) != proper
    assert all(fault.request == 0 and 0 <= fault.node < nodes for fault in faults)


def is_of_a_tree(mask: torch.Tensor) -> bool:
    earlier = [[j for j in range(i) if mask[i, j]] for i in range(mask.shape[0])]
    if not all(earlier[1:]):
        return False
    return torch.equal(mask, references.tree_mask([-1] + [max(seen) for seen in earlier[1:]]))


def test_validate_names_the_problem() -> None:
    masks = references.tree_mask([-1, 0, 1]).repeat(4, 1, 1)
    masks[0, 2, 2] = False
    masks[1, 1, 2] = True
    masks[2, 1, 0] = False
    masks[3, 2, 0] = False
    problems = {(fault.request, fault.node): fault.problem for fault in eyas_native.tree_validate(masks)}
    assert problems[0, 2] == "does not see itself"
    assert problems[1, 1] == "sees a later node"
    assert problems[2, 1] == "sees no earlier node"
    assert problems[3, 2] == "sees other nodes than its parent"


def build_with(
    selected: list[int], parents: list[int], *, seq_len: int = 5, **changed: object
) -> dict[str, torch.Tensor]:
    found = outputs(1, len(selected) + 1)
    arguments: dict[str, object] = {
        "topk": 2,
        "depth": 3,
        "num_nodes": len(selected) + 1,
        "mask_mode": 1,
        "tree_mask": torch.zeros((len(selected) + 1) ** 2, dtype=torch.bool),
        **found,
        **changed,
    }
    eyas_native.tree_build(torch.tensor([parents]), torch.tensor([selected]), torch.tensor([seq_len]), **arguments)  # type: ignore[arg-type]
    return found


@pytest.mark.parametrize(
    ("selected", "parents", "named"),
    [
        ([0, 3], [-1, 1, 0, 2, 3], "orphan"),  # node 2's parent is candidate 1, which was not selected
        ([0, 40], [-1, 0, 1, 2, 3], "parent slot is 20"),  # beyond parent_list: NaN scores do this
        ([0, -3], [-1, 0, 1, 2, 3], "selected_index"),
        ([2, 3], [-1, 3, 0, 2, 3], "orphan"),  # a node that is its own parent
    ],
)
def test_bad_trees_are_reported_and_nothing_is_written(selected: list[int], parents: list[int], named: str) -> None:
    found = outputs(1, 3)
    with pytest.raises(eyas_native.ArgumentError, match=named):
        build_with(selected, parents, **found)
    assert all((tensor == GARBAGE).all() for tensor in found.values())


@pytest.mark.parametrize("seq_len", [2**62, 2**62 + 1, 2**63 - 1, 5])  # four rows of 2**62 are 0 in 64 bits
def test_a_length_that_the_mask_cannot_hold_is_refused(seq_len: int) -> None:
    mask = torch.full((4 * 4 + 3,), GARBAGE, dtype=torch.uint8)
    with pytest.raises(eyas_native.ArgumentError) as raised:
        build_with([0, 1, 2], [-1, 0, 1, 2, 3], seq_len=seq_len, mask_mode=0, tree_mask=mask)
    assert raised.value.where == "seq_lens"
    assert (mask == GARBAGE).all()


def test_orphan_in_mask_is_reported() -> None:
    mask = references.tree_mask([-1, 0, 1])[None].clone()
    mask[0, 2, :2] = False
    with pytest.raises(eyas_native.ArgumentError, match="node 2 sees no earlier node"):
        eyas_native.tree_from_mask(mask, torch.tensor([1]), **outputs(1, 3))


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"mask_mode": 7}, "mask_mode"),
        ({"topk": 0}, "topk"),
        ({"num_nodes": 0}, "num_nodes"),
        ({"num_nodes": 4}, "selected_index"),
        ({"tree_mask": torch.zeros(8, dtype=torch.bool)}, "tree_mask"),
        ({"tree_mask": torch.zeros(9, dtype=torch.float32)}, "tree_mask"),
        ({"positions": torch.zeros(2, dtype=torch.int64)}, "positions"),
        ({"positions": torch.zeros(3, dtype=torch.int32)}, "positions"),
        ({"retrive_index": torch.zeros(3, dtype=torch.int64)}, "retrive_index"),
        ({"retrive_next_token": torch.zeros(1, 6, dtype=torch.int64)[:, ::2]}, "retrive_next_token"),
        ({"retrive_next_sibling": [1, 2, 3]}, "retrive_next_sibling"),
    ],
)
def test_bad_arguments_are_named(changed: dict[str, object], named: str) -> None:
    with pytest.raises(eyas_native.ArgumentError) as raised:
        build_with([0, 1], [-1, 0, 1, 2, 3], **changed)
    assert named in raised.value.where


def test_bits_stop_at_32_nodes_and_words_do_not() -> None:
    drafted = references.draft_selection(1, batch=1, topk=8, depth=4, nodes=33)
    arguments = {"topk": 8, "depth": 4, "num_nodes": 33, "tree_mask": torch.zeros(33 * 8, dtype=torch.uint8)}
    with pytest.raises(eyas_native.ArgumentError, match="use mode 3"):
        eyas_native.tree_build(
            drafted.parent_list, drafted.selected_index, torch.tensor([0]), mask_mode=2, **arguments, **outputs(1, 33)
        )
    eyas_native.tree_build(
        drafted.parent_list, drafted.selected_index, torch.tensor([0]), mask_mode=3, **arguments, **outputs(1, 33)
    )
