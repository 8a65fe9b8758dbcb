"""Fixtures: rows answered by the tiny target, and a store made of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))

import storemaker


@pytest.fixture(scope="session", autouse=True)
def _threads() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def rows(tiny_target: Path) -> list[storemaker.Row]:
    """96 answered prompts with their states. Read-only."""
    return storemaker.answered_rows(tiny_target, 96, seed=3)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory, tiny_target: Path, rows: list[storemaker.Row]) -> Path:
    """A store of them. Read-only."""
    return storemaker.write_store(tmp_path_factory.mktemp("data") / "store", tiny_target, rows)
