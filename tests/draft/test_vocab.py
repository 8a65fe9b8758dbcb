"""Choice and coverage of the draft vocabulary."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from eyas_contract import InvalidInput
from eyas_draft.vocab import choose_vocab, coverage, render


@given(st.lists(st.integers(0, 50), min_size=4, max_size=60), st.data())
def test_no_other_vocabulary_of_the_size_covers_more(counts: list[int], data: st.DataObject) -> None:
    size = data.draw(st.integers(1, len(counts) - 1))
    vocab = choose_vocab(torch.tensor(counts), size)
    assert vocab.size == size
    assert sum(counts[i] for i in vocab.target_ids) == sum(sorted(counts, reverse=True)[:size])


def test_ties_go_to_smaller_ids_and_special_tokens_always_in() -> None:
    assert choose_vocab(torch.tensor([3, 1, 1, 1, 5]), 3).target_ids == (0, 1, 4)
    assert choose_vocab(torch.tensor([3, 1, 1, 1, 5]), 3, always=(3,)).target_ids == (0, 3, 4)


def test_full_vocabulary_and_sizes_out_of_range() -> None:
    counts = torch.tensor([3, 0, 1])
    assert choose_vocab(counts, 0).is_full
    assert choose_vocab(counts, 3).is_full
    for size in (-1, 4):
        with pytest.raises(InvalidInput, match="--vocab-size"):
            choose_vocab(counts, size)
    with pytest.raises(InvalidInput, match=r"2 .the special tokens seen"):
        choose_vocab(counts, 1, always=(0, 2))


def test_coverage_reports_mass_losses_and_ceiling() -> None:
    counts = torch.tensor([50, 30, 15, 5, 0])
    report = coverage(counts, choose_vocab(counts, 2), steps=2)
    assert report.mass == pytest.approx(0.8)
    assert report.lost_ids == ((2, 15), (3, 5))
    assert report.ceiling == pytest.approx(1 + 0.8 + 0.64)
    assert (report.seen, report.tokens) == (4, 100)
    text = render(report, {2: " the"})
    assert "80.00%" in text
    assert "' the'" in text
