"""The operations registered with torch.library: schema, fakes, torch.compile's view of them."""

from __future__ import annotations

import subprocess
import sys

import pytest
import references
import torch
from pools import Extend, Pool

from eyas_native import torch_ops


def attention_arguments() -> tuple[torch.Tensor, ...]:
    pool = Pool.random(1, dtype=torch.float32, heads=2, dim=16, v_dim=16, longest=40, requests=2)
    q = torch.randn(2, 4, 16)
    table = (pool.req_to_token, torch.tensor([0, 1]), torch.tensor([10, 40]))
    return (q, pool.k.contiguous(), pool.v.contiguous(), torch.zeros(2, 4, 16), *table)


def links(nodes: int) -> tuple[torch.Tensor, ...]:
    return (torch.zeros(nodes, dtype=torch.int64), *(torch.zeros(1, nodes, dtype=torch.int64) for _ in range(3)))


def samples() -> dict[str, tuple[object, ...]]:
    drafted = references.draft_selection(3, batch=1, topk=2, depth=3, nodes=6)
    selection = (drafted.parent_list, drafted.selected_index, torch.tensor([4]))
    mask = references.tree_mask(drafted.parents[0])[None]
    tree = references.tree_outputs(drafted.parents, [0])
    walk = [tree[name] for name in ("retrive_index", "retrive_next_token", "retrive_next_sibling")]
    accepted = [torch.zeros(shape, dtype=torch.int32) for shape in ((6,), (1, 4), (1,))]
    tokens = torch.randint(0, 3, (1, 6))
    pool = [torch.randn(8, 2, 4) for _ in range(2)]
    moves = (torch.tensor([0, 1]), torch.tensor([2, 0]))
    extend = Extend([8, 39], [[-1], [-1]])
    extends = (torch.tensor(extend.lengths), torch.tensor(extend.starts))
    return {
        "tree_build": (*selection, 2, 3, 6, 1, torch.zeros(36, dtype=torch.bool), *links(6)),
        "tree_from_mask": (mask, torch.tensor([4]), *links(6)),
        "verify_greedy": (*accepted, tokens, *walk, tokens.clone()),
        "decode_attention": (*attention_arguments(), 0.25),
        "tree_attention": (*attention_arguments(), *extends, 0.25),
        "kv_write": (torch.randn(2, 2, 4), torch.randn(2, 2, 4), *pool, moves[0]),
        "kv_move": (pool, *moves),
        "hidden_gather": ([torch.randn(5, 3) for _ in range(3)], moves[0], torch.zeros(2, 9)),
        "accept_commit": (
            torch.tensor([4, 5, 6], dtype=torch.int32), torch.tensor([[0, 2]], dtype=torch.int32),
            torch.tensor([1], dtype=torch.int32), torch.tensor([7, 8, 9]), torch.zeros(1, dtype=torch.int32),
            *(torch.zeros(1, 2, dtype=torch.int64) for _ in range(4)), torch.zeros(1, dtype=torch.int64)),
    }


@pytest.mark.parametrize("name", samples())
def test_opcheck(name: str) -> None:
    torch.library.opcheck(getattr(torch.ops.eyas, name).default, samples()[name])


def test_graph_break_free_capture() -> None:
    q, k, v, out, *tables = attention_arguments()

    def step(q: torch.Tensor) -> torch.Tensor:
        result = torch.empty_like(q)
        torch.ops.eyas.decode_attention(q * 2, k, v, result, *tables, 0.25)
        return result + 1

    captured = torch.compile(step, backend="eager", fullgraph=True)(q)
    torch_ops.decode_attention(q * 2, k, v, out, *tables, 0.25)
    assert torch.equal(captured, out + 1)


def test_package_imports_without_torch() -> None:
    code = "import sys, eyas_native; eyas_native.status(); sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
