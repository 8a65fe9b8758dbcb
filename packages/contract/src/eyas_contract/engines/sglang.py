"""SGLang: the files and flags it reads, written from a contract. Nothing else in eyas writes them.

Read in SGLang 0.5.10 to 0.5.23: `srt/models/llama_eagle3.py`, `srt/models/kimi_k25_eagle3.py`,
`srt/model_executor/model_runner_components/spec_aux_hidden_state.py`, and each target's
`set_eagle3_layers_to_capture`.
"""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from eyas_contract.contract import Contract
from eyas_contract.draft import DraftSpec
from eyas_contract.engines.sglang_targets import ALWAYS_PLUS, FINAL_ID, FIRST_ID, HOOKS, rule
from eyas_contract.errors import InvalidInput

Version = tuple[int, int, int]
OLDEST: Version = (0, 5, 10)
NEWEST: Version = (0, 5, 23)
KNOWN: tuple[Version, ...] = tuple((0, 5, patch) for patch in range(OLDEST[2], NEWEST[2] + 1))
DRAFT_CLASSES = {"llama": "LlamaForCausalLMEagle3", "mla": "Eagle3DeepseekV2ForCausalLM"}

# Target classes whose hook (since 0.5.13) adds one only when the first id is 1.
FIRST_ID_DECIDES = frozenset(name for name, rows in HOOKS.items() if any(rule == FIRST_ID for _, rule in rows))

def parse_version(text: str) -> Version:
    """`0.5.20`, `0.5.10.post1` -> the three numbers. Raises InvalidInput for anything else."""
    match = re.match(r"^v?(\d+)\.(\d+)\.(\d+)", text.strip())
    if not match:
        raise InvalidInput("engine version", repr(text), "three numbers such as 0.5.20, by eyas-contract",
                           "Give the version of the installed sglang.")
    return (int(match[1]), int(match[2]), int(match[3]))


def layer_ids_to_engine(ids: tuple[int, ...], architecture: str, version: Version) -> tuple[int, ...]:
    """The numbers to write into `eagle_config` so that this engine captures the outputs of layers `ids`.

    Raises:
        InvalidInput: the class cannot express these layers.
    """
    if rule(architecture, version) == FIRST_ID and ids[0] != 1:
        if ids[0] == 0:  # boundary ids would begin with 1, which the hook takes for output ids
            raise InvalidInput(f"aux_layer_ids {list(ids)}", "they begin with layer 0",
                               f"ids that {architecture} in SGLang {version_text(version)} can capture",
                               "Extract with a first layer of 1 or more.")
        return tuple(i + 1 for i in ids)
    return ids


def layer_ids_from_engine(written: tuple[int, ...] | None, architecture: str, num_layers: int,
                          version: Version) -> tuple[int, ...]:
    """What the engine will capture for the ids in a config (None: absent), as outputs of layers.

    A class without a row in `sglang_targets` is answered as most classes read: ids are outputs.
    """
    how = rule(architecture, version)
    if written is None:
        boundaries = (2, num_layers // 2, num_layers - 3)
        return boundaries if how == ALWAYS_PLUS else tuple(i - 1 for i in boundaries)
    if how == FIRST_ID and (not written or written[0] != 1):
        return tuple(i - 1 for i in written)
    if how == FINAL_ID and written and max(written) == num_layers:
        return tuple(i - 1 for i in written)
    return written


def export_name(name: str) -> str:
    """Trainer's name -> the one spelling that every SGLang version and both draft classes accept."""
    return re.sub(r"^layers\.0\.", "midlayer.", name)


def import_name(name: str) -> str:
    """Inverse of `export_name`."""
    return re.sub(r"^midlayer\.", "layers.0.", name)


def export_config(contract: Contract, version: Version = NEWEST) -> dict[str, Any]:
    """The draft's `config.json` for SGLang, from the contract alone.

    Raises:
        InvalidInput: the contract lacks its draft section, or asks for what SGLang cannot serve.
    """
    draft = contract.draft
    if draft is None:
        raise InvalidInput("contract", "no draft section", "a trained draft's contract, by export",
                           "Train first; export reads the run folder.")
    faults = _unserved(draft, version)
    if faults:
        raise InvalidInput("contract.draft", "; ".join(faults),
                           f"what SGLang {version_text(version)} serves, by export",
                           "Name a newer --engine-version, or train without these.")
    ids = layer_ids_to_engine(contract.capture.aux_layer_ids, contract.target.architecture, version)
    config: dict[str, Any] = {
        "architectures": [DRAFT_CLASSES[draft.kind]], "model_type": "llama" if draft.mla is None else "kimi_k2",
        "hidden_size": draft.hidden_size, "intermediate_size": draft.intermediate_size,
        "num_hidden_layers": draft.num_layers, "num_attention_heads": draft.num_heads,
        "num_key_value_heads": draft.num_kv_heads, **_head_widths(draft),
        "hidden_act": draft.hidden_act, "rms_norm_eps": draft.rms_norm_eps,
        "vocab_size": draft.target_vocab_size, "draft_vocab_size": draft.draft_vocab_size,
        "max_position_embeddings": draft.max_position_embeddings,
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "use_cache": True,
        "dtype": draft.dtype, "torch_dtype": draft.dtype,
        "num_aux_hidden_states": draft.num_aux, "fc_norm": draft.fc_norm, "norm_output": draft.norm_output,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": list(ids), "use_aux_hidden_state": True},
        **_rope(draft),
    }
    if draft.target_hidden_size != draft.hidden_size:
        config["target_hidden_size"] = draft.target_hidden_size
    return config


def _unserved(draft: DraftSpec, version: Version) -> list[str]:
    """What of an MLA draft this version's class does not build or read."""
    if draft.kind != "mla":
        return []
    faults = ["an MLA draft, which SGLang has since 0.5.12"] if version < (0, 5, 12) else []
    if draft.num_layers != 1:
        faults.append(f"an MLA draft of {draft.num_layers} layers, where SGLang builds one")
    if version < (0, 5, 13) and (draft.fc_norm or draft.norm_output):
        faults.append("fc_norm or norm_output in an MLA draft, which SGLang reads since 0.5.13")
    return faults


def _head_widths(draft: DraftSpec) -> dict[str, int]:
    return {"head_dim": draft.head_dim} if draft.mla is None else dataclasses.asdict(draft.mla)


def _rope(draft: DraftSpec) -> dict[str, Any]:
    """Both spellings, agreeing: transformers 5 reads `rope_parameters`, older servers theta and scaling."""
    parameters = draft.rope.to_config()
    scaling = None if draft.rope.type == "default" else {k: v for k, v in parameters.items() if k != "rope_theta"}
    return {"rope_parameters": parameters, "rope_theta": draft.rope.theta, "rope_scaling": scaling}


def server_flags(draft_path: str, steps: int, topk: int, num_draft_tokens: int) -> list[str]:
    """The speculation flags of `sglang.launch_server` for an EAGLE-3 draft.

    Raises:
        InvalidInput: steps, topk and draft tokens that do not go together (every fault named).
    """
    faults = [f"{name} {value}" for name, value in
              (("steps", steps), ("topk", topk), ("draft tokens", num_draft_tokens)) if value < 1]
    most = 1 + topk + (steps - 1) * topk * topk if steps > 0 else 0
    if not faults and topk == 1 and num_draft_tokens != steps + 1:
        faults.append(f"draft tokens {num_draft_tokens} in a chain of {steps} steps (SGLang forces {steps + 1})")
    if not faults and not 2 <= num_draft_tokens <= most:
        faults.append(f"draft tokens {num_draft_tokens}, where {steps} steps of topk {topk} make 2 to {most}")
    if faults:
        raise InvalidInput("--steps/--topk/--num-draft-tokens", "; ".join(faults), "a tree SGLang can build",
                           "For a chain give topk 1 and draft tokens = steps + 1.")
    return ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", draft_path,
            "--speculative-num-steps", str(steps), "--speculative-eagle-topk", str(topk),
            "--speculative-num-draft-tokens", str(num_draft_tokens)]


def version_text(version: Version) -> str:
    """(0, 5, 20) -> `0.5.20`."""
    return ".".join(map(str, version))
