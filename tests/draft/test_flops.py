"""Counted operations against those that torch counts while a batch is trained on; peaks of devices."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from specs import VARIANTS, pack, random_model, random_samples
from torch.utils.flop_counter import FlopCounterMode

from eyas_contract import DraftSpec
from eyas_draft.flops import peak_flops, step_flops
from eyas_draft.loss import ttt_loss
from eyas_draft.ttt import scored_positions

LENGTHS = (30, 12)


@pytest.mark.parametrize("prompt", [1, 8], ids=["prompts of a token", "longer ones"])
@pytest.mark.parametrize("spec", VARIANTS.values(), ids=VARIANTS.keys())
def test_operations_are_those_that_torch_counts(spec: DraftSpec, prompt: int) -> None:
    """Attention apart, whose kernels compute more than what is seen; of it the formula's part is taken off."""
    steps = 4
    samples = [replace(sample, loss_mask_t=torch.arange(n) >= prompt)
               for sample, n in zip(random_samples(spec, LENGTHS), LENGTHS, strict=True)]
    model, batch = random_model(spec), pack(samples)
    scored = scored_positions(batch)
    head = torch.randn(spec.draft_vocab_size, spec.target_hidden_size, dtype=torch.float64)
    with FlopCounterMode(display=False) as counter:
        ttt_loss(model, batch, scored, lambda last: (last @ head.T).softmax(-1), steps=steps, decay=1.0).loss.backward()
    products = counter.get_flop_counts()["Global"][torch.ops.aten.mm]
    if prompt == 1:  # the first position has a distribution, and no row that it could be compared with
        assert int(scored.sum()) == sum(n - 1 for n in LENGTHS)
    seen = sum(n * (n + 1) // 2 for n in LENGTHS) * steps + sum(LENGTHS) * sum(range(steps))
    attention = 3 * 2 * spec.num_heads * (spec.head_dim + spec.value_dim) * spec.num_layers * seen
    whole_head = 2 * int(scored.sum()) * spec.target_hidden_size * spec.target_vocab_size
    assert step_flops(spec, LENGTHS, int(scored.sum()), steps) == products + attention + whole_head


def test_peaks_are_those_of_the_device_of_that_name() -> None:
    peaks = {"NVIDIA H200": 989, "NVIDIA H200 NVL": 835, "NVIDIA H100 80GB HBM3": 989, "NVIDIA H100 PCIe": 756,
             "NVIDIA H100 NVL": 835, "NVIDIA GH200 480GB": 989, "NVIDIA GB200": 2500, "NVIDIA B200": 2250}
    assert {name: peak_flops(name) for name in peaks} == {name: value * 1e12 for name, value in peaks.items()}
    assert peak_flops("NVIDIA H20") is None
