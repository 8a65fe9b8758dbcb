"""Warm start from an exported draft, in SGLang's and in speculators' names, with another vocabulary."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import storemaker
import torch

from eyas_contract import InvalidInput
from eyas_draft import checkpoint
from eyas_draft.config import ExportConfig, TrainConfig
from eyas_draft.convert import ConvertConfig, convert
from eyas_draft.export import export
from eyas_draft.setup import prepare
from eyas_draft.train import Trainer


@pytest.fixture(scope="module")
def published(store: Path, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A run of a few steps and its export."""
    work = tmp_path_factory.mktemp("published")
    Trainer(TrainConfig(store, tiny_target, work / "run", vocab_size=64, ttt_steps=2, max_steps=3, epochs=1,
                        precision="fp32")).run()
    export(ExportConfig(run=work / "run", out=work / "draft", checkpoint="last", golden=False))
    return work / "run", work / "draft"


@pytest.mark.parametrize("dialect", ["sglang", "hf"])
def test_weights_go_over_by_name_and_token(store: Path, tiny_target: Path, tmp_path: Path,
                                           published: tuple[Path, Path], dialect: str) -> None:
    run, draft = published
    if dialect == "hf":
        draft = tmp_path / "hf"
        convert(ConvertConfig(published[1], draft, to="hf", target=tiny_target))
    config = TrainConfig(store, tiny_target, tmp_path / "run", vocab_size=90, warm_start=draft)
    cold, warm = prepare(replace(config, warm_start=None)), prepare(config)
    trained = checkpoint.require(run, "last")["model"]
    old = prepare(replace(config, vocab_size=64, warm_start=None)).contract.vocab
    new = warm.contract.vocab
    assert old
    assert new
    for name, value in warm.model.named_parameters():
        if name != "lm_head.weight":
            torch.testing.assert_close(value, trained[name])
    rows = {token: row for row, token in enumerate(old.target_ids)}
    for row, token in enumerate(new.target_ids):
        wanted = trained["lm_head.weight"][rows[token]] if token in rows else cold.model.lm_head.weight[row]
        torch.testing.assert_close(warm.model.lm_head.weight[row], wanted)


def test_another_draft_is_refused_with_every_difference(store: Path, tiny_target: Path, tmp_path: Path,
                                                        published: tuple[Path, Path]) -> None:
    config = TrainConfig(store, tiny_target, tmp_path / "run", vocab_size=64, warm_start=published[1],
                         intermediate_size=200, norm_output=True)
    with pytest.raises(InvalidInput, match=r"norms.*norm_output.*down_proj.*gate_proj"):
        prepare(config)


def test_heads_and_epsilon_are_compared_where_shapes_agree(store: Path, tiny_target: Path, tmp_path: Path,
                                                           published: tuple[Path, Path]) -> None:
    draft = Path(shutil.copytree(published[1], tmp_path / "draft"))
    (draft / "contract.json").unlink()
    plain = json.loads((draft / "config.json").read_text())
    plain |= {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8, "rms_norm_eps": 1e-3}
    (draft / "config.json").write_text(json.dumps(plain))
    with pytest.raises(InvalidInput, match=r"head_dim 8, not 16; num_attention_heads 8, not 4; num_key_value_heads 4, "
                                           r"not 2; rms_norm_eps 0\.001, not 1e-05"):
        prepare(TrainConfig(store, tiny_target, tmp_path / "run", vocab_size=64, warm_start=draft))


def test_a_draft_that_names_no_layers_is_of_those_that_engines_take(
        store: Path, tiny_target: Path, tmp_path: Path, published: tuple[Path, Path], rows: list[storemaker.Row],
        monkeypatch: pytest.MonkeyPatch) -> None:
    draft = Path(shutil.copytree(published[1], tmp_path / "draft"))
    (draft / "contract.json").unlink()
    plain = json.loads((draft / "config.json").read_text())
    del plain["eagle_config"]
    (draft / "config.json").write_text(json.dumps(plain))
    prepare(TrainConfig(store, tiny_target, tmp_path / "run", vocab_size=64, warm_start=draft))
    monkeypatch.setattr(storemaker, "default_aux_layer_ids", lambda _: (0, 2, 5))
    other = storemaker.write_store(tmp_path / "other", tiny_target, rows[:24])
    with pytest.raises(InvalidInput, match=r"layers \[1, 3, 4\] \(it names none.*not \[0, 2, 5\]"):
        prepare(TrainConfig(other, tiny_target, tmp_path / "run", vocab_size=64, warm_start=draft))
