"""SGLang's `--json-model-override-args`, meant for the target, is laid over the draft's config as well.

Source: `ModelConfig.from_server_args` and `get_config` of SGLang 0.5.20: one text for both models, set on the loaded
config. A rope replaces the draft's whole rope, theta included: where the text names no theta, it is 10000.
"""

from __future__ import annotations

import json
from typing import Any

from eyas_contract.engines.checks.config_values import REQUIRED, SWITCHES, value_faults
from eyas_contract.engines.wanted import MLA_KEYS
from eyas_contract.errors import InvalidInput
from eyas_contract.target import Rope

FLAG = "--json-model-override-args"
_ROPE = ("rope_parameters", "rope_scaling")
# What the draft classes read; the positions of its table are the launch's to widen.
_READ = (*REQUIRED, *SWITCHES, *MLA_KEYS, *_ROPE, "architectures", "draft_vocab_size", "eagle_config", "head_dim",
         "hidden_act", "model_type", "num_aux_hidden_states", "num_hidden_layers", "num_key_value_heads",
         "partial_rotary_factor", "rms_norm_eps", "rope_theta", "target_hidden_size")


def overridden(draft: dict[str, Any], text: str | None) -> list[str]:
    """The keys of a draft's config that the flag would change, with both values.

    Args:
        draft: the draft's config.
        text: the flag's value; None where it is not given.

    Raises:
        InvalidInput: text that is no JSON object, or whose rope is none.
    """
    try:
        given = json.loads(text or "{}")
    except (ValueError, RecursionError) as error:
        raise InvalidInput(FLAG, f"not JSON ({error})", "a JSON object, by SGLang", "Correct the flag.") from error
    wrong = ["no object"] if not isinstance(given, dict) else \
        value_faults({key: given[key] for key in _ROPE if key in given})
    if wrong:
        raise InvalidInput(FLAG, "; ".join(wrong), "a JSON object, by SGLang", "Correct the flag.")
    return [f"{key} {json.dumps(value)[:160]}, the draft's own {json.dumps(draft.get(key))[:160]}"
            for key, value in given.items() if key in _READ and not _same(draft, key, value)]


def _same(draft: dict[str, Any], key: str, value: Any) -> bool:
    if key in _ROPE and value:
        return Rope.from_config({"rope_parameters": value}) == Rope.from_config(draft)
    return bool(draft.get(key) == value)
