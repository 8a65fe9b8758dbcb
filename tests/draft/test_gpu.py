"""The packed loss and its gradients in bf16, on a GPU through its flash kernels, against float64 on the CPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from specs import MLA, SPEC, random_model, random_samples
from test_loss import DECAY, LENGTHS, STEPS
from torch import Tensor

from eyas_contract import DraftSpec, MlaSizes
from eyas_draft.batches import Batch, HostBatch
from eyas_draft.loss import ttt_loss
from eyas_draft.states import States
from eyas_draft.store import Sample
from eyas_draft.ttt import scored_positions

# Flash kernels take widths that are multiples of 8; the MLA draft's values (16) are narrower than its keys (24).
WIDE = {"llama": replace(SPEC, head_dim=16), "mla": replace(MLA, mla=MlaSizes(20, 12, 16, 8, 16), head_dim=24)}


def loss_and_gradients(spec: DraftSpec, device: str, dtype: torch.dtype) -> tuple[Tensor, list[Tensor]]:
    """The same random model and samples, on a device, float64 on the CPU."""
    model = random_model(spec, dtype=dtype).to(device)
    samples = [Sample(s.id, s.input_ids_t, s.loss_mask_t, States(s.aux_tke.to(dtype)), States(s.last_te.to(dtype)))
               for s in random_samples(spec, LENGTHS)]
    batch = Batch.pack(samples, torch.device(device))
    teacher = torch.randn(spec.draft_vocab_size, spec.target_hidden_size, dtype=torch.float64,
                          generator=torch.Generator().manual_seed(9)).to(device, dtype)
    with torch.autocast(device, torch.bfloat16, enabled=dtype != torch.float64):
        loss = ttt_loss(model, batch, scored_positions(batch), lambda last: (last.float() @ teacher.float().T).softmax(
            -1).to(dtype), steps=STEPS, decay=DECAY).loss
    return loss.detach().cpu().double(), [g.cpu().double() for g in torch.autograd.grad(loss, list(model.parameters()))]


@pytest.mark.parametrize("pinned", [False, pytest.param(True, marks=pytest.mark.skipif(
    not torch.cuda.is_available(), reason="no GPU"))])
def test_a_batch_of_e4m3_is_the_same_on_a_gpu(pinned: bool) -> None:
    generator = torch.Generator().manual_seed(4)
    values = [torch.randn(n, 3 * 64, generator=generator).to(torch.float8_e4m3fn) for n in (70, 33)]
    samples = [Sample(str(len(v)), torch.zeros(len(v), dtype=torch.int32), torch.ones(len(v), dtype=torch.bool),
                      *(States(v, torch.rand(len(v), 3, generator=generator)) for _ in range(2))) for v in values]
    batch = HostBatch.of(samples, pinned=pinned).to(torch.device("cuda" if pinned else "cpu"))
    assert torch.equal(batch.aux_tke.cpu(), torch.cat([sample.aux_tke for sample in samples]))
    assert torch.equal(batch.last_te.cpu(), torch.cat([sample.last_te for sample in samples]))


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("spec", WIDE.values(), ids=WIDE.keys())
def test_bf16_is_near_float64(spec: DraftSpec, device: str) -> None:
    wanted, wanted_gradients = loss_and_gradients(spec, "cpu", torch.float64)
    found, gradients = loss_and_gradients(spec, device, torch.float32)
    assert abs(found - wanted) < 0.02 * wanted
    # A random model's gradients are noisy in bf16: what is asked is that they point the same way.
    for mine, theirs in zip(gradients, wanted_gradients, strict=True):
        assert torch.nn.functional.cosine_similarity(mine.flatten(), theirs.flatten(), dim=0) > 0.99
