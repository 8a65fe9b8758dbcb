"""Final norm, embedding and head among look-alikes: draft heads of the model itself, towers, other kinds of norm."""

from __future__ import annotations

from pathlib import Path

import drafts
import pytest
from drafts import Tensor, bf16, ones

from eyas_contract import InvalidInput, TargetSpec
from eyas_contract.target_tensors import TargetTensors

GOOD = {"model.embed_tokens.weight": bf16([256, 64], 1), "model.norm.weight": ones(64),
        "lm_head.weight": bf16([256, 64], 2), "model.layers.11.input_layernorm.weight": ones(64)}


def found(folder: Path, tensors: dict[str, Tensor], **changes: object) -> TargetTensors:
    made = drafts.target(**changes)
    made.tensors = tensors
    made.write(folder)
    return TargetTensors(folder, TargetSpec.from_folder(folder))


@pytest.mark.parametrize("other", [
    "model.layers.12.embed_tokens.weight", "model.layers.12.shared_head.norm.weight", "mtp.norm.weight",
    "mtp.embed_tokens.weight", "model.visual.merger.norm.weight", "vision_tower.norm.weight", "talker.norm.weight"])
def test_look_alikes_are_passed_over(other: str, tmp_path: Path) -> None:
    wide = ones(32) if "talker" in other else bf16([256, 64]) if "embed" in other else ones(64)
    tensors = found(tmp_path, {other: wide} | GOOD)
    assert tensors.norm().name == "model.norm.weight"
    assert tensors.embedding().name == "model.embed_tokens.weight"
    assert tensors.head().name == "lm_head.weight"
    assert list(tensors.last_layer()) == ["input_layernorm.weight"]


def test_names_within_a_multimodal_model(tmp_path: Path) -> None:
    inside = {f"model.language_model.{name.removeprefix('model.')}" if name.startswith("model.") else name: tensor
              for name, tensor in GOOD.items()}
    tower = {"model.visual.blocks.layers.11.input_layernorm.weight": ones(64)}
    tensors = found(tmp_path, inside | tower)
    assert tensors.norm().name == "model.language_model.norm.weight"
    last = tensors.last_layer()["input_layernorm.weight"].name
    assert last == "model.language_model.layers.11.input_layernorm.weight"


def test_none_and_several_are_told_with_their_shapes(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"several tensors for the final norm: model\.norm.* other\.norm.*\[64\]"):
        found(tmp_path / "a", GOOD | {"other.norm.weight": ones(64)}).norm()
    with pytest.raises(InvalidInput, match=r"no tensor for the head: lm_head\.weight \[256, 8\].*\[256, 64\]"):
        found(tmp_path / "b", GOOD | {"lm_head.weight": bf16([256, 8])}).head()


def test_codes_are_no_head(tmp_path: Path) -> None:
    """A head in e4m3 has the shape of a plain one, and its numbers mean nothing without their scales."""
    codes = Tensor("F8_E4M3", [256, 64], bytes(range(64)) * 256)
    with pytest.raises(InvalidInput, match=r"no tensor for the head: lm_head\.weight \[256, 64\] of F8_E4M3"):
        found(tmp_path, GOOD | {"lm_head.weight": codes}).head()


def test_the_head_of_a_config_that_does_not_say_whether_it_is_tied(tmp_path: Path) -> None:
    headless = {name: tensor for name, tensor in GOOD.items() if name != "lm_head.weight"}
    made = drafts.target()
    made.tensors = headless
    del made.config["tie_word_embeddings"]
    made.write(tmp_path / "silent")
    silent = TargetTensors(tmp_path / "silent", TargetSpec.from_folder(tmp_path / "silent"))
    assert silent.head().name == "model.embed_tokens.weight"
    assert found(tmp_path / "tied", GOOD, tie_word_embeddings=True).head().name == "model.embed_tokens.weight"
    with pytest.raises(InvalidInput, match="no tensor for the head"):
        found(tmp_path / "untied", headless).head()


@pytest.mark.parametrize(("model_type", "adds"), [
    ("llama", False), ("gemma", True), ("gemma3n_text", False), ("gemma4_text", False), ("qwen3_next", True),
    ("qwen3_5_moe_text", True), ("qwen3_moe", False)])
def test_families_that_add_one(model_type: str, adds: bool, tmp_path: Path) -> None:
    assert found(tmp_path, GOOD, model_type=model_type).adds_one == adds


def test_another_kind_of_norm_is_refused(tmp_path: Path) -> None:
    for name, tensors, model_type in (("bias", GOOD | {"model.norm.bias": ones(64)}, "llama"),
                                      ("family", GOOD, "starcoder2")):
        with pytest.raises(InvalidInput, match="no RMSNorm"):
            found(tmp_path / name, tensors, model_type=model_type).norm()
