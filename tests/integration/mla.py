"""A tiny DeepSeek-V3-like target (dense layers, MLA, YaRN) and an MLA draft of it, both random."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, DeepseekV3Config, DeepseekV3ForCausalLM

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
    DeepseekV3ForCausalLM(config).float().save_pretrained(folder)
    words.save_pretrained(folder)
    plain = json.loads((folder / "config.json").read_text())
    scaling = {key: value for key, value in YARN.items() if key not in ("rope_theta", "rope_type")} | {"type": "yarn"}
    plain |= {"rope_theta": YARN["rope_theta"], "rope_scaling": scaling, "moe_layer_freq": 1}
    (folder / "config.json").write_text(json.dumps(plain))
    return folder


def write_draft(folder: Path, target: Path) -> Path:
    """Save an MLA draft of the full vocabulary, in SGLang's names."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(1)
    source = json.loads((target / "config.json").read_text())
    keys = ("hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "q_lora_rank",
            "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "vocab_size", "rms_norm_eps",
            "max_position_embeddings", "rope_theta", "rope_scaling", "hidden_act")
    config = {key: source[key] for key in keys} | {
        "architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2", "num_hidden_layers": 1,
        "draft_vocab_size": source["vocab_size"], "tie_word_embeddings": False, "torch_dtype": "float32",
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True}}
    shapes = {"fc": (HIDDEN, 3 * HIDDEN), "lm_head": (source["vocab_size"], HIDDEN)}
    attention = {"q_a_proj": (Q_RANK, 2 * HIDDEN), "q_b_proj": (HEADS * (NOPE + ROPE), Q_RANK),
                 "kv_a_proj_with_mqa": (KV_RANK + ROPE, 2 * HIDDEN), "kv_b_proj": (HEADS * (NOPE + VALUE), KV_RANK),
                 "o_proj": (HIDDEN, HEADS * VALUE)}
    shapes |= {f"midlayer.self_attn.{name}": shape for name, shape in attention.items()}
    shapes |= {f"midlayer.mlp.{name}_proj": (INNER, HIDDEN) for name in ("gate", "up")}
    shapes |= {"midlayer.mlp.down_proj": (HIDDEN, INNER)}
    norms = {"norm": HIDDEN, "midlayer.input_layernorm": HIDDEN, "midlayer.hidden_norm": HIDDEN,
             "midlayer.post_attention_layernorm": HIDDEN, "midlayer.self_attn.q_a_layernorm": Q_RANK,
             "midlayer.self_attn.kv_a_layernorm": KV_RANK}
    tensors = {f"{name}.weight": torch.randn(shape) * 0.15 for name, shape in shapes.items()}
    tensors |= {f"{name}.weight": 1 + 0.3 * torch.rand(size) for name, size in norms.items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))
    return folder
