"""The walk against rounds drafted one token at a time, every prefix computed anew, over documents of any shape."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from plain_attention import BranchOf, PlainAttention
from specs import MLA, SPEC, pack, random_model, random_samples
from torch import Tensor

from eyas_contract import DraftSpec
from eyas_draft.model import DraftModel
from eyas_draft.store import Sample
from eyas_draft.walk import walk

KINDS = 2  # tokens that occur: so few that a random draft is often right
DRAFT_IDS = torch.arange(SPEC.draft_vocab_size) % KINDS


def plain_round(model: DraftModel, sample: Sample, known: int, end: int, steps: int) -> int:
    """Draft tokens accepted by a round that begins with `known` tokens of a turn that goes on to `end`."""
    ids, rows = sample.input_ids_t.long(), known - 1
    prefix, own = PlainAttention(model.spec.num_layers), [list[tuple[Tensor, Tensor]]() for _ in model.layers]
    normed, hidden = model(ids[1:known], model.fuse(sample.aux_tke[:rows]), torch.arange(rows), prefix)
    for count in range(min(steps, end - known)):
        drafted = DRAFT_IDS[model.lm_head(normed[-1]).argmax()]
        if drafted != ids[known + count]:
            return count
        normed, hidden = model(drafted[None], hidden[-1:], torch.tensor([rows + count]), BranchOf(prefix, own))
    return min(steps, end - known)


def plain_walk(model: DraftModel, samples: list[Sample], steps: int) -> list[int]:
    """Rounds by accepted tokens; the prompt's pass gives the first token of a turn, a round its bonus token."""
    histogram = [0] * (steps + 1)
    for sample in samples:
        mask = [*sample.loss_mask_t.tolist(), False]
        for first in range(1, len(mask)):
            if mask[first] and not mask[first - 1]:
                known, end = first + 1, mask.index(False, first)
                while known < end:
                    count = plain_round(model, sample, known, end, steps)
                    histogram[count] += 1
                    known += count + 1
    return histogram


@pytest.mark.parametrize("spec", [SPEC, MLA], ids=["llama", "mla"])
def test_the_walk_is_the_plain_one(spec: DraftSpec) -> None:
    """Documents of one token, turns of one, gaps, chains longer than what is left."""
    draw, total = random.Random(3), [0] * 7
    for trial in range(12):
        model, steps = random_model(spec, trial), draw.randint(1, 6)
        lengths = tuple(draw.choice([1, 2, 3, 9, 40]) for _ in range(draw.randint(1, 4)))
        samples = [replace(sample, input_ids_t=sample.input_ids_t % KINDS,
                           loss_mask_t=torch.tensor([draw.random() < 0.8 for _ in range(n)]))
                   for sample, n in zip(random_samples(spec, lengths, trial), lengths, strict=True)]
        with torch.no_grad():
            wanted = plain_walk(model, samples, steps)
        assert list(walk(model, [pack(samples)], steps, DRAFT_IDS).histogram) == wanted
        total = [a + b for a, b in zip(total, [*wanted, *[0] * 6], strict=False)]
    assert min(total[:3]) > 3  # the case is no empty one
