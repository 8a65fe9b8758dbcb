"""Fixtures of the launcher's tests: a fake engine, and the certainty that nothing outlives a test."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from leftovers import orphans

from eyas_serve import ServeConfig

HERE = Path(__file__).parent


@pytest.fixture(scope="session")
def fake_python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An executable that behaves as an interpreter with SGLang (see fake_engine.py)."""
    path = tmp_path_factory.mktemp("engine") / "python"
    path.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{HERE / "fake_engine.py"}" "$@"\n')
    path.chmod(0o755)
    return path


@pytest.fixture
def scenario(monkeypatch: pytest.MonkeyPatch, fake_python: Path, tmp_path: Path) -> Callable[..., ServeConfig]:
    """`scenario("dies")` -> the config of a server that will."""
    def make(name: str, **settings: object) -> ServeConfig:
        monkeypatch.setenv("FAKE_SCENARIO", name)
        return ServeConfig(**{"target": tmp_path, "engine_python": fake_python, "port": 0, "run_dir": tmp_path / "run",
                              "stall_seconds": 20.0, **settings})

    return make


@pytest.fixture(autouse=True)
def no_orphans(tmp_path: Path) -> Iterator[None]:
    """Whatever a test does, no process of its engine may be left after it."""
    yield
    assert not orphans(str(tmp_path))
