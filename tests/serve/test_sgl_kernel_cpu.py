"""Trees that SGLang selects on a CPU, where a draft is all but sure."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas_native import ArgumentError
from eyas_serve.engine.sgl_kernel_cpu import build_tree_kernel_efficient_cpu, without_orphans

STEPS, TOPK = 3, 2


def build(parents: torch.Tensor, selected: torch.Tensor) -> dict[str, torch.Tensor]:
    batch, nodes = selected.shape[0], selected.shape[1] + 1
    lens = torch.full((batch,), 7)
    written = {"mask": torch.zeros(batch * nodes * nodes, dtype=torch.bool),
               "positions": torch.zeros(batch * nodes, dtype=torch.int64),
               **{name: torch.full((batch, nodes), -1) for name in ("index", "child", "sibling")}}
    build_tree_kernel_efficient_cpu(parents, selected, lens, *written.values(), TOPK, STEPS, nodes, 1)
    return written


def grown(seed: int, sure: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Parents and selection as SGLang's `organize_draft_results` takes them from a random draft's scores."""
    torch.manual_seed(seed)
    scores, parents = torch.softmax(sure * torch.randn(2, 1, TOPK), -1), [torch.tensor([[-1, 0, 1]]).repeat(2, 1)]
    chosen, every = scores[:, 0], [scores.flatten(1)]
    for step in range(1, STEPS):
        expanded = chosen[:, :, None] * torch.softmax(sure * torch.randn(2, TOPK, TOPK), -1)
        every.append(expanded.flatten(1))
        chosen, at = expanded.flatten(1).topk(TOPK)
        parents.append(at + TOPK * TOPK * (step - 1) + TOPK)
    selected = torch.cat(every, 1).topk(5).indices.sort().values
    return torch.cat(parents[:-1], 1), selected


@given(st.integers(0, 10_000), st.sampled_from((1.0, 100.0, 1000.0)))
def test_every_node_is_reached_from_the_root_however_sure_the_draft_is(seed: int, sure: float) -> None:
    written = build(*grown(seed, sure))
    for child, sibling, depths in zip(written["child"].tolist(), written["sibling"].tolist(),
                                      written["positions"].view(2, -1).tolist(), strict=True):
        reached, waiting = set[int](), [(0, 7)]
        while waiting:
            node, depth = waiting.pop()
            if node >= 0 and node not in reached:
                reached.add(node)
                assert depths[node] == depth
                waiting += [(child[node], depth + 1), (sibling[node], depth)]
        assert reached == set(range(6))


def test_an_orphan_and_its_child_hang_from_the_root() -> None:
    """Entry 2 comes from the first step's token 0, which was not selected; entry 6 from entry 2."""
    parents, selected = torch.tensor([[-1, 0, 1, 2, 5]]), torch.tensor([[1, 2, 4, 6]])
    assert without_orphans(parents, selected, TOPK).tolist() == [[1, 0, 4, 0]]
    assert build(parents, selected)["positions"].tolist() == [7, 8, 8, 9, 8]
    whole = torch.tensor([[0, 1, 2, 6]])
    assert without_orphans(parents, whole, TOPK) is not whole
    assert without_orphans(parents, whole, TOPK).tolist() == whole.tolist()
    with pytest.raises(ArgumentError):  # of one step, and no tree of that many nodes
        build(torch.zeros(1, 0, dtype=torch.int64), torch.tensor([[0, 9]]))
    with pytest.raises(ArgumentError, match="parent slot"):
        build(parents, torch.tensor([[0, 1, 2, 99]]))
