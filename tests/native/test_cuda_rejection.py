"""verify_rejection's CUDA kernel, its own source run on a CPU (emulation/), against the CPU backend and its doubles."""

from __future__ import annotations

import ctypes
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from on_host import cuda_on_host

import eyas_native
from eyas_native import cuda, cuda_abi

HERE = Path(__file__).parent
NATIVE = HERE.parents[1] / "native"


@pytest.fixture(scope="module", autouse=True)
def on_host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """eyas_native.cuda over emulation/rejection.cpp; tensors of the CPU pass for CUDA's."""
    path = tmp_path_factory.mktemp("host") / "rejection.so"
    folders = [f"-I{HERE / 'emulation'}", f"-I{NATIVE / 'include'}", f"-I{NATIVE / 'src/cuda'}"]
    flags = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", *folders, "-include", "cuda.h"]
    subprocess.run(["c++", *flags, str(HERE / "emulation/rejection.cpp"), "-o", str(path)], check=True)
    library = ctypes.CDLL(str(path))
    library.eyas_verify_rejection.argtypes = list(cuda_abi.PROTOTYPES["eyas_verify_rejection"])
    with cuda_on_host(library):
        yield


def both(tokens: torch.Tensor, coins: torch.Tensor, last: torch.Tensor, target: torch.Tensor, draft: torch.Tensor,
         *, replacement: bool) -> tuple[list[int], list[int]]:
    """The first token of each request by the CUDA kernel and by the CPU: a root whose children are all other nodes.

    Args:
        tokens: i64 [B, n]; coins: f32 [B, n]; last: f32 [B]; target, draft: f32 [V], of the root.
    """
    batch, n = tokens.shape
    index = torch.arange(batch * n).view(batch, n)
    child, sibling = torch.full((batch, n), -1), torch.full((batch, n), -1)
    child[:, 0], sibling[:, 1:-1] = 1, torch.arange(2, n)
    probs = [x.expand(batch, n, -1).contiguous() for x in (target, draft)]
    said = []
    for call, options in ((cuda.verify_rejection, {"stream": 0}), (eyas_native.verify_rejection, {})):
        out = torch.zeros(batch * n, dtype=torch.int32), torch.zeros(batch, 2, dtype=torch.int32)
        count = torch.zeros(batch, dtype=torch.int32)
        call(*out, count, tokens, index, child, sibling, coins, last, *probs, replacement=replacement, **options)
        said.append([*out[0].view(batch, n)[:, 0].tolist(), *out[1].view(-1).tolist(), *count.tolist()])
    return said[0], said[1]


def test_a_draft_that_is_sure_of_a_token() -> None:
    """Without replacement, what the first token leaves is 4e-8; one minus its own share is 0 in f32."""
    coins = torch.full((6, 3), 0.99)
    coins[:, 2] = torch.tensor([0.1, 0.5, 0.6, 0.7, 0.9, 0.99])  # 2/3 is where the second sibling begins to be refused
    last = torch.tensor([0.1, 0.9, 0.4, 0.1, 0.6, 0.9])
    target, draft = torch.tensor([0.5, 0.25, 0.25]), torch.tensor([1.0, 3e-8, 1e-8])
    found, wanted = both(torch.tensor([[0, 0, 1]] * 6), coins, last, target, draft, replacement=False)
    assert wanted[:6] == [1, 1, 1, 2, 2, 2]
    assert found == wanted


@pytest.mark.parametrize("replacement", [False, True])
def test_random_siblings(replacement: bool) -> None:
    generator = torch.Generator().manual_seed(3)
    for vocab in (5, 200, 3000):
        target, draft = (torch.rand(vocab, generator=generator) ** power for power in (2, 12))
        target, draft = target / target.sum(), draft / draft.sum()
        # 4 children of 4 requests, so that several are refused: likely tokens of the draft, once each or repeated.
        likely = torch.multinomial(draft, 16, replacement=True, generator=generator).view(4, 4) if replacement else (
            torch.stack([torch.multinomial(draft, 4, generator=generator) for _ in range(4)]))
        tokens = torch.cat([torch.zeros(4, 1, dtype=torch.int64), likely], dim=1)
        coins, last = torch.rand(4, 5, generator=generator), torch.rand(4, generator=generator)
        found, wanted = both(tokens, coins.sqrt(), last, target, draft, replacement=replacement)
        assert found == wanted
