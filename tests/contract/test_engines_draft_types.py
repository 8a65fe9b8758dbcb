"""The table of what a draft's `model_type` fills in, against the config classes of the installed transformers."""

from __future__ import annotations

from typing import Any

import pytest

from eyas_contract.engines.draft_types import DEFAULTS, with_defaults

SIZES = {"hidden_size": 96, "intermediate_size": 128, "num_attention_heads": 12, "vocab_size": 256,
         "pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
# What the class of `llama` does, where a config says nothing.
PLAIN = {"num_key_value_heads": 12, "head_dim": 8, "rms_norm_eps": 1e-6, "attention_bias": False,
         "tie_word_embeddings": False, "partial_rotary_factor": 1, "rope_theta": 10000.0}


@pytest.mark.parametrize("kind", ["llama", *DEFAULTS])
def test_the_table_says_what_the_class_fills_in(kind: str) -> None:
    config = pytest.importorskip("transformers").AutoConfig.for_model(kind, **SIZES)
    ours = PLAIN | with_defaults({"model_type": kind})
    rope: dict[str, Any] = getattr(config, "rope_parameters", None) or {}
    if "full_attention" not in rope:  # a rope per kind of layer: SGLang's Llama class stops at it
        assert rope["rope_theta"] == ours["rope_theta"]
        scaling = {key: value for key, value in rope.items() if key not in ("rope_theta", "partial_rotary_factor")}
        assert scaling == ours.get("rope_scaling", {"rope_type": "default"})
    for key in set(PLAIN) - {"rope_theta"}:
        theirs = getattr(config, key, None)
        assert (PLAIN[key] if theirs is None else theirs) == ours[key], key


def test_what_is_written_stays() -> None:
    rope = {"rope_type": "default", "rope_theta": 7.0}
    written = {"model_type": "gpt_oss", "head_dim": 16, "num_key_value_heads": 2, "rope_parameters": rope,
               "attention_bias": False, "rms_norm_eps": 1e-6}
    assert with_defaults(written) == written
    assert with_defaults({"model_type": ["gpt_oss"]}) == {"model_type": ["gpt_oss"]}
