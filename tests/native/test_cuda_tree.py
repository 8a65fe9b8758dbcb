"""The CUDA calls for trees, kernels run on the CPU in both orders of threads, against the CPU backend bit for bit.

cuda_on_host.h runs a kernel without a GPU; the calls, their checks and the ABI's order of arguments are the real ones.
"""

from __future__ import annotations

import ctypes
import random
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import references
import torch
from on_host import cuda_on_host

import eyas_native
from eyas_native import cuda, cuda_abi

HERE = Path(__file__).parent
NATIVE = HERE.parents[1] / "native"
GARBAGE = 77
LINKS = ("positions", "retrive_index", "retrive_next_token", "retrive_next_sibling")
ORDERS = pytest.mark.parametrize("order", [0, 1])  # as the stream: threads run forwards, or backwards


@pytest.fixture(scope="module", autouse=True)
def on_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """eyas_native.cuda over cuda_tree_on_host.cpp; tensors of the CPU pass for CUDA's."""
    path = tmp_path_factory.mktemp("host") / "tree.so"
    flags = ["-std=c++17", "-O1", "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror"]
    folders = [f"-I{NATIVE / 'include'}", f"-I{NATIVE / 'src/cuda'}"]
    subprocess.run(["c++", *flags, *folders, str(HERE / "cuda_tree_on_host.cpp"), "-o", str(path)], check=True)
    library = ctypes.CDLL(str(path))
    for name in ("eyas_tree_build", "eyas_tree_from_mask", "eyas_tree_validate"):
        getattr(library, name).argtypes = list(cuda_abi.PROTOTYPES[name])
    with cuda_on_host(library):
        yield


def outputs(batch: int, n: int) -> dict[str, torch.Tensor]:
    shapes = {"positions": (batch * n,), **dict.fromkeys(LINKS[1:], (batch, n))}
    return {name: torch.full(shape, GARBAGE) for name, shape in shapes.items()}


@ORDERS
@pytest.mark.parametrize("mode", [0, 1, 2, 3])
def test_build_and_its_words(mode: int, order: int) -> None:
    rng = random.Random(mode)
    for nodes in (1, 2, 9, 17, 32) if mode == 2 else (1, 8, 33, 70, 256):
        topk, depth, batch = rng.choice([4, 8]), 6, rng.randint(1, 3)
        tree = references.draft_selection(rng.random(), batch=batch, topk=topk, depth=depth, nodes=nodes)
        lens = torch.tensor([rng.randrange(50) for _ in range(batch)])
        sizes = {"topk": topk, "depth": depth, "num_nodes": tree.nodes}
        lists = (tree.parent_list, tree.selected_index, lens)
        masks = [len(references.mask_bytes([references.tree_mask(p) for p in tree.parents], lens.tolist(), m))
                 for m in (mode, 3)]
        wanted, wanted_words = outputs(batch, tree.nodes), torch.zeros(masks[1], dtype=torch.uint8)
        found, found_words = outputs(batch, tree.nodes), torch.full((masks[1] + 4,), GARBAGE, dtype=torch.uint8)
        mask, found_mask = (torch.full((masks[0] + 4,), GARBAGE, dtype=torch.uint8) for _ in range(2))
        eyas_native.tree_build(*lists, **sizes, mask_mode=mode, tree_mask=mask, **wanted)
        eyas_native.tree_build(*lists, **sizes, mask_mode=3, tree_mask=wanted_words, **wanted)
        invalid = torch.full((batch,), GARBAGE, dtype=torch.int32)
        words = found_words[:-4].view(torch.int32).view(batch, tree.nodes, -1)
        cuda.tree_build(
            *lists, **sizes, mask_mode=mode, tree_mask=found_mask, words=words, invalid=invalid,
            stream=order, **found,
        )
        assert torch.equal(found_mask, mask)
        assert torch.equal(found_words[:-4], wanted_words)
        assert found_words[-4:].tolist() == [GARBAGE] * 4, "written beyond the words' end"
        assert all(torch.equal(found[name], wanted[name]) for name in LINKS)
        assert invalid.tolist() == [0] * batch
        found_mask.fill_(GARBAGE)
        cuda.tree_build(*lists, **sizes, mask_mode=mode, tree_mask=found_mask, stream=order, **found)
        assert torch.equal(found_mask, mask), "without words and flags"


@pytest.mark.parametrize("entry", [3, 40, -1, -3])  # a parent not selected, one beyond the list, no entry at all
def test_build_hangs_orphans_from_the_root(entry: int) -> None:
    selected, parents = torch.tensor([[0, 1], sorted([0, entry])]), torch.tensor([[-1, 0, 1], [-1, 1, 0]])
    found, invalid = outputs(2, 3), torch.full((2,), GARBAGE, dtype=torch.int32)
    mask = torch.zeros(2, 3, 3, dtype=torch.uint8)
    cuda.tree_build(
        parents, selected, torch.tensor([5, 9]), topk=2, depth=2, num_nodes=3, mask_mode=1, tree_mask=mask,
        invalid=invalid, stream=0, **found,
    )
    assert invalid.tolist() == [0, 1]
    assert found["positions"].tolist() == [5, 6, 6, 9, 10, 10]
    assert eyas_native.tree_validate(mask) == ()


@ORDERS
def test_from_mask(order: int) -> None:
    rng = random.Random(0)
    for n in (1, 2, 31, 32, 33, 100, 256):
        parents = [references.random_parents(rng, n) for _ in range(3)]
        masks = torch.stack([references.tree_mask(p) for p in parents])
        lens = torch.tensor([rng.randrange(1000) for _ in parents])
        wanted, found = outputs(3, n), outputs(3, n)
        invalid = torch.full((3,), GARBAGE, dtype=torch.int32)
        eyas_native.tree_from_mask(masks, lens, **wanted)
        cuda.tree_from_mask(masks, lens, invalid=invalid, stream=order, **found)
        assert all(torch.equal(found[name], wanted[name]) for name in LINKS)
        assert invalid.tolist() == [0, 0, 0]


@ORDERS
def test_from_mask_hangs_a_node_without_a_parent_from_the_root(order: int) -> None:
    masks = torch.stack([references.tree_mask([-1, 0, 1, 2])] * 2)
    masks[1, 2, :2] = False
    found, invalid = outputs(2, 4), torch.full((2,), GARBAGE, dtype=torch.int32)
    cuda.tree_from_mask(masks, torch.tensor([1, 1]), invalid=invalid, stream=order, **found)
    assert invalid.tolist() == [0, 1]
    wanted = references.tree_outputs([[-1, 0, 1, 2], [-1, 0, 0, 2]], [1, 1])
    assert all(torch.equal(found[name], wanted[name]) for name in LINKS)


@ORDERS
def test_validate(order: int) -> None:
    rng, seen = random.Random(0), set()
    for n in (1, 2, 3, 8, 33, 65, 130, 256):
        masks = torch.stack([references.tree_mask(references.random_parents(rng, n)) for _ in range(3)])
        for _ in range(rng.randint(0, n)):
            b, i, j = rng.randrange(3), rng.randrange(n), rng.randrange(n)
            masks[b, i, j] = ~masks[b, i, j]
        if n > 2:
            masks[0, n - 1, : n - 1] = False
        codes = torch.full((3, n), GARBAGE, dtype=torch.uint8)
        cuda.tree_validate(masks, codes, stream=order)
        assert eyas_native.tree_faults(codes) == eyas_native.tree_validate(masks)
        seen |= set(codes.flatten().tolist())
    assert seen == {0, 1, 2, 3, 4}
