"""Fixtures shared by all tests."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import tiny


@pytest.fixture(scope="session")
def tiny_target() -> Path:
    """Folder of a tiny trained Llama target (hidden 64, 8 layers, ChatML, fp32). Read-only."""
    return tiny.target_folder()
