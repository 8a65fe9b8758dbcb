"""What a draft's `model_type` adds to its config: the keys that its config class fills in where config.json has none.

Engines open a draft's config with the class of its `model_type`, whatever `architectures` says. A draft that took its
target's type over is given that family's defaults: half a head rotated (GLM), YaRN (gpt-oss), a bias, a tied head.
Source: transformers 5.12 `configuration_*.py`; a test compares the installed version's. Data and pure functions.
"""

from __future__ import annotations

from typing import Any

_GPT_OSS_ROPE = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
                 "original_max_position_embeddings": 4096}
# Where it is not what the class of `llama` does: as many key-value heads as heads, hidden / heads wide, theta 10000,
# eps 1e-6, no bias, no tie. Targets' families that draft folders were seen to take over.
DEFAULTS: dict[str, dict[str, Any]] = {
    "cohere2": {"tie_word_embeddings": True},
    "ernie4_5": {"num_key_value_heads": 2, "head_dim": 128, "tie_word_embeddings": True, "rms_norm_eps": 1e-5,
                 "rope_theta": 500000.0},
    "exaone4": {"num_key_value_heads": 32, "rms_norm_eps": 1e-5},
    "gemma2": {"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True},
    "gemma3_text": {"num_key_value_heads": 4, "head_dim": 256, "tie_word_embeddings": True},
    "glm4": {"num_key_value_heads": 2, "head_dim": 128, "rms_norm_eps": 1.5625e-7, "attention_bias": True,
             "partial_rotary_factor": 0.5},
    "glm4_moe": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "partial_rotary_factor": 0.5},
    "gpt_oss": {"num_key_value_heads": 8, "head_dim": 64, "rms_norm_eps": 1e-5, "attention_bias": True,
                "rope_theta": 150000.0, "rope_scaling": _GPT_OSS_ROPE},
    "llama4_text": {"num_key_value_heads": 8, "head_dim": 128, "rms_norm_eps": 1e-5, "rope_theta": 500000.0},
    "minimax_m2": {"num_key_value_heads": 8, "head_dim": 128, "rope_theta": 5000000.0},
    "mistral": {"num_key_value_heads": 8},
    "mixtral": {"num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1000000.0},
    "phi3": {"rms_norm_eps": 1e-5},
    "qwen2": {"num_key_value_heads": 32},
    "qwen2_moe": {"num_key_value_heads": 16},
    "qwen3": {"num_key_value_heads": 32, "head_dim": 128},
    "qwen3_5_text": {"num_key_value_heads": 4, "head_dim": 256, "partial_rotary_factor": 0.25},
    "qwen3_moe": {"num_key_value_heads": 4},
    "qwen3_next": {"num_key_value_heads": 2, "head_dim": 256, "partial_rotary_factor": 0.25},
    "qwen3_vl_text": {"num_key_value_heads": 32, "head_dim": 128, "rope_theta": 500000.0},
    "seed_oss": {"num_key_value_heads": 8, "head_dim": 128, "attention_bias": True},
    "smollm3": {"num_key_value_heads": 4, "tie_word_embeddings": True, "rope_theta": 2000000.0},
}


def with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """A flat draft config with what its `model_type` adds."""
    rope = config.get("rope_parameters") or config.get("rope_scaling")
    given = {key for key in config if key != "rope_scaling"} | (set(rope) if isinstance(rope, dict) else set())
    if rope:
        given.add("rope_scaling")
    added = DEFAULTS.get(str(config.get("model_type")), {})
    return config | {key: value for key, value in added.items() if key not in given}
