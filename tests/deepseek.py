"""A tiny DeepSeek-V3-like target: dense layers, MLA, YaRN; random, but sure of what it says."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from transformers import AutoTokenizer, DeepseekV3Config, DeepseekV3ForCausalLM

SHARPNESS = 6.0  # of the head: random logits alone would make all tokens nearly as likely
HIDDEN, HEADS, Q_RANK, KV_RANK, NOPE, ROPE, VALUE, INNER, LAYERS = 64, 4, 48, 32, 16, 8, 16, 96, 8
YARN = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 4.0, "original_max_position_embeddings": 512,
        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}


def write_target(folder: Path, tokenizer: Path) -> Path:
    """Save the target with the tiny Llama's tokenizer."""
    torch.manual_seed(0)
    words = AutoTokenizer.from_pretrained(tokenizer)
    config = DeepseekV3Config(
        vocab_size=(len(words) + 63) // 64 * 64, hidden_size=HIDDEN, intermediate_size=INNER, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS, q_lora_rank=Q_RANK, kv_lora_rank=KV_RANK,
        qk_nope_head_dim=NOPE, qk_rope_head_dim=ROPE, v_head_dim=VALUE, first_k_dense_replace=LAYERS,
        n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1, moe_intermediate_size=32,
        max_position_embeddings=2048, rope_parameters=YARN, tie_word_embeddings=False, initializer_range=0.08,
        bos_token_id=None, eos_token_id=words.eos_token_id, pad_token_id=words.pad_token_id)
    model = DeepseekV3ForCausalLM(config).float()
    with torch.no_grad():
        model.lm_head.weight *= SHARPNESS
        model.lm_head.weight[len(words):] = 0  # rows beyond the tokenizer, which no answer may hold
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    plain = json.loads((folder / "config.json").read_text())
    scaling = {key: value for key, value in YARN.items() if key not in ("rope_theta", "rope_type")} | {"type": "yarn"}
    plain |= {"rope_theta": YARN["rope_theta"], "rope_scaling": scaling, "moe_layer_freq": 1}
    (folder / "config.json").write_text(json.dumps(plain))
    return folder
