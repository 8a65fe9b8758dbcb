"""What the native operations must compute, written plainly from their definitions. Slow, and used by tests only."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Selection:
    """A drafted tree as EAGLE hands it over: B requests, n nodes, each list of B lists."""

    topk: int
    depth: int
    nodes: int
    parent_list: torch.Tensor
    selected_index: torch.Tensor
    parents: list[list[int]]  # of every node, -1 for the root: the truth, known from drafting


def draft_selection(seed: int, *, batch: int, topk: int, depth: int, nodes: int) -> Selection:
    """Drafts trees with random probabilities: beams of topk, the best nodes - 1 candidates kept."""
    rng = random.Random(seed)
    nodes = min(nodes, 1 + topk + topk * topk * (depth - 1))
    drafted = [_draft_one(rng, topk, depth, nodes) for _ in range(batch)]
    return Selection(
        topk,
        depth,
        nodes,
        torch.tensor([one[0] for one in drafted], dtype=torch.int64).reshape(batch, -1),
        torch.tensor([one[1] for one in drafted], dtype=torch.int64).reshape(batch, nodes - 1),
        [one[2] for one in drafted],
    )


def _draft_one(rng: random.Random, topk: int, depth: int, nodes: int) -> tuple[list[int], list[int], list[int]]:
    score = [rng.uniform(0.3, 0.9) for _ in range(topk)]
    parent_of = [-1] * topk  # flat index of each candidate's parent, -1 for the root
    slots = [[-1, *range(topk)]]
    beam = list(range(topk))
    for _ in range(1, depth):
        first = len(score)
        for flat in beam:
            score += [score[flat] * rng.uniform(0.3, 0.9) for _ in range(topk)]
            parent_of += [flat] * topk
        beam = sorted(range(first, len(score)), key=lambda flat: -score[flat])[:topk]
        slots.append(beam)
    selected = sorted(sorted(range(len(score)), key=lambda flat: -score[flat])[: nodes - 1])
    parents = [-1] + [0 if parent_of[flat] < 0 else selected.index(parent_of[flat]) + 1 for flat in selected]
    return [flat for step in slots[:-1] for flat in step], selected, parents


def random_parents(rng: random.Random, nodes: int) -> list[int]:
    return [-1] + [rng.randrange(i) for i in range(1, nodes)]


def tree_mask(parents: list[int]) -> torch.Tensor:
    """bool [n, n]: node i sees itself and its ancestors."""
    mask = torch.zeros(len(parents), len(parents), dtype=torch.bool)
    for node in range(len(parents)):
        seen = node
        while seen >= 0:
            mask[node, seen] = True
            seen = parents[seen]
    return mask


def tree_outputs(parents: list[list[int]], seq_lens: list[int]) -> dict[str, torch.Tensor]:
    """positions and the three links of every tree."""
    nodes = len(parents[0])
    index, next_token, sibling, positions = [], [], [], []
    for b, parent in enumerate(parents):
        index.append([b * nodes + i for i in range(nodes)])
        children = [[i for i in range(nodes) if parent[i] == node] for node in range(nodes)]
        next_token.append([min(own, default=-1) for own in children])
        sibling.append([_next_larger(i, children[parent[i]] if i else []) for i in range(nodes)])
        depths = tree_mask(parent).sum(1) - 1
        positions += (depths + seq_lens[b]).tolist()
    return {
        "positions": torch.tensor(positions),
        "retrive_index": torch.tensor(index),
        "retrive_next_token": torch.tensor(next_token),
        "retrive_next_sibling": torch.tensor(sibling),
    }


def _next_larger(node: int, siblings: list[int]) -> int:
    return min((other for other in siblings if other > node), default=-1)


def mask_bytes(masks: list[torch.Tensor], seq_lens: list[int], mode: int) -> bytes:
    """The bytes of tree_build's mask in each of its modes."""
    out = bytearray()
    for mask, length in zip(masks, seq_lens, strict=True):
        nodes = mask.shape[0]
        for row in mask.tolist():
            if mode == 0:
                out += bytes([1] * length + [int(seen) for seen in row])
            elif mode == 1:
                out += bytes(int(seen) for seen in row)
            else:
                width = (1 if nodes <= 8 else 2 if nodes <= 16 else 4) if mode == 2 else 4 * -(-nodes // 32)
                out += sum(1 << j for j, seen in enumerate(row) if seen).to_bytes(width, "little")
    return bytes(out)


def verify_greedy(
    candidates: list[list[int]], parents: list[list[int]], target: list[list[int]], depth: int, predicts: list[int]
) -> tuple[list[int], list[list[int]], list[int]]:
    """predicts, accept_index, accept_token_num; among siblings the smallest index with the token wins."""
    nodes, predicts, all_accepted, counts = len(candidates[0]), list(predicts), [], []
    for b, tokens in enumerate(candidates):
        node, accepted = 0, [b * nodes]
        while True:
            predicts[b * nodes + node] = target[b][node]
            if len(accepted) > depth:
                break
            matches = [i for i in range(nodes) if parents[b][i] == node and tokens[i] == target[b][node]]
            if not matches:
                break
            node = matches[0]
            accepted.append(b * nodes + node)
        counts.append(len(accepted) - 1)
        all_accepted.append(accepted + [-1] * (depth + 1 - len(accepted)))
    return predicts, all_accepted, counts


def attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, seen: torch.Tensor, *, scale: float, cap: float = 0.0
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 attention. q [T, Hq, D], k [L, Hkv, D], v [L, Hkv, Dv], seen bool [T, L] -> out, log of the sum."""
    group = q.shape[1] // k.shape[1]
    k, v = k.double().repeat_interleave(group, 1), v.double().repeat_interleave(group, 1)
    scores = torch.einsum("qhd,khd->qhk", q.double(), k) * scale
    if cap > 0:
        scores = cap * torch.tanh(scores / cap)
    scores = scores.masked_fill(~seen[:, None, :], float("-inf"))
    weights = torch.nan_to_num(scores.softmax(-1))  # a query that sees nothing gets zeros
    return torch.einsum("qhk,khd->qhd", weights, v), scores.logsumexp(-1)


def last_seen(seen: torch.Tensor, window: int) -> torch.Tensor:
    """Of the keys that each row sees, only the last `window`."""
    if window <= 0:
        return seen
    from_end = seen.flip(-1).cumsum(-1).flip(-1)
    return seen & (from_end <= window)
