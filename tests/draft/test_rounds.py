"""The draft's tree against one grown plainly: nodes as records, a branch's keys in a list, one request at a time."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_attention import BranchOf, PlainAttention
from specs import MLA, SPEC, random_model
from torch import Tensor

from eyas_contract import DraftSpec
from eyas_draft.model import DraftModel
from eyas_draft.ops import TorchOps, get_ops
from eyas_draft.pool import KvPool
from eyas_draft.rounds import Drafter, Proposal, TreeShape

SPECS = {"llama": SPEC, "mla": MLA, "two layers": replace(SPEC, num_layers=2, num_heads=8, num_kv_heads=4, head_dim=12,
                                                          norm_output=True)}
VOCAB = 7 + 2 * torch.arange(SPEC.draft_vocab_size)  # target ids of the draft's


@dataclass
class Node:
    """A drafted token: the score of its path, the node that it follows (None: the last committed token)."""

    token: int
    score: float
    parent: Node | None


def plain_tree(model: DraftModel, tokens: Tensor, aux: Tensor, shape: TreeShape) -> list[Node]:
    """`tokens[i]` follows the token whose state is `aux[i]`; the picked nodes, in the order in which they were made."""
    prefix, n = PlainAttention(model.spec.num_layers), len(tokens)
    normed, hidden = model(tokens, model.fuse(aux), torch.arange(n), prefix)
    own = [[list[tuple[Tensor, Tensor]]() for _ in range(model.spec.num_layers)] for _ in range(shape.topk)]

    def best(row: Tensor, parent: Node | None) -> list[Node]:
        probs = model.lm_head(row).float().softmax(-1)
        first = probs.argsort(descending=True, stable=True)[:shape.topk]
        return [Node(int(VOCAB[i]), float(probs[i] * (parent.score if parent else 1.0)), parent) for i in first]

    front, states = best(normed[-1], None), [hidden[-1:]] * shape.topk
    made = list(front)
    for step in range(1, shape.steps):
        children: list[tuple[Node, int]] = []
        after = []
        for branch, node in enumerate(front):
            normed, state = model(torch.tensor([node.token]), states[branch], torch.tensor([n + step - 1]),
                                  BranchOf(prefix, own[branch]))
            after.append(state)
            children += [(child, branch) for child in best(normed[0], node)]
        made += [child for child, _ in children]
        kept = sorted(children, key=lambda pair: -pair[0].score)[:shape.topk]  # stable
        front, states = [child for child, _ in kept], [after[branch] for _, branch in kept]
    picked = sorted(range(len(made)), key=lambda i: -made[i].score)[:shape.num_nodes - 1]
    return [made[i] for i in sorted(picked)]


def proposals(model: DraftModel, lengths: tuple[int, ...], tokens: Tensor, aux: Tensor, shape: TreeShape) -> Proposal:
    """A round of several requests by what decoding uses."""
    spec, lens = model.spec, torch.tensor(lengths)
    pool = KvPool(get_ops("native"), num_layers=spec.num_layers, num_kv_heads=spec.num_kv_heads,
                  head_dim=spec.head_dim, value_dim=spec.value_dim, requests=len(lengths), dtype=torch.float32,
                  length=max(lengths) + shape.steps * (shape.topk + 1), device=torch.device("cpu"))
    drafter = Drafter(model, VOCAB, pool, shape)
    return drafter.propose(torch.arange(len(lengths)), lens, drafter.extend(torch.arange(len(lengths)), lens, lens,
                                                                            tokens, aux))


def parents(proposal: Proposal, lens: Tensor, shape: TreeShape) -> list[list[int]]:
    """The parent of every node by the tree's mask (0: the root), after both statements of it agreed."""
    batch, n = len(lens), shape.num_nodes
    masks = []
    for ops in (get_ops("native"), TorchOps()):
        mask, positions = torch.empty(batch * n * n, dtype=torch.bool), torch.empty(batch * n, dtype=torch.int64)
        links = [torch.empty(batch, n, dtype=torch.int64) for _ in range(3)]
        ops.tree_build(proposal.parent_list, proposal.selected_index, lens, topk=shape.topk, depth=shape.steps,
                       num_nodes=n, mask_mode=1, tree_mask=mask, positions=positions, retrive_index=links[0],
                       retrive_next_token=links[1], retrive_next_sibling=links[2])
        masks.append(mask.view(batch, n, n))
    assert torch.equal(*masks)
    return [[int(row[:i].nonzero()[-1]) for i, row in enumerate(mask) if i] for mask in masks[0]]


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
@pytest.mark.parametrize("shape", [TreeShape(1, 3, 3), TreeShape(3, 2, 6), TreeShape(4, 3, 16), TreeShape(5, 4, 8)],
                         ids=str)
def test_the_tree_is_the_plain_one(spec: DraftSpec, shape: TreeShape) -> None:
    lengths, g = (1, 6, 3), torch.Generator().manual_seed(3)
    model = random_model(spec, dtype=torch.float32)
    tokens = torch.randint(spec.target_vocab_size, (sum(lengths),), generator=g)
    aux = torch.randn(sum(lengths), 3 * spec.target_hidden_size, generator=g)
    found = proposals(model, lengths, tokens, aux, shape)
    above = parents(found, torch.tensor(lengths), shape)
    for request, (rows, states) in enumerate(zip(tokens.split(lengths), aux.split(lengths), strict=True)):
        with torch.no_grad():
            wanted = plain_tree(model, rows, states, shape)
        assert found.tokens[request].tolist() == [node.token for node in wanted]
        place = {id(node): number + 1 for number, node in enumerate(wanted)}
        assert above[request] == [0 if node.parent is None else place[id(node.parent)] for node in wanted]


@given(seed=st.integers(0, 2 ** 16), sure=st.sampled_from([1.0, 10.0, 100.0, 1e4]),
       shape=st.sampled_from([TreeShape(3, 2, 4), TreeShape(4, 3, 16), TreeShape(5, 4, 8)]))
@settings(max_examples=60, deadline=None)
def test_a_sure_drafts_tree_holds_every_nodes_parent(seed: int, sure: float, shape: TreeShape) -> None:
    """A probability of one gives a node its parent's score, one of zero gives all that follow zero."""
    model = random_model(SPEC, seed, torch.float32)
    with torch.no_grad():
        model.lm_head.weight.mul_(sure)
    g = torch.Generator().manual_seed(seed)
    found = proposals(model, (2, 5), torch.randint(50, (7,), generator=g), torch.randn(7, 96, generator=g), shape)
    parents(found, torch.tensor([2, 5]), shape)  # raises where one is missing
