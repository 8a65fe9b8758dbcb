"""The models of random weights that the attention benchmark serves: whole, and what the checks before a launch want."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from eyas_contract import Contract, TargetSpec
from eyas_contract.target import read_config
from eyas_draft.loading import load_draft
from eyas_serve.preflight import PreflightConfig, preflight

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

from random_models import LATENT, Sizes, random_pair, random_prompts

TINY = Sizes(hidden=64, inner=96, heads=4, kv_heads=2, width=16, draft_vocab=64, positions=2048,
             mla=type(LATENT)(48, 32, 16, 8, 16))


@pytest.mark.parametrize(("kind", "draft_kind", "architecture"), [
    ("gqa64", "", "LlamaForCausalLM"), ("mla64", "", "DeepseekV3ForCausalLM"),
    ("mla64", "gqa64", "DeepseekV3ForCausalLM")])
def test_a_pair_is_whole_and_passes_preflight(tiny_target: Path, tmp_path: Path, kind: str, draft_kind: str,
                                              architecture: str) -> None:
    target, draft = random_pair(kind, tmp_path, tiny_target, 5, draft_kind, TINY, torch.float32, "cpu")
    assert read_config(target)["architectures"] == [architecture]
    contract = Contract.load(draft)
    assert contract.target == TargetSpec.from_folder(target)
    assert contract.draft is not None
    assert contract.draft.kind == ("mla" if (draft_kind or kind) == "mla64" else "llama")
    load_draft(draft, torch.zeros(contract.target.vocab_size, TINY.hidden))
    report = preflight(PreflightConfig(draft, target, engine_version="0.5.16"))
    assert report.code() == 0, report.text(as_json=False)
    first, second = random_prompts(target, 100, 2)
    assert len(first) == 100
    assert first != second
