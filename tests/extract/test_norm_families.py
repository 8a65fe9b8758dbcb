"""Norms that multiply by 1 + weight, and tensors that only look like the target's, in extraction's checks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from eyas_contract import InvalidInput
from eyas_extract.golden import Golden
from eyas_extract.loose import check_files

H, V, T = 32, 48, 24


def written(folder: Path, tensors: dict[str, torch.Tensor], **changes: Any) -> Path:
    """A target of nothing but these tensors."""
    folder.mkdir()
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": H, "num_hidden_layers": 8,
              "vocab_size": V, "rms_norm_eps": 1e-6, "max_position_embeddings": 64, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(config | changes))
    save_file(tensors, folder / "model.safetensors")
    return folder


def test_qwen3_next_states_lead_to_the_models_log_probabilities(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Qwen3NextForCausalLM(Qwen3NextConfig(
        vocab_size=V, hidden_size=H, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, head_dim=8,
        num_key_value_heads=2, linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8,
        linear_value_head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16,
        shared_expert_intermediate_size=16)).eval()
    kept: list[torch.Tensor] = []
    with torch.no_grad():
        model.model.norm.weight.normal_(0, 0.5)
        model.lm_head.weight.normal_()
        model.model.norm.register_forward_pre_hook(lambda _module, args: kept.append(args[0][0]))
        ids = torch.randint(0, V, (1, T))
        logits = model(ids).logits[0]
    model.save_pretrained(tmp_path)
    wanted = logits.log_softmax(-1)[:-1].gather(-1, ids[0, 1:, None])[:, 0].tolist()
    assert "within" in Golden(tmp_path).compare(kept[0], ids[0].tolist(), wanted, "Qwen3Next", "F32")


def test_only_the_text_models_norm_is_taken(tmp_path: Path) -> None:
    head = torch.randn(V, H)
    for name, norm, other in (("vl", "model.language_model.norm.weight", "model.visual.merger.norm.weight"),
                              ("mtp", "model.norm.weight", "mtp.norm.weight"),
                              ("layer", "model.norm.weight", "model.layers.8.shared_head.norm.weight")):
        folder = written(tmp_path / name, {norm: torch.full((H,), 7.0), other: torch.zeros(H), "lm_head.weight": head})
        assert torch.equal(Golden(folder).norm, torch.full((H,), 7.0)), name


def test_a_layer_norm_is_refused(tmp_path: Path) -> None:
    folder = written(tmp_path / "t", {"model.norm.weight": torch.ones(H), "model.norm.bias": torch.ones(H),
                                      "lm_head.weight": torch.randn(V, H)})
    with pytest.raises(InvalidInput, match=r"model\.norm\.bias"):
        Golden(folder)


@pytest.mark.parametrize(("model_type", "side"), [("gemma", "pre_norm"), ("llama", "neither"),
                                                  ("starcoder2", "not checked")])
def test_a_proof_goes_by_the_familys_norm(model_type: str, side: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    weight, head, states = torch.randn(H), torch.randn(V, H), torch.randn(T, H)
    target = written(tmp_path / "target", {"model.norm.weight": weight, "lm_head.weight": head}, model_type=model_type)
    normed = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + 1e-6) * (1 + weight)
    teacher = tmp_path / "teacher.json"
    teacher.write_text(json.dumps({"top1": (normed @ head.T).argmax(-1).tolist()}))
    (tmp_path / "files").mkdir()
    save_file({"input_ids": torch.arange(T), "aux_hidden_states": torch.randn(T, 3 * H), "last_hidden_state": states},
              tmp_path / "files" / "hs_0.safetensors")
    assert check_files(tmp_path / "files", target, None, teacher).last_state == side
