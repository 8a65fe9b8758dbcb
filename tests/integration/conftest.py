"""Real parts: a trained draft of the tiny target, and the interpreter that has SGLang."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import tiny

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "serve")]

ROOT = Path(__file__).parent.parent.parent
BIN = Path(sys.executable).parent


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> Iterator[None]:
    """A model this small only loses by threads that wait for one another."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield


@pytest.fixture(scope="session")
def engine_python() -> Path:
    """`$EYAS_ENGINE_PYTHON`, else the one that `make setup` made."""
    return Path(os.environ.get("EYAS_ENGINE_PYTHON") or ROOT / ".venv" / "engine" / "bin" / "python")


@pytest.fixture(scope="session")
def prompts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Held-out prompts."""
    return tiny.write_jsonl(tmp_path_factory.mktemp("prompts") / "held_out.jsonl", tiny.conversations(8, seed=77))


@pytest.fixture(scope="session")
def trained_draft(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A draft made by the commands a user types: regenerate, extract, train, export. About 30 s."""
    work = tmp_path_factory.mktemp("pipeline")
    rows = tiny.write_jsonl(work / "prompts.jsonl", tiny.conversations(150, seed=1))

    def run(command: str, *arguments: object) -> None:
        done = subprocess.run([str(BIN / command), *map(str, arguments)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{command} {arguments}\n{done.stdout}\n{done.stderr}"

    run("eyas-extract", "regenerate", "--target", tiny_target, "--prompts", rows, "--out", work / "answers.jsonl",
        "--max-new-tokens", 32)
    run("eyas-extract", "run", "--target", tiny_target, "--data", work / "answers.jsonl", "--out", work / "store",
        "--max-length", 512)
    run("eyas-draft", "train", "--target", tiny_target, "--store", work / "store", "--out", work / "run", "--epochs", 6,
        "--vocab-size", 64, "--tokens-per-batch", 512, "--lr", 3e-3, "--ttt-steps", 3)
    run("eyas-draft", "export", "--run", work / "run", "--out", work / "draft")
    return work / "draft"
