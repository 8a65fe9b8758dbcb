"""Acceptance from recorded rounds: each number with its definition, and none that is not one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from eyas_contract import InvalidInput
from eyas_serve.rounds import ReadRoundsConfig, read_rounds, text


def test_every_definition_gives_its_own_number(tmp_path: Path) -> None:
    rounds, meta = tmp_path / "rounds.json", tmp_path / "meta.json"
    rounds.write_text(json.dumps({"num_steps": 3, "accepted_draft_tokens_per_round": [3, 0, 1, 3, 2, 0, 0, 1]}))
    meta.write_text(json.dumps({"completion_tokens": 19, "spec_verify_ct": 8}))
    numbers = read_rounds(ReadRoundsConfig(rounds, meta))
    assert {name: number["value"] for name, number in numbers.items()} == {
        "acceptance_length": 2.25, "accepted_per_round": 1.25, "rounds": 8, "plain_rates": [5 / 8, 3 / 8, 2 / 8],
        "conditional_rates": [5 / 8, 3 / 5, 2 / 3], "server_ratio": 19 / 8, "server_rounds_only": 18 / 8}
    shown = text(numbers, False)
    assert "2.250" in shown
    assert "bonus token counted" in shown
    assert "0.625, 0.600, 0.667" in shown
    assert json.loads(text(numbers, True)) == numbers


@pytest.mark.parametrize("content", ["[]", "{}", "[1, -1]", '{"accepted_draft_tokens_per_round": [true]}', "3"])
def test_no_rounds_are_refused(tmp_path: Path, content: str) -> None:
    path = tmp_path / "rounds.json"
    path.write_text(content)
    with pytest.raises(InvalidInput, match="accepted_draft_tokens_per_round"):
        read_rounds(ReadRoundsConfig(path))
    path.write_text("[1, 2]")
    meta = tmp_path / "meta.json"
    meta.write_text('{"completion_tokens": 0}')
    with pytest.raises(InvalidInput, match="completion_tokens"):
        read_rounds(ReadRoundsConfig(path, meta))


@pytest.mark.parametrize("steps", ['"three"', "[1]", "1e400", "-1", "100000000"])
def test_steps_that_are_no_number_of_them_are_refused(tmp_path: Path, steps: str) -> None:
    path = tmp_path / "rounds.json"
    path.write_text(f'{{"accepted_draft_tokens_per_round": [1, 2], "num_steps": {steps}}}')
    with pytest.raises(InvalidInput, match="num_steps"):
        read_rounds(ReadRoundsConfig(path))
