"""Norm and head of target families: head(norm(state)) is what the model itself computes, or the family is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

from eyas_contract import InvalidInput, TargetSpec
from eyas_draft.target_model import TargetModel
from eyas_draft.target_weights import TargetWeights
from eyas_draft.ttt import Teacher

H, V = 32, 48
SIZES: dict[str, Any] = {
    "vocab_size": V, "hidden_size": H, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64}
HYBRID = SIZES | {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8,
                  "linear_value_head_dim": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16,
           "shared_expert_intermediate_size": 16}


def saved(model: PreTrainedModel, folder: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """Written with a random final norm; states before that norm [T, H], and the logits [T, V] of random tokens."""
    torch.manual_seed(0)
    kept: list[torch.Tensor] = []
    decoder = model.get_decoder()
    with torch.no_grad():
        decoder.norm.weight.normal_(0, 0.7)
        if getattr(decoder.norm, "bias", None) is not None:
            decoder.norm.bias.normal_()
        model.get_output_embeddings().weight.normal_()
    decoder.norm.register_forward_pre_hook(lambda _module, args: kept.append(args[0][0]))
    with torch.no_grad():
        logits = model.eval()(torch.randint(0, V, (1, 24))).logits[0]
    model.save_pretrained(folder)
    return kept[0], logits


@pytest.mark.parametrize("model", [
    pytest.param(lambda: Qwen3NextForCausalLM(Qwen3NextConfig(**HYBRID, **EXPERTS)), id="qwen3_next"),
    pytest.param(lambda: Qwen3_5ForCausalLM(Qwen3_5TextConfig(**HYBRID)), id="qwen3_5"),
    pytest.param(lambda: Gemma3ForCausalLM(Gemma3TextConfig(**SIZES)), id="gemma3"),
])
def test_a_norm_that_adds_one_gives_the_models_logits(model: Any, tmp_path: Path) -> None:
    states, logits = saved(model(), tmp_path)
    weights = TargetWeights.load(tmp_path, TargetSpec.from_folder(tmp_path))
    torch.testing.assert_close(weights.normed(states, weights.norm_h) @ weights.head_vh.T, logits, atol=1e-4, rtol=1e-4)


def test_the_drafts_first_norms_add_one_too(tmp_path: Path) -> None:
    saved(Qwen3NextForCausalLM(Qwen3NextConfig(**HYBRID, **EXPERTS)), tmp_path)
    last = TargetWeights.load(tmp_path, TargetSpec.from_folder(tmp_path)).last_layer
    assert torch.equal(last["post_attention_layernorm.weight"], torch.ones(H))  # stored as zeros


@pytest.mark.parametrize("model", [
    pytest.param(lambda: Starcoder2ForCausalLM(Starcoder2Config(**SIZES)), id="starcoder2"),
    pytest.param(lambda: StableLmForCausalLM(StableLmConfig(**SIZES)), id="stablelm"),
])
def test_a_norm_with_a_bias_is_refused(model: Any, tmp_path: Path) -> None:
    saved(model(), tmp_path)
    spec = TargetSpec.from_folder(tmp_path)
    with pytest.raises(InvalidInput, match="rms_norm_eps"):
        TargetWeights.load(tmp_path, spec)
    config = json.loads((tmp_path / "config.json").read_text()) | {"rms_norm_eps": 1e-5}
    (tmp_path / "config.json").write_text(json.dumps(config))
    for model_type in (spec.model_type, "another"):  # by its name, and by its bias
        with pytest.raises(InvalidInput, match="no RMSNorm"):
            TargetWeights.load(tmp_path, replace(spec, model_type=model_type))


def test_capped_logits_are_refused(tmp_path: Path) -> None:
    saved(Gemma3ForCausalLM(Gemma3TextConfig(**SIZES, final_logit_softcapping=30.0)), tmp_path)
    with pytest.raises(InvalidInput, match=r"final_logit_softcapping 30\.0"):
        TargetWeights.load(tmp_path, TargetSpec.from_folder(tmp_path))


def test_a_prediction_layers_embedding_is_not_the_targets(tiny_target: Path, tmp_path: Path) -> None:
    spec = TargetSpec.from_folder(tiny_target)
    tensors = load_file(tiny_target / "model.safetensors")
    extra = {f"model.layers.{spec.num_layers}.embed_tokens.weight": tensors["model.embed_tokens.weight"] + 1,
             f"model.layers.{spec.num_layers}.shared_head.norm.weight": tensors["model.norm.weight"] + 1,
             "mtp.norm.weight": tensors["model.norm.weight"] + 1}
    save_file(tensors | extra, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((tiny_target / "config.json").read_text())
    weights = TargetWeights.load(tmp_path, spec)
    assert torch.equal(weights.norm_h, tensors["model.norm.weight"])
    assert torch.equal(weights.embedding_vh, tensors["model.embed_tokens.weight"])


def test_the_reference_decoder_refuses_linear_attention(tmp_path: Path) -> None:
    saved(Qwen3NextForCausalLM(Qwen3NextConfig(**HYBRID, **EXPERTS)), tmp_path)
    with pytest.raises(InvalidInput, match="linear_attention"):
        TargetModel(tmp_path, (1, 2), torch.float32, torch.device("cpu"))


@pytest.mark.parametrize("post_norm", [False, True])
def test_the_teacher_reads_the_states_that_the_store_holds(post_norm: bool) -> None:
    """A state that is normed already is not normed again, nor one that is not handed to the head as it is."""
    g = torch.Generator().manual_seed(3)
    head, last, norm = (torch.randn(*shape, generator=g) for shape in ((9, 4), (5, 4), (4,)))
    ids, eps = torch.tensor([1, 2, 5, 8]), 1e-5
    teacher = Teacher(TargetWeights(head, head, norm, eps, {}), ids, post_norm=post_norm, device=torch.device("cpu"),
                      dtype=torch.float32)
    read = last if post_norm else last / (last.square().mean(-1, keepdim=True) + eps).sqrt() * norm
    logits = read @ head.T
    torch.testing.assert_close(teacher.probabilities(last), logits[:, ids].softmax(-1))
    choices = logits.argmax(-1).tolist()
    assert teacher.proposable(last).tolist() == [choice in ids.tolist() for choice in choices]
    assert 0 < sum(choice in ids.tolist() for choice in choices) < 5  # or it would show nothing


def test_a_draft_of_the_whole_vocabulary_can_propose_every_choice() -> None:
    head, last = torch.eye(6, 4), torch.randn(3, 4)
    teacher = Teacher(TargetWeights(head, head, torch.ones(4), 1e-5, {}), torch.arange(6), post_norm=True,
                      device=torch.device("cpu"), dtype=torch.float32)
    assert teacher.covers_all
    assert teacher.proposable(last).tolist() == [True] * 3
