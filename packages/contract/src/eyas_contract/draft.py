"""DraftSpec: the draft model's shape, and the one table of its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from eyas_contract.target import Rope


@dataclass(frozen=True)
class DraftSpec:
    """An EAGLE-3 draft.

    Attributes:
        kind: `llama` (served as LlamaForCausalLMEagle3) or `mla` (Eagle3DeepseekV2ForCausalLM).
        num_layers: decoder layers; only layer 0 reads [embedding, hidden] side by side (input 2*hidden_size).
        hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim: sizes.
        target_hidden_size, num_aux: `fc` maps num_aux * target_hidden_size to hidden_size.
        draft_vocab_size, target_vocab_size: rows of the head and of the (target's) embedding.
        max_position_embeddings, rope, rms_norm_eps, hidden_act: as in the target, or the draft's own.
        fc_norm: an RMSNorm per aux state before `fc` (EAGLE-3.1).
        norm_output: the normed state, not the residual stream, is fed to the next step (EAGLE-3.1).
        own_embedding: the checkpoint brings `embed_tokens`; otherwise the target's is shared.
        dtype: dtype of the exported weights.
    """

    kind: Literal["llama", "mla"]
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    target_hidden_size: int
    num_aux: int
    draft_vocab_size: int
    target_vocab_size: int
    max_position_embeddings: int
    rope: Rope
    rms_norm_eps: float
    hidden_act: str
    fc_norm: bool
    norm_output: bool
    own_embedding: bool
    dtype: str

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")
        if self.draft_vocab_size > self.target_vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} exceeds the target's {self.target_vocab_size}")


def llama_tensors(spec: DraftSpec) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a Llama-style draft's weights, in eyas's own (trainer) naming `layers.{i}.*`.

    `d2t` and `t2d` are not weights: export derives them from the VocabMap.
    """
    h, hd = spec.hidden_size, spec.head_dim
    table: dict[str, tuple[int, ...]] = {"fc.weight": (h, spec.num_aux * spec.target_hidden_size)}
    if spec.fc_norm:
        table |= {f"fc_norm.{i}.weight": (spec.target_hidden_size,) for i in range(spec.num_aux)}
    for i in range(spec.num_layers):
        width = 2 * h if i == 0 else h
        table |= {
            f"layers.{i}.input_layernorm.weight": (h,),
            f"layers.{i}.hidden_norm.weight": (h,),
            f"layers.{i}.self_attn.q_proj.weight": (spec.num_heads * hd, width),
            f"layers.{i}.self_attn.k_proj.weight": (spec.num_kv_heads * hd, width),
            f"layers.{i}.self_attn.v_proj.weight": (spec.num_kv_heads * hd, width),
            f"layers.{i}.self_attn.o_proj.weight": (h, spec.num_heads * hd),
            f"layers.{i}.post_attention_layernorm.weight": (h,),
            f"layers.{i}.mlp.gate_proj.weight": (spec.intermediate_size, h),
            f"layers.{i}.mlp.up_proj.weight": (spec.intermediate_size, h),
            f"layers.{i}.mlp.down_proj.weight": (h, spec.intermediate_size),
        }
    table |= {"norm.weight": (h,), "lm_head.weight": (spec.draft_vocab_size, h)}
    if spec.own_embedding:
        table["embed_tokens.weight"] = (spec.target_vocab_size, h)
    return table
