"""eyas-native's CUDA tree building and greedy verification against SGLang's own operations, bit for bit, on a GPU.

    PYTHONPATH=native/python:tests/native python tests/native/cuda_against_sglang.py [CASES]

Needs `sgl_kernel` beside a GPU; prints the number of cases that agreed, and exits with 1 at the first that does not.
"""

from __future__ import annotations

import random
import sys

import sgl_kernel
import torch
from cuda_cases import DEVICE
from cuda_tree_cases import random_score_table

from eyas_native import cuda

LINKS = ("positions", "retrive_index", "retrive_next_token", "retrive_next_sibling")


def batch_of_trees(rng: random.Random) -> tuple[list, int, int, int]:
    """Score tables of one size: (tables, topk, depth, nodes)."""
    topk, depth = rng.randint(1, 8), rng.randint(1, 8)
    tables = [random_score_table(rng.choice([4, 16, 32, 64]), topk, depth, rng)]
    nodes = len(tables[0][1]) + 1
    for _ in range(rng.randint(0, 7)):
        table = random_score_table(nodes, topk, depth, rng)
        tables.append(table if len(table[1]) + 1 == nodes else tables[0])
    return tables, topk, depth, nodes


def case(rng: random.Random) -> str | None:
    """One random batch through both; None, or what differs."""
    tables, topk, depth, n = batch_of_trees(rng)
    batch = len(tables)
    lens = [rng.randint(0, 500) for _ in tables]
    as_tensor = {"device": DEVICE, "dtype": torch.int64}
    lists = (torch.tensor([t[2] for t in tables], **as_tensor).reshape(batch, -1),
             torch.tensor([t[1] for t in tables], **as_tensor), torch.tensor(lens, **as_tensor))
    mode = rng.choice([0, 1])
    size = n * n * batch + (n * sum(lens) if mode == 0 else 0)
    results = []
    for ours in (True, False):
        mask = torch.ones(size, dtype=torch.bool, device=DEVICE)
        positions = torch.empty(batch * n, **as_tensor)
        links = list(torch.full((3, batch, n), -1, **as_tensor))
        if ours:
            cuda.tree_build(*lists, topk=topk, depth=depth, num_nodes=n, mask_mode=mode, tree_mask=mask,
                            **dict(zip(LINKS, (positions, *links), strict=True)))
        else:
            sgl_kernel.build_tree_kernel_efficient(*lists, mask, positions, *links, topk, depth, n, mode)
        results.append((mask, positions, *links))
    for name, a, b in zip(("tree_mask", *LINKS), *results, strict=True):
        if not torch.equal(a, b):
            return f"{name} differs: {batch} trees of {n} nodes, topk {topk}, depth {depth}, mode {mode}"
    return verify(rng, results[0][2:], batch, n, depth)


def verify(rng: random.Random, links: tuple, batch: int, n: int, depth: int) -> str | None:
    """Greedy verification of these trees with few distinct tokens, so that long paths are accepted."""
    tokens = torch.randint(0, rng.choice([2, 3, 10]), (2, batch, n), device=DEVICE)
    results = []
    for call in (cuda.verify_greedy, sgl_kernel.verify_tree_greedy):
        out = {"predicts": torch.zeros(batch * n, dtype=torch.int32, device=DEVICE),
               "accept_index": torch.full((batch, depth + 1), -1, dtype=torch.int32, device=DEVICE),
               "accept_token_num": torch.zeros(batch, dtype=torch.int32, device=DEVICE)}
        call(**out, candidates=tokens[0], retrive_index=links[0], retrive_next_token=links[1],
             retrive_next_sibling=links[2], target_predict=tokens[1])
        results.append(out)
    differing = [name for name in results[0] if not torch.equal(results[0][name], results[1][name])]
    return f"{', '.join(differing)} differ: {batch} trees of {n} nodes" if differing else None


def main() -> None:
    """Run the cases."""
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 500
    for i in range(count):
        torch.manual_seed(i)
        fault = case(random.Random(i))
        if fault:
            raise SystemExit(f"case {i}: {fault}")
    print(f"{count} cases of tree_build and verify_greedy equal SGLang's, bit for bit")


if __name__ == "__main__":
    main()
