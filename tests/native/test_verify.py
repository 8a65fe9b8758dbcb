"""verify_greedy and accept_commit against references, bit for bit, and what they do with links that lead nowhere."""

from __future__ import annotations

import random

import pytest
import references
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import eyas_native


@settings(max_examples=200, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    batch=st.integers(1, 4),
    nodes=st.integers(1, 40),
    depth=st.integers(0, 8),
    vocab=st.integers(1, 4),
)
def test_equals_reference(seed: int, batch: int, nodes: int, depth: int, vocab: int) -> None:
    rng = random.Random(seed)
    parents = [references.random_parents(rng, nodes) for _ in range(batch)]
    candidates, target = ([[rng.randrange(vocab) for _ in range(nodes)] for _ in range(batch)] for _ in range(2))
    links = references.tree_outputs(parents, [0] * batch)
    links.pop("positions")
    predicts = torch.full((batch * nodes,), -5, dtype=torch.int32)
    accept_index = torch.full((batch, depth + 1), 9, dtype=torch.int32)
    accept_num = torch.full((batch,), 9, dtype=torch.int32)
    eyas_native.verify_greedy(
        predicts, accept_index, accept_num, torch.tensor(candidates), *links.values(), torch.tensor(target)
    )
    wanted = references.verify_greedy(candidates, parents, target, depth, [-5] * (batch * nodes))
    assert (predicts.tolist(), accept_index.tolist(), accept_num.tolist()) == wanted


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 2**32), batch=st.integers(0, 4), nodes=st.integers(1, 30), depth=st.integers(0, 8))
def test_accept_commit_leads_to_the_path_laid_out_in_order(seed: int, batch: int, nodes: int, depth: int) -> None:
    rng = random.Random(seed)
    columns = depth + 1
    counts = [rng.randrange(min(columns, nodes)) for _ in range(batch)]
    paths = [[0, *sorted(rng.sample(range(1, nodes), count))] for count in counts]
    padded = [[b * nodes + i for i in path] + [-1] * (columns - len(path)) for b, path in enumerate(paths)]
    predicts = [rng.randrange(1000) for _ in range(batch * nodes)]
    slots = rng.sample(range(500), batch * nodes)
    found = commit(predicts, padded, counts, slots, columns)
    assert found["accept_lens"] == [count + 1 for count in counts]
    assert found["rows"] == padded
    for name, values in (("tokens", predicts), ("src_loc", slots)):
        assert found[name] == [[values[node] if node >= 0 else -1 for node in row] for row in padded]
    assert found["tgt_loc"] == [slots[b * nodes:b * nodes + len(path)] + [-1] * (columns - len(path))
                                for b, path in enumerate(paths)]
    assert found["bonus"] == [predicts[row[count]] for row, count in zip(padded, counts, strict=True)]


def commit(predicts: list[int], accepted: list[list[int]], counts: list[int], slots: list[int],
           columns: int) -> dict[str, list[object]]:
    """What accept_commit writes into arrays that hold something else."""
    batch = len(counts)
    out = {name: torch.full((batch, columns), 77) for name in ("tokens", "src_loc", "tgt_loc", "rows")}
    out |= {"accept_lens": torch.full((batch,), 77, dtype=torch.int32), "bonus": torch.full((batch,), 77)}
    eyas_native.accept_commit(
        torch.tensor(predicts, dtype=torch.int32), torch.tensor(accepted, dtype=torch.int32).reshape(batch, columns),
        torch.tensor(counts, dtype=torch.int32), torch.tensor(slots, dtype=torch.int64), **out)
    return {name: value.tolist() for name, value in out.items()}


@pytest.mark.parametrize(("name", "accepted", "counts", "slots"), [
    ("accept_token_num", [[0, 1]], [2], [5, 6, 7]), ("accept_token_num", [[0, 1]], [-1], [5, 6, 7]),
    ("accept_index", [[0, 3]], [1], [5, 6, 7]), ("accept_index", [[-1, 1]], [1], [5, 6, 7]),
    ("out_cache_loc", [[0, 1]], [1], [5, 6]), ("predicts", [[0, 1], [3, -1]], [1, 0], [5, 6, 7])])
def test_accept_commit_refuses(name: str, accepted: list[list[int]], counts: list[int], slots: list[int]) -> None:
    with pytest.raises(eyas_native.ArgumentError, match=name):
        commit([1, 2, 3], accepted, counts, slots, 2)


def call(**changed: torch.Tensor) -> None:
    arguments = {
        "predicts": torch.zeros(3, dtype=torch.int32),
        "accept_index": torch.zeros(1, 3, dtype=torch.int32),
        "accept_token_num": torch.zeros(1, dtype=torch.int32),
        "candidates": torch.tensor([[1, 2, 3]]),
        "retrive_index": torch.tensor([[0, 1, 2]]),
        "retrive_next_token": torch.tensor([[1, -1, -1]]),
        "retrive_next_sibling": torch.tensor([[-1, 2, -1]]),
        "target_predict": torch.tensor([[9, 9, 9]]),
    }
    eyas_native.verify_greedy(**{**arguments, **changed})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("retrive_index", torch.tensor([[3, 1, 2]])),
        ("retrive_index", torch.tensor([[-1, 1, 2]])),
        ("retrive_next_token", torch.tensor([[3, -1, -1]])),
        ("retrive_next_token", torch.tensor([[-2, -1, -1]])),
        ("retrive_next_sibling", torch.tensor([[-1, 2, 1]])),  # a circle of siblings
        ("retrive_next_sibling", torch.tensor([[-1, 99, -1]])),
        ("predicts", torch.zeros(2, dtype=torch.int32)),
        ("predicts", torch.zeros(3, dtype=torch.int64)),
        ("accept_index", torch.zeros(2, 3, dtype=torch.int32)),
        ("accept_index", torch.zeros(1, 0, dtype=torch.int32)),
        ("accept_token_num", torch.zeros(2, dtype=torch.int32)),
        ("target_predict", torch.tensor([[9, 9]])),
        ("candidates", torch.tensor([1, 2, 3])),
    ],
)
def test_bad_arguments_are_named(name: str, value: torch.Tensor) -> None:
    call()
    with pytest.raises(eyas_native.ArgumentError) as raised:
        call(**{name: value})
    assert name in str(raised.value)


def test_circle_of_parents_ends_at_the_depth() -> None:
    accepted = torch.zeros(1, 3, dtype=torch.int32)
    call(
        candidates=torch.tensor([[9, 9, 9]]),
        retrive_next_token=torch.tensor([[1, 0, -1]]),
        accept_index=accepted,
    )
    assert accepted.tolist() == [[0, 1, 0]]
