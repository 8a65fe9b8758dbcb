"""DraftSpec: the draft model's shape, and the one table of its tensors."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from eyas_contract.canonical import LATER
from eyas_contract.target import Rope


@dataclass(frozen=True)
class MlaSizes:
    """Multi-head latent attention, in the words of DeepSeek's configs.

    Attributes:
        q_lora_rank, kv_lora_rank: widths of the queries' and of the keys' and values' latent.
        qk_nope_head_dim, qk_rope_head_dim: a head's width without and with rotary embedding; the latter part of the
            keys is shared by all heads.
        v_head_dim: width of a head's values.
    """

    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int

    @property
    def qk_head_dim(self) -> int:
        """A head's width in queries and keys."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim


@dataclass(frozen=True)
class DraftSpec:
    """An EAGLE-3 draft.

    Attributes:
        kind: `llama` (served as LlamaForCausalLMEagle3) or `mla` (Eagle3DeepseekV2ForCausalLM).
        num_layers: decoder layers; only layer 0 reads [embedding, hidden] side by side (input 2*hidden_size).
        hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim: sizes; of an MLA draft num_kv_heads equals
            num_heads, and head_dim is that of queries and keys.
        target_hidden_size, num_aux: `fc` maps num_aux * target_hidden_size to hidden_size.
        draft_vocab_size, target_vocab_size: rows of the head and of the (target's) embedding.
        max_position_embeddings, rope, rms_norm_eps: as in the target, or the draft's own.
        hidden_act: `silu`, with which alone engines build a draft.
        fc_norm: an RMSNorm per aux state before `fc` (EAGLE-3.1).
        norm_output: the normed state, not the residual stream, is fed to the next step (EAGLE-3.1).
        own_embedding: the checkpoint brings `embed_tokens`; otherwise the target's is shared.
        dtype: dtype of the exported weights.
        mla: further sizes of an MLA draft; None for `llama`.
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
    mla: MlaSizes | None = field(default=None, metadata=LATER)

    def __post_init__(self) -> None:
        if (self.kind == "mla") != (self.mla is not None):
            raise ValueError(f"kind {self.kind} with mla sizes {self.mla}")
        if self.mla and (self.head_dim, self.num_kv_heads) != (self.mla.qk_head_dim, self.num_heads):
            raise ValueError(f"head_dim {self.head_dim} and num_kv_heads {self.num_kv_heads} in an MLA draft of "
                             f"{self.num_heads} heads of width {self.mla.qk_head_dim}")
        if self.num_heads < 1 or self.num_kv_heads < 1:
            raise ValueError(f"num_heads {self.num_heads} and num_kv_heads {self.num_kv_heads}, not both above 0")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads {self.num_heads} is no multiple of num_kv_heads {self.num_kv_heads}")
        if self.draft_vocab_size > self.target_vocab_size:
            raise ValueError(f"draft_vocab_size {self.draft_vocab_size} exceeds the target's {self.target_vocab_size}")

    @property
    def value_dim(self) -> int:
        """Width of a head's values."""
        return self.mla.v_head_dim if self.mla else self.head_dim

    @property
    def rope_dim(self) -> int:
        """Width of a head's part with rotary embedding."""
        return self.mla.qk_rope_head_dim if self.mla else self.head_dim


def draft_tensors(spec: DraftSpec) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a draft's weights, in eyas's own (trainer) naming `layers.{i}.*`.

    `d2t` and `t2d` are not weights: export derives them from the VocabMap.
    """
    h = spec.hidden_size
    table: dict[str, tuple[int, ...]] = {"fc.weight": (h, spec.num_aux * spec.target_hidden_size)}
    if spec.fc_norm:
        table |= {f"fc_norm.{i}.weight": (spec.target_hidden_size,) for i in range(spec.num_aux)}
    for i in range(spec.num_layers):
        table |= {
            f"layers.{i}.input_layernorm.weight": (h,),
            f"layers.{i}.hidden_norm.weight": (h,),
            **{f"layers.{i}.self_attn.{name}.weight": shape
               for name, shape in _attention(spec, 2 * h if i == 0 else h).items()},
            f"layers.{i}.post_attention_layernorm.weight": (h,),
            f"layers.{i}.mlp.gate_proj.weight": (spec.intermediate_size, h),
            f"layers.{i}.mlp.up_proj.weight": (spec.intermediate_size, h),
            f"layers.{i}.mlp.down_proj.weight": (h, spec.intermediate_size),
        }
    table |= {"norm.weight": (h,), "lm_head.weight": (spec.draft_vocab_size, h)}
    if spec.own_embedding:
        table["embed_tokens.weight"] = (spec.target_vocab_size, h)
    return table


def _attention(spec: DraftSpec, width: int) -> dict[str, tuple[int, ...]]:
    """Weights of a layer's attention, which reads `width` values a token."""
    out = {"o_proj": (spec.hidden_size, spec.num_heads * spec.value_dim)}
    if spec.mla is None:
        kv = (spec.num_kv_heads * spec.head_dim, width)
        return {"q_proj": (spec.num_heads * spec.head_dim, width), "k_proj": kv, "v_proj": kv, **out}
    m = spec.mla
    return {"q_a_proj": (m.q_lora_rank, width), "q_a_layernorm": (m.q_lora_rank,),
            "q_b_proj": (spec.num_heads * m.qk_head_dim, m.q_lora_rank),
            "kv_a_proj_with_mqa": (m.kv_lora_rank + m.qk_rope_head_dim, width), "kv_a_layernorm": (m.kv_lora_rank,),
            "kv_b_proj": (spec.num_heads * (m.qk_nope_head_dim + m.v_head_dim), m.kv_lora_rank), **out}
