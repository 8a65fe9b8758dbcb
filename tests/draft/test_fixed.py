"""Fixed shapes against TTT unrolled plainly, and against ragged batches; what compiles; what the feed does."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from specs import SPEC, VARIANTS, random_model, random_samples
from test_loss import DECAY, STEPS, plain_loss
from torch import Tensor

from eyas_contract import DraftSpec, InvalidInput
from eyas_draft import attention, regions
from eyas_draft.attention import Layout
from eyas_draft.config import TrainConfig
from eyas_draft.feed import ahead
from eyas_draft.loss import fixed_head_loss
from eyas_draft.model import DraftModel
from eyas_draft.objectives import OBJECTIVES, Mix, evaluate, parse_mix
from eyas_draft.packs import PackSizes, fill_pack, split_parts
from eyas_draft.store import Sample
from eyas_draft.train import Trainer
from eyas_draft.ttt import Rows, unroll_rows

CE: Mix = (("ce", 1.0),)


def fixed_loss(model: DraftModel, samples: list[Sample], teacher: Tensor, extra: int = 37, mix: Mix = CE) -> Tensor:
    """The loss as `FixedStepper` computes it, with `extra` tokens of padding."""
    lengths = [s.input_ids_t.numel() for s in samples]
    sizes = PackSizes(sum(lengths) + extra, sum(int(s.loss_mask_t.sum()) for s in samples) + 5, len(samples) + 10,
                      max(lengths))
    flat = np.zeros(sizes.total, dtype=np.int32)
    fill_pack(flat, sizes, [0, *np.cumsum(lengths)[:-1].tolist()], [s.loss_mask_t.numpy() for s in samples])
    parts = {name: torch.from_numpy(part).long() for name, part in split_parts(sizes, flat).items()}
    ids, aux, last = (torch.cat([getattr(s, name) for s in samples])[parts["take"]]
                      for name in ("input_ids_t", "aux_tke", "last_te"))
    rows = Rows(ids.long(), parts["positions"], parts["ends"])
    layout = Layout([n for n in parts["bounds"].diff().tolist() if n], torch.device("cpu"))
    sources = parts["sources"]
    targets = (last[sources.clamp(min=0)] @ teacher.T).softmax(-1)
    total = targets.new_zeros(())
    for i, (normed, source, inside) in enumerate(unroll_rows(model, rows, aux, layout, STEPS)):
        row = sources - 1 - i
        valid = (sources >= 0) & (row >= parts["starts"])
        inverse = torch.where(inside, parts["place"][source], sizes.scored)
        summed, _ = fixed_head_loss(normed, model.lm_head.weight, targets, targets.argmax(-1), row.clamp(min=0), valid,
                                    inverse, mix)
        total = total + DECAY ** i * summed / valid.sum()
    return total


@pytest.mark.parametrize("spec", VARIANTS.values(), ids=VARIANTS.keys())
@pytest.mark.parametrize("stacked", [False, True], ids=["diagonals one by one", "diagonals stacked"])
def test_loss_and_gradients_equal_the_plain_ones(spec: DraftSpec, stacked: bool,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "STACKED_ON", ("cpu",) if stacked else ())
    model, samples = random_model(spec), random_samples(spec, (9, 3, 14, 6))
    teacher = torch.randn(spec.draft_vocab_size, spec.target_hidden_size, dtype=torch.float64,
                          generator=torch.Generator().manual_seed(9))
    used = {n: p for n, p in model.named_parameters() if n != "layers.1.input_layernorm.weight"}
    wanted = plain_loss(model, samples, teacher)
    mine = fixed_loss(model, samples, teacher)
    torch.testing.assert_close(mine, wanted, rtol=1e-9, atol=1e-9)
    for name, a, b in zip(used, torch.autograd.grad(mine, list(used.values())),
                          torch.autograd.grad(wanted, list(used.values())), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")


@pytest.mark.filterwarnings("ignore")  # the compiler warns of its own ways
def test_compiled_regions_compute_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """Traced whole, without a break; the last stage, which makes C++ or Triton, would cost a minute here."""
    monkeypatch.setattr(attention, "STACKED_ON", ("cpu",))
    monkeypatch.setattr(regions, "BACKEND", "aot_eager")
    model, samples = random_model(SPEC, dtype=torch.float32), random_samples(SPEC, (9, 14), dtype=torch.float32)
    teacher = torch.randn(SPEC.draft_vocab_size, SPEC.target_hidden_size)

    def grads() -> list[Tensor]:
        return list(torch.autograd.grad(fixed_loss(model, samples, teacher), list(model.parameters())))
    plain = grads()
    with regions.compiled():
        fused = grads()
    for a, b in zip(fused, plain, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("name", OBJECTIVES)
def test_gradients_of_objectives_are_their_derivatives(name: str) -> None:
    g = torch.Generator().manual_seed(1)
    logits = torch.randn(6, 11, dtype=torch.float64, generator=g, requires_grad=True)
    target = (2 * torch.randn(6, 11, dtype=torch.float64, generator=g)).softmax(-1)
    value, grad = evaluate(((name, 1.0),), logits, target)
    if name == "lk-lambda":  # its weight is held fixed
        q = logits.softmax(-1)
        alpha = torch.minimum(q, target).sum(-1)
        weight = (-3 * alpha).exp().detach()
        kl = (target * (target.log() - logits.log_softmax(-1))).sum(-1)
        value = weight * kl + (1 - weight) * (1 - alpha)
    wanted, = torch.autograd.grad(value.sum(), logits)
    torch.testing.assert_close(grad, wanted)


@pytest.mark.parametrize("name", ["kl", "tv", "lk-alpha", "lk-lambda"])
def test_a_draft_that_is_the_target_has_nothing_to_lose(name: str) -> None:
    target = torch.randn(4, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(2)).softmax(-1)
    value, _ = evaluate(((name, 1.0),), target.log(), target)
    torch.testing.assert_close(value, torch.zeros_like(value))


@pytest.mark.parametrize("name", OBJECTIVES)
def test_objectives_stay_finite_where_target_and_draft_share_nothing(name: str) -> None:
    """Probabilities of exactly zero on both sides, as float32 gives them."""
    value, grad = evaluate(((name, 1.0),), torch.tensor([[200.0, 0.0, 0.0]]), torch.tensor([[0.0, 1.0, 0.0]]))
    assert torch.isfinite(value).all()
    assert torch.isfinite(grad).all()


def test_a_mix_is_a_weighted_sum_and_unknown_names_are_refused() -> None:
    logits, target = torch.randn(4, 7), torch.randn(4, 7).softmax(-1)
    (a, ga), (b, gb) = (evaluate(((name, 1.0),), logits, target) for name in ("kl", "choice"))
    value, grad = evaluate(parse_mix("kl=0.25,choice=2"), logits, target)
    torch.testing.assert_close(value, 0.25 * a + 2 * b)
    torch.testing.assert_close(grad, 0.25 * ga + 2 * gb)
    for text in ("ce,huber", "ce=0", "ce=inf", "ce=nan", "ce=-1", "kl=x", ""):
        with pytest.raises(InvalidInput, match="--loss"):
            parse_mix(text)


@given(st.lists(st.integers(2, 30), min_size=1, max_size=6), st.integers(0, 70), st.integers(0, 2**20))
@settings(max_examples=60, deadline=None)
def test_a_pack_holds_every_document_once(lengths: list[int], extra: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    masks = [rng.random(n) < 0.6 for n in lengths]
    sizes = PackSizes(sum(lengths) + extra, sum(lengths), len(lengths) + -(-(sum(lengths) + extra) // max(lengths)),
                      max(lengths))
    flat = rng.integers(0, 99, sizes.total).astype(np.int32)
    firsts = rng.permutation(len(lengths)) * 1000
    assert fill_pack(flat, sizes, firsts.tolist(), masks) == sum(lengths)
    parts = split_parts(sizes, flat)
    at = 0
    wanted_sources = []
    for first, mask in zip(firsts, masks, strict=True):
        n = len(mask)
        assert (parts["take"][at:at + n] == first + np.arange(n)).all()
        assert (parts["positions"][at:at + n] == np.arange(n)).all()
        assert (parts["ends"][at:at + n] == at + n).all()
        wanted_sources += [(at + i, at) for i in range(n - 1) if mask[i + 1]]
        at += n
    found = [(s, b) for s, b in zip(parts["sources"], parts["starts"], strict=True) if s >= 0]
    assert found == wanted_sources
    assert [int(parts["place"][s]) for s, _ in found] == list(range(len(found)))
    assert (parts["place"] == sizes.scored).sum() == sizes.tokens - len(found)
    bounds = parts["bounds"]
    assert bounds[0] == 0
    assert bounds[-1] == sizes.tokens
    assert (np.diff(bounds) >= 0).all()
    assert np.diff(bounds).max() <= sizes.longest
    assert set(np.cumsum(lengths)) <= set(bounds.tolist())


def test_reading_ahead_keeps_order_passes_errors_on_and_ends() -> None:
    assert list(ahead(iter(range(50)), 3)) == list(range(50))

    def broken() -> object:
        yield 1
        raise InvalidInput("here", "a", "b", "c")
    items = ahead(broken(), 3)
    assert next(items) == 1
    with pytest.raises(InvalidInput):
        next(items)
    endless = ahead(iter(int, 1), 2)
    next(endless)
    endless.close()


def settings_of(store: Path, target: Path, out: Path, **changes: object) -> TrainConfig:
    plain = {"store": store, "target": target, "out": out, "vocab_size": 64, "ttt_steps": 3, "epochs": 2,
             "tokens_per_batch": 300, "precision": "fp32", "holdout": 0.05, "lr": 2e-3, "checkpoint_every": 7}
    return TrainConfig(**{**plain, **changes})


def lines(run: Path) -> list[dict[str, object]]:
    return [row for row in map(json.loads, (run / "metrics.jsonl").read_text().splitlines()) if "loss" in row]


@pytest.mark.parametrize("resident", ["yes", "no"])
def test_fixed_shapes_train_as_ragged_ones_and_resume_exactly(store: Path, tiny_target: Path, tmp_path: Path,
                                                              resident: str) -> None:
    ragged = Trainer(settings_of(store, tiny_target, tmp_path / "ragged", shapes="ragged", accumulate=2))
    ragged.run()
    config = settings_of(store, tiny_target, tmp_path / "fixed", shapes="fixed", accumulate=2, resident=resident)
    Trainer(config).run()
    a, b = lines(tmp_path / "ragged"), lines(tmp_path / "fixed")
    assert [r["step"] for r in a] == [r["step"] for r in b]
    for mine, theirs in zip(b, a, strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=2e-4)
        assert all(mine[key] == theirs[key] for key in ("cursor", "tokens", "trained"))
    again = settings_of(store, tiny_target, tmp_path / "again", shapes="fixed", accumulate=2, resident=resident)
    broken = Trainer(again)
    advance = broken.stepper.advance

    def stop_at_nine(step: int, rate: float) -> int:
        if step == 9:  # after the checkpoint at 7, in the midst of an epoch
            raise KeyboardInterrupt
        return advance(step, rate)
    broken.stepper.advance = stop_at_nine
    with pytest.raises(KeyboardInterrupt):
        broken.run()
    broken.stepper.close()
    continued = Trainer(again)
    assert continued.step == 7
    continued.run()
    untimed = [[{k: v for k, v in r.items() if k not in ("seconds", "wait")} for r in lines(tmp_path / name)]
               for name in ("fixed", "again")]
    assert untimed[0] == untimed[1]


def test_a_step_with_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(
        store: Path, tiny_target: Path, tmp_path: Path) -> None:
    trainer = Trainer(settings_of(store, tiny_target, tmp_path / "run", shapes="fixed", max_bad_steps=1))
    trainer.stepper.advance(1, 1e-3)
    before = {n: p.detach().clone() for n, p in trainer.model.named_parameters()}
    real = trainer.stepper.feed.place

    def poisoned(batch: object) -> None:
        real(batch)
        trainer.stepper.feed.buffers.aux_tke[0] = float("nan")
    trainer.stepper.feed.place = poisoned
    trainer.stepper.advance(2, 1e-3)
    assert all(torch.equal(p, before[n]) for n, p in trainer.model.named_parameters())
    assert [r["skipped"] for r in trainer.stepper.drain()] == [False, True]
    trainer.stepper.advance(3, 1e-3)
    with pytest.raises(InvalidInput, match="not finite in 2 steps"):
        trainer.stepper.drain()
    trainer.stepper.close()


def test_checkpoints_go_by_real_rounds_where_asked_to(store: Path, tiny_target: Path, tmp_path: Path) -> None:
    config = settings_of(store, tiny_target, tmp_path / "run", decode_prompts=4, decode_tokens=12, epochs=1)
    trainer = Trainer(config)
    trainer.run()
    held = [json.loads(line)["heldout"] for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
            if "heldout" in line]
    assert all(row["decoded_rounds"] > 0 for row in held)
    assert trainer.best == pytest.approx(max(row["decoded_acceptance_length"] for row in held[1:]), abs=1e-5)


def test_a_fall_below_the_best_is_told(store: Path, tiny_target: Path, tmp_path: Path) -> None:
    said = io.StringIO()
    trainer = Trainer(settings_of(store, tiny_target, tmp_path / "run", epochs=1), said)
    trainer.best = 3.9
    trainer.run()
    assert "trained too long" in said.getvalue()
