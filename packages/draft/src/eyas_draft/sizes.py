"""The draft's shape, from a target's config and a few settings; needs no weights and no torch."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol

from eyas_contract import DraftSpec, InvalidInput, MlaSizes, Rope, TargetSpec
from eyas_contract.engines.checks.config_values import value_faults
from eyas_contract.engines.wanted import MLA_KEYS
from eyas_contract.target import read_config, text_config


class Wishes(Protocol):
    """What a run's settings, or a plan's, say about the draft."""

    @property
    def target(self) -> Path: ...
    @property
    def kind(self) -> Literal["auto", "llama", "mla"]: ...
    @property
    def num_layers(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def fc_norm(self) -> bool: ...
    @property
    def norm_output(self) -> bool: ...


def draft_sizes(wishes: Wishes, target: TargetSpec, num_aux: int, vocab_size: int) -> DraftSpec:
    """The target's own sizes where the wishes leave them open.

    Raises:
        InvalidInput: a target whose config does not name its attention heads, or the sizes of the MLA asked for, or
            whose sizes are no numbers.
    """
    plain = text_config(read_config(wishes.target))
    faults = value_faults(plain)
    if faults:
        raise InvalidInput(str(wishes.target / "config.json"), "; ".join(faults), "sizes in positive whole numbers, "
                           "the same in every layer, by eyas-draft", "Take another target, or restore the file.")
    heads = plain.get("num_attention_heads") or 0
    if not heads:
        raise InvalidInput(str(wishes.target / "config.json"), "no num_attention_heads",
                           "the target's attention sizes, from which the draft's follow", "Restore the file.")
    mla = _mla_sizes(wishes, plain)
    return DraftSpec(
        kind="mla" if mla else "llama", num_layers=wishes.num_layers, hidden_size=target.hidden_size,
        intermediate_size=wishes.intermediate_size or plain.get("intermediate_size") or 4 * target.hidden_size,
        num_heads=heads, num_kv_heads=heads if mla else int(plain.get("num_key_value_heads") or heads),
        head_dim=mla.qk_head_dim if mla else _head_dim(plain, target.hidden_size // heads), mla=mla,
        target_hidden_size=target.hidden_size, num_aux=num_aux,
        draft_vocab_size=vocab_size, target_vocab_size=target.vocab_size,
        max_position_embeddings=target.max_position_embeddings, rope=_whole(target.rope),
        rms_norm_eps=target.rms_norm_eps,
        hidden_act="silu",  # whatever the target's: engines' draft layers compute no other
        fc_norm=wishes.fc_norm, norm_output=wishes.norm_output,
        own_embedding=False, dtype=target.dtype)


def _mla_sizes(wishes: Wishes, plain: dict[str, Any]) -> MlaSizes | None:
    """The target's, where the draft is to be an MLA draft: by the wishes, or since the target has them all."""
    missing = [key for key in MLA_KEYS if not plain.get(key)]
    if wishes.kind == "llama" or (wishes.kind == "auto" and missing):
        return None
    if missing:
        raise InvalidInput(str(wishes.target / "config.json"), f"no {', '.join(missing)}",
                           "the target's MLA sizes, from which an MLA draft's follow, by --kind mla",
                           "Train a draft of --kind llama, which any target takes.")
    return MlaSizes(**{key: int(plain[key]) for key in MLA_KEYS})


def _whole(rope: Rope) -> Rope:
    """The target's rope, over the whole of a head where the target's is over a part: SGLang's drafts, which do not
    read how large the part is in `rope_parameters`, rotate all of it, and vLLM's would not."""
    return replace(rope, scaling=tuple(pair for pair in rope.scaling if pair[0] != "partial_rotary_factor"))


def _head_dim(plain: dict[str, Any], usual: int) -> int:
    """The target's head width; an MLA target's config means its rotary part by `head_dim`, if it has one."""
    return usual if plain.get("kv_lora_rank") else int(plain.get("head_dim") or usual)
