"""Sampled verification: the rules step by step against a plain float64 reference, and the law of what comes out."""

from __future__ import annotations

import math
import random

import pytest
import references
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import eyas_native

VOCAB = 5


def distributions(generator: torch.Generator, *shape: int) -> torch.Tensor:
    """f32 [*shape, VOCAB], some entries zero."""
    values = torch.rand(*shape, VOCAB, generator=generator)
    values = torch.where(torch.rand(values.shape, generator=generator) < 0.2, 0.0, values)
    values[..., 0] += 0.05
    return values / values.sum(-1, keepdim=True)


def draw(weights: list[float], coin: float) -> int:
    running, last = 0.0, 0
    for token, weight in enumerate(weights):
        if weight > 0:
            last, running = token, running + weight
            if running > coin * sum(weights):
                return token
    return last


def refused(p: list[float], q: list[float], token: int, replacement: bool) -> tuple[list[float], list[float]]:
    left = [max(a - b, 0.0) for a, b in zip(p, q, strict=True)]
    p = [value / sum(left) for value in left] if sum(left) > 0 else p
    if not replacement:
        q = [0.0 if i == token else value for i, value in enumerate(q)]
        q = [value / sum(q) for value in q] if sum(q) > 0 else q
    return p, q


def reference(parents: list[int], tokens: list[int], coins: list[float], last_coin: float, target: torch.Tensor,
              draft: torch.Tensor | None, columns: int, replacement: bool) -> tuple[dict[int, int], list[int]]:
    """({node: its token}, accepted nodes) of one request."""
    node, path, said = 0, [0], {}
    while True:
        p = target[node].double().tolist()
        q = [] if draft is None else draft[node].double().tolist()
        children = [i for i, parent in enumerate(parents) if parent == node and len(path) < columns]
        accepted, total = None, 0.0
        for child in children:
            x = tokens[child]
            if draft is None:
                total += p[x]
                good = coins[node] <= total or p[x] >= 1.0
            else:
                good = coins[child] * q[x] < p[x]
            if good:
                accepted = child
                break
            if draft is not None:
                p, q = refused(p, q, x, replacement)
        if accepted is None:
            if draft is None:
                for child in children:
                    p[tokens[child]] = 0.0
            said[node] = draw(p, last_coin)
            return said, path
        said[node] = tokens[accepted]
        path.append(accepted)
        node = accepted


@settings(max_examples=150, deadline=None)
@given(seed=st.integers(0, 2**32), nodes=st.integers(1, 12), columns=st.integers(1, 6),
       rule=st.sampled_from(["target_only", "with", "without"]))
def test_equals_reference(seed: int, nodes: int, columns: int, rule: str) -> None:
    rng, generator, batch = random.Random(seed), torch.Generator().manual_seed(seed), 3
    parents = [references.random_parents(rng, nodes) for _ in range(batch)]
    links = references.tree_outputs(parents, [0] * batch)
    links.pop("positions")
    tokens = torch.randint(0, VOCAB, (batch, nodes), generator=generator)
    coins = torch.rand(batch, nodes, generator=generator)
    last = torch.rand(batch, generator=generator)
    target, draft = distributions(generator, batch, nodes), distributions(generator, batch, nodes)
    predicts = torch.full((batch * nodes,), -5, dtype=torch.int32)
    accept_index = torch.full((batch, columns), 9, dtype=torch.int32)
    accept_num = torch.full((batch,), 9, dtype=torch.int32)
    common = (predicts, accept_index, accept_num, tokens, *links.values(), coins, last, target)
    if rule == "target_only":
        eyas_native.verify_target_only(*common)
    else:
        eyas_native.verify_rejection(*common, draft, replacement=rule == "with")
    for b in range(batch):
        said, path = reference(parents[b], tokens[b].tolist(), coins[b].tolist(), last[b].item(), target[b],
                               None if rule == "target_only" else draft[b], columns, rule == "with")
        assert accept_index[b].tolist() == [b * nodes + i for i in path] + [-1] * (columns - len(path))
        assert accept_num[b].item() == len(path) - 1
        wanted = [said.get(i, -5) for i in range(nodes)]
        assert predicts[b * nodes:(b + 1) * nodes].tolist() == wanted


@pytest.mark.parametrize("replacement", [True, False])
def test_rejection_keeps_the_targets_distribution(replacement: bool) -> None:
    generator, batch, nodes = torch.Generator().manual_seed(7), 40000, 4
    target = distributions(generator, 1, nodes).repeat(batch, 1, 1)
    draft = distributions(generator, 1, nodes).repeat(batch, 1, 1)
    draft[:, 0] = torch.tensor([0.1, 0.3, 0.2, 0.25, 0.15])
    children = torch.multinomial(draft[:, 0], 3, replacement=replacement, generator=generator)
    tokens = torch.cat([torch.zeros(batch, 1, dtype=torch.int64), children], 1)
    predicts = torch.full((batch * nodes,), -1, dtype=torch.int32)
    eyas_native.verify_rejection(
        predicts, torch.empty(batch, 2, dtype=torch.int32), torch.empty(batch, dtype=torch.int32), tokens,
        torch.arange(batch * nodes).view(batch, nodes), torch.tensor([1, -1, -1, -1]).repeat(batch, 1),
        torch.tensor([-1, 2, 3, -1]).repeat(batch, 1), torch.rand(batch, nodes, generator=generator),
        torch.rand(batch, generator=generator), target, draft, replacement=replacement)
    seen = torch.bincount(predicts.view(batch, nodes)[:, 0].long(), minlength=VOCAB).double()
    wanted = target[0, 0].double() * batch
    assert seen[wanted == 0].sum() == 0
    used = wanted > 0
    chi = ((seen - wanted)[used].square() / wanted[used]).sum().item()
    freedom = int(used.sum()) - 1
    assert chi < freedom + 6 * math.sqrt(2 * freedom), f"chi-square {chi:.1f} for {freedom} degrees of freedom"


@pytest.mark.parametrize(("name", "value"), [
    ("uniform", torch.zeros(1, 2)),
    ("uniform_final", torch.zeros(1, dtype=torch.float64)),
    ("target_probs", torch.zeros(1, 3, VOCAB, dtype=torch.bfloat16)),
    ("draft_probs", torch.zeros(1, 3, VOCAB + 1)),
    ("candidates", torch.tensor([[0, VOCAB, 1]])),
    ("retrive_next_token", torch.tensor([[3, -1, -1]])),
])
def test_bad_arguments_are_named(name: str, value: torch.Tensor) -> None:
    arguments = {
        "predicts": torch.zeros(3, dtype=torch.int32), "accept_index": torch.zeros(1, 3, dtype=torch.int32),
        "accept_token_num": torch.zeros(1, dtype=torch.int32), "candidates": torch.tensor([[0, 1, 2]]),
        "retrive_index": torch.tensor([[0, 1, 2]]), "retrive_next_token": torch.tensor([[1, -1, -1]]),
        "retrive_next_sibling": torch.tensor([[-1, 2, -1]]), "uniform": torch.full((1, 3), 0.5),
        "uniform_final": torch.full((1,), 0.5), "target_probs": torch.full((1, 3, VOCAB), 1 / VOCAB),
        "draft_probs": torch.full((1, 3, VOCAB), 1 / VOCAB)}
    eyas_native.verify_rejection(**arguments)
    with pytest.raises(eyas_native.ArgumentError) as raised:
        eyas_native.verify_rejection(**{**arguments, name: value})
    assert name in str(raised.value)
