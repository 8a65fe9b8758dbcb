"""Fixtures shared by all tests."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

import tiny


@pytest.fixture(scope="session")
def tiny_target() -> Path:
    """Folder of a tiny trained Llama target (hidden 64, 8 layers, ChatML, fp32). Read-only."""
    return tiny.target_folder()


# Files that run long first, so that no worker ends with one of them while the others wait.
LONGEST_FIRST = ("integration", "serve", "draft", "extract", "packaging", "native", "contract")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The folders in that order."""
    here = Path(__file__).parent
    items.sort(key=lambda item: LONGEST_FIRST.index(item.path.relative_to(here).parts[0]))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """A file's tests share a worker, and so its fixtures; so do all integration tests, for the trained draft."""
    from xdist.scheduler import LoadScopeScheduling

    class ByFile(LoadScopeScheduling):  # pytest-xdist's own groups are lost on pytest 9.2
        def _split_scope(self, nodeid: str) -> str:
            return "integration" if nodeid.startswith("tests/integration/") else nodeid.partition("::")[0]

    return ByFile(config, log)
