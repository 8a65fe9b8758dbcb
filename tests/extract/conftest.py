"""Fixtures of the extraction tests: templates, input files, a store made once."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import tiny
from eyas_extract.config import RegenerateConfig, RunConfig
from eyas_extract.regenerate import regenerate
from eyas_extract.run import run
from eyas_extract.template import ChatTemplate

torch.set_num_threads(1)
Write = Callable[[list[Any]], Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write rows (objects, or raw text) as lines of a file."""
    def inner(rows: list[Any]) -> Path:
        path = tmp_path / "rows.jsonl"
        lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
        path.write_bytes(b"".join(line + b"\n" for line in lines))
        return path
    return inner


@pytest.fixture
def template(tiny_target: Path) -> Callable[[str], ChatTemplate]:
    """The tiny target's tokenizer with another chat template."""
    def inner(text: str) -> ChatTemplate:
        result = ChatTemplate(tiny_target)
        result.tokenizer.chat_template = text
        return result
    return inner


@pytest.fixture(scope="session")
def answers(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 prompts answered by the tiny target."""
    folder = tmp_path_factory.mktemp("answers")
    prompts = tiny.write_jsonl(folder / "prompts.jsonl", tiny.conversations(40))
    regenerate(RegenerateConfig(tiny_target, prompts, folder / "answers.jsonl", max_new_tokens=30, batch_size=7))
    return folder / "answers.jsonl"


@pytest.fixture(scope="session")
def finished(tiny_target: Path, answers: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete store of several shards. Read-only."""
    out = tmp_path_factory.mktemp("finished") / "store"
    run(RunConfig(tiny_target, answers, out, shard_tokens=300, batch_tokens=128))
    return out


@pytest.fixture
def store(finished: Path, tmp_path: Path) -> Path:
    """A copy of the complete store, to be damaged."""
    return Path(shutil.copytree(finished, tmp_path / "store"))


@pytest.fixture(scope="session")
def poisoned_target(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny target with an untied head, whose embedding of ` cloud` is NaN."""
    out = tmp_path_factory.mktemp("poisoned") / "target"
    shutil.copytree(tiny_target, out)
    model = AutoModelForCausalLM.from_pretrained(tiny_target)
    model.config.tie_word_embeddings = False
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    with torch.no_grad():
        [cloud] = ChatTemplate(tiny_target).encode(" cloud")
        model.model.embed_tokens.weight[cloud] = torch.nan
    model.save_pretrained(out)
    return out
