"""Puts this folder's references on the path, and gives every test the default threads and instruction set."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import eyas_native

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(autouse=True)
def defaults() -> Iterator[None]:
    yield
    eyas_native.set_isa(None)
    eyas_native.set_threads(0)
