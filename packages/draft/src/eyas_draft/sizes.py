"""The draft's shape, from a target's config and a few settings; needs no weights and no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

from eyas_contract import DraftSpec, InvalidInput, TargetSpec
from eyas_contract.target import read_config, text_config


class Wishes(Protocol):
    """What a run's settings, or a plan's, say about the draft."""

    @property
    def target(self) -> Path: ...
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
        InvalidInput: a target whose config does not name its attention heads.
    """
    plain = text_config(read_config(wishes.target))
    heads = int(plain.get("num_attention_heads", 0))
    if not heads:
        raise InvalidInput(str(wishes.target / "config.json"), "no num_attention_heads",
                           "the target's attention sizes, from which the draft's follow", "Restore the file.")
    return DraftSpec(
        kind="llama", num_layers=wishes.num_layers, hidden_size=target.hidden_size,
        intermediate_size=wishes.intermediate_size or int(plain.get("intermediate_size", 4 * target.hidden_size)),
        num_heads=heads, num_kv_heads=int(plain.get("num_key_value_heads") or heads),
        head_dim=int(plain.get("head_dim") or target.hidden_size // heads),
        target_hidden_size=target.hidden_size, num_aux=num_aux,
        draft_vocab_size=vocab_size, target_vocab_size=target.vocab_size,
        max_position_embeddings=target.max_position_embeddings, rope=target.rope, rms_norm_eps=target.rms_norm_eps,
        hidden_act=str(plain.get("hidden_act", "silu")), fc_norm=wishes.fc_norm, norm_output=wishes.norm_output,
        own_embedding=False, dtype=target.dtype)
