"""Which values a config may hold at all; what lies outside is named before anything is computed from it."""

from __future__ import annotations

from typing import Any

from eyas_contract.engines.wanted import MLA_KEYS

REQUIRED = ("hidden_size", "num_attention_heads", "intermediate_size", "vocab_size")
_COUNTS = (*REQUIRED, "num_key_value_heads", "head_dim", "num_hidden_layers", "draft_vocab_size",
           "intermediate_size_mlp", "target_hidden_size", "num_aux_hidden_states", "max_position_embeddings", *MLA_KEYS)
SWITCHES = ("attention_bias", "bias", "fc_norm", "norm_before_fc", "norm_before_residual", "norm_output",
            "tie_word_embeddings", "use_aux_norm")
_LARGEST = 2**31 - 1


def value_faults(config: dict[str, Any]) -> list[str]:
    """Sizes that are no positive whole numbers, thetas and eps that are no positive numbers, rope that is no object."""
    wrong = [f"{key} {_short(config[key])}" for key in _COUNTS if config.get(key) is not None
             and (type(config[key]) is not int or not 0 < config[key] <= _LARGEST)]
    wrong += [f"{key} {_short(config[key])}" for key in ("rms_norm_eps", "rope_theta")
              if config.get(key) is not None and not _positive(config[key])]
    wrong += [f"{key} is no object" for key in ("eagle_config", "rope_scaling", "rope_parameters")
              if config.get(key) is not None and not isinstance(config[key], dict)]
    return wrong + [f"{key}.{name} {_short(value)}" for key in ("rope_scaling", "rope_parameters")
                    for name, value in _items(config.get(key)) if name in ("rope_theta", "factor")
                    and not _positive(value)]


def _items(value: Any) -> list[tuple[str, Any]]:
    return list(value.items()) if isinstance(value, dict) else []


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1e300


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
