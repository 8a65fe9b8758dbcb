"""Packed loss and gradients against TTT unrolled plainly: one sample, one row, one key at a time, in float64."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_attention import PlainAttention
from specs import MLA, SPEC, VARIANTS, pack, random_model, random_samples
from torch import Tensor

from eyas_contract import DraftSpec
from eyas_draft import attention
from eyas_draft.loss import ttt_loss
from eyas_draft.model import DraftModel
from eyas_draft.states import States
from eyas_draft.store import Sample
from eyas_draft.ttt import scored_positions

STEPS, DECAY, LENGTHS = 4, 0.8, (9, 3, 14, 6)


def plain_loss(model: DraftModel, samples: list[Sample], teacher: Tensor, steps: int = STEPS) -> Tensor:
    """The definition: sums per step over all samples, divided by the scored rows of that step."""
    sums = [torch.zeros((), dtype=torch.float64) for _ in range(steps)]
    counts = [0] * steps
    for sample in samples:
        n, ids = sample.input_ids_t.numel(), sample.input_ids_t.long()
        attend = PlainAttention(model.spec.num_layers)
        hidden = model.fuse(sample.aux_tke)
        for i in range(steps):
            tokens = torch.stack([ids[min(t + 1 + i, n - 1)] for t in range(n)])
            normed, hidden = model(tokens, hidden, torch.arange(n) + i, attend)
            logits = model.lm_head(normed)
            for t in range(n):
                if t + 2 + i < n and sample.loss_mask_t[t + 2 + i]:
                    p = (sample.last_te[t + 1 + i] @ teacher.T).softmax(-1)
                    sums[i] = sums[i] - (p * logits[t].log_softmax(-1)).sum()
                    counts[i] += 1
    return sum((DECAY ** i * sums[i] / max(1, counts[i]) for i in range(steps)), torch.zeros((), dtype=torch.float64))


@pytest.mark.parametrize("spec", VARIANTS.values(), ids=VARIANTS.keys())
def test_packed_loss_and_gradients_equal_the_plain_ones(spec: DraftSpec) -> None:
    model, samples = random_model(spec), random_samples(spec, LENGTHS)
    teacher = torch.randn(spec.draft_vocab_size, spec.target_hidden_size, dtype=torch.float64,
                          generator=torch.Generator().manual_seed(9))
    wanted = plain_loss(model, samples, teacher)
    used = {n: p for n, p in model.named_parameters() if n != "layers.1.input_layernorm.weight"}  # only layer 0 embeds
    wanted_grads = torch.autograd.grad(wanted, list(used.values()))
    batch = pack(samples)
    packed = ttt_loss(model, batch, scored_positions(batch), lambda last: (last @ teacher.T).softmax(-1),
                      steps=STEPS, decay=DECAY)
    grads = torch.autograd.grad(packed.loss, list(used.values()))
    torch.testing.assert_close(packed.loss, wanted, rtol=1e-9, atol=1e-9)
    for name, mine, theirs in zip(used, grads, wanted_grads, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@given(lengths=st.lists(st.integers(1, 7), min_size=1, max_size=5), steps=st.integers(1, 6),
       seed=st.integers(0, 2 ** 16), trained=st.sampled_from(["none", "last", "some", "all"]),
       dense_up_to=st.sampled_from([0, 512]))
@settings(max_examples=25, deadline=None)
def test_documents_shorter_than_the_steps(lengths: list[int], steps: int, seed: int, trained: str,
                                          dense_up_to: int) -> None:
    """And masks of nothing, of the last token alone; several queries a key, a head's width of its own."""
    spec = replace(SPEC, num_heads=8, num_kv_heads=2, head_dim=6)
    model, g = random_model(spec, seed), torch.Generator().manual_seed(seed)
    masks = {"none": 0.0, "last": 0.0, "some": 0.5, "all": 1.0}
    samples = [replace(s, loss_mask_t=torch.rand(len(s.loss_mask_t), generator=g) < masks[trained])
               for s in random_samples(spec, tuple(lengths), seed)]
    if trained == "last":
        samples[0].loss_mask_t[-1] = True
    teacher = torch.randn(spec.draft_vocab_size, spec.target_hidden_size, dtype=torch.float64, generator=g)
    batch = pack(samples)
    with mock.patch.object(attention, "DENSE_UP_TO", dense_up_to):
        packed = ttt_loss(model, batch, scored_positions(batch), lambda last: (last @ teacher.T).softmax(-1),
                          steps=steps, decay=DECAY)
        wanted = plain_loss(model, samples, teacher, steps)
        torch.testing.assert_close(packed.loss, wanted, rtol=1e-9, atol=1e-9)
        if int(packed.scored[0]):
            weights = [model.fc.weight, model.layers[0].self_attn.k_proj.weight, model.lm_head.weight]
            for mine, theirs in zip(torch.autograd.grad(packed.loss, weights),
                                    torch.autograd.grad(wanted, weights), strict=True):
                torch.testing.assert_close(mine, theirs, rtol=1e-7, atol=1e-9)


def test_bfloat16_autocast_stays_near_float32() -> None:
    model = random_model(SPEC, dtype=torch.float32)
    batch = pack(random_samples(SPEC, LENGTHS, dtype=torch.float32))
    teacher = torch.randn(SPEC.draft_vocab_size, SPEC.target_hidden_size)

    def loss() -> Tensor:
        return ttt_loss(model, batch, scored_positions(batch), lambda last: (last @ teacher.T).softmax(-1),
                        steps=STEPS, decay=DECAY).loss

    exact = loss()
    with torch.autocast("cpu", torch.bfloat16):
        near = loss()
    assert abs(near.item() - exact.item()) < 0.02 * exact.item()
    assert torch.isfinite(torch.cat([g.flatten() for g in torch.autograd.grad(near, list(model.parameters()))])).all()


def test_positions_that_do_not_count_do_not_matter() -> None:
    """A position's target is ignored where its next token is untrained or its choice cannot be proposed."""
    model, samples = random_model(SPEC), random_samples(SPEC, (12,))
    batch = pack(samples)
    scored = scored_positions(batch)
    scored[7] = False

    def loss(last_te: Tensor) -> Tensor:
        changed = pack([Sample("x", samples[0].input_ids_t, samples[0].loss_mask_t, samples[0].aux, States(last_te))])
        teacher = torch.eye(SPEC.draft_vocab_size, SPEC.target_hidden_size, dtype=torch.float64)
        return ttt_loss(model, changed, scored, lambda last: (last @ teacher.T).softmax(-1), steps=3, decay=1.0).loss

    other = samples[0].last_te.clone()
    other[~scored] = torch.randn_like(other[~scored])
    assert loss(other).item() == loss(samples[0].last_te).item()
    other[torch.nonzero(scored)[-1]] *= 2
    assert loss(other).item() != loss(samples[0].last_te).item()


@pytest.mark.parametrize("spec", [SPEC, MLA], ids=["llama", "mla"])
def test_flash_equals_dense(spec: DraftSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel for long documents against the scores held in full."""
    model, batch = random_model(spec), pack(random_samples(spec, LENGTHS))
    teacher = torch.eye(SPEC.draft_vocab_size, SPEC.target_hidden_size, dtype=torch.float64)

    def grads() -> list[Tensor]:
        loss = ttt_loss(model, batch, scored_positions(batch), lambda last: (last @ teacher.T).softmax(-1), steps=3,
                        decay=1.0).loss
        return list(torch.autograd.grad(loss, list(model.parameters())))

    dense = grads()
    monkeypatch.setattr(attention, "DENSE_UP_TO", 0)
    for mine, theirs in zip(grads(), dense, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-10)
