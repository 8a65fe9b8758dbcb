"""Fixtures of the launcher's tests: a fake engine, and the certainty that nothing outlives a test."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from eyas_serve import ServeConfig

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))


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


def engines(marker: str) -> list[psutil.Process]:
    """Living processes whose engine reports into a folder below `marker`."""
    found = []
    for process in psutil.process_iter():
        try:
            folder = process.environ().get("EYAS_STATUS_DIR", "")
            if folder.startswith(marker) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def orphans(marker: str) -> list[psutil.Process]:
    """Those that still live after 10 s; they are ended."""
    deadline = time.monotonic() + 10
    while engines(marker) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = engines(marker)
    for process in left:
        process.kill()
    return left


@pytest.fixture(autouse=True)
def no_orphans(tmp_path: Path) -> Iterator[None]:
    """Whatever a test does, no process of its engine may be left after it."""
    yield
    assert not orphans(str(tmp_path))
