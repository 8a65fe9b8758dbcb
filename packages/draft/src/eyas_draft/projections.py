"""Queries, keys and values of a draft's layer, in both kinds: with heads of their own, and from a latent (MLA).

Both answer alike, so that every attention takes either: queries and keys of one width with the rotary embedding
applied, values of any width, scores scaled by that width ** -0.5.

Shape suffixes: T tokens, W input width, Q query heads, G key/value heads, D width of queries and keys, Z of values,
R of the part with rotary embedding.

Source: `LlamaAttention` in SGLang's `srt/models/llama.py`, `DeepseekV2AttentionMLA` in `srt/models/deepseek_v2.py`
(0.5.20).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from eyas_contract import DraftSpec, Rope

QueryKeyValue = tuple[Tensor, Tensor, Tensor]
"""q [T, Q, D], k [T, G, D], v [T, G, Z]."""


class RmsNorm(nn.Module):
    """RMSNorm, mean of squares in float32 (or wider), as SGLang's `RMSNorm`."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last axis; the result has x's dtype."""
        wide = x if x.dtype == torch.float64 else x.float()
        scaled = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return (scaled * self.weight).to(x.dtype)


class Attention(nn.Module):
    """Projections and rotary embedding of a Llama-style layer; what is attended to is the caller's."""

    def __init__(self, spec: DraftSpec, width: int) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = spec.num_heads, spec.num_kv_heads, spec.head_dim
        self.q_proj = nn.Linear(width, spec.num_heads * spec.head_dim, bias=False)
        self.k_proj = nn.Linear(width, spec.num_kv_heads * spec.head_dim, bias=False)
        self.v_proj = nn.Linear(width, spec.num_kv_heads * spec.head_dim, bias=False)
        self.o_proj = nn.Linear(spec.num_heads * spec.head_dim, spec.hidden_size, bias=False)

    def forward(self, x_tw: Tensor, rope: tuple[Tensor, Tensor]) -> QueryKeyValue:
        """x [T, W], rope (cos, sin) [T, 1, R]; `o_proj` is applied by the layer."""
        q_tqd = rotate(self.q_proj(x_tw).view(-1, self.num_heads, self.head_dim), rope)
        k_tgd = rotate(self.k_proj(x_tw).view(-1, self.num_kv_heads, self.head_dim), rope)
        return q_tqd, k_tgd, self.v_proj(x_tw).view(-1, self.num_kv_heads, self.head_dim)


class MlaAttention(nn.Module):
    """Multi-head latent attention with every head's keys and values written out.

    SGLang serves decoding in the absorbed form, over the latent itself; the two are equal, and written out an ordinary
    kernel trains it. YaRN's factor on the scores is put on the queries.
    """

    def __init__(self, spec: DraftSpec, width: int) -> None:
        super().__init__()
        assert spec.mla is not None
        m = self.sizes = spec.mla
        self.num_heads, self.factor = spec.num_heads, score_factor(spec.rope)
        self.q_a_proj = nn.Linear(width, m.q_lora_rank, bias=False)
        self.q_a_layernorm = RmsNorm(m.q_lora_rank, spec.rms_norm_eps)
        self.q_b_proj = nn.Linear(m.q_lora_rank, spec.num_heads * m.qk_head_dim, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(width, m.kv_lora_rank + m.qk_rope_head_dim, bias=False)
        self.kv_a_layernorm = RmsNorm(m.kv_lora_rank, spec.rms_norm_eps)
        self.kv_b_proj = nn.Linear(m.kv_lora_rank, spec.num_heads * (m.qk_nope_head_dim + m.v_head_dim), bias=False)
        self.o_proj = nn.Linear(spec.num_heads * m.v_head_dim, spec.hidden_size, bias=False)

    def forward(self, x_tw: Tensor, rope: tuple[Tensor, Tensor]) -> QueryKeyValue:
        """x [T, W], rope (cos, sin) [T, 1, R]; `o_proj` is applied by the layer."""
        m, heads = self.sizes, self.num_heads
        low = self.q_a_layernorm(self.q_a_proj(x_tw))
        q_plain, q_turned = self.q_b_proj(low).view(-1, heads, m.qk_head_dim).split(
            [m.qk_nope_head_dim, m.qk_rope_head_dim], dim=-1)
        latent, k_turned = self.kv_a_proj_with_mqa(x_tw).split([m.kv_lora_rank, m.qk_rope_head_dim], dim=-1)
        k_plain, v_tgz = self.kv_b_proj(self.kv_a_layernorm(latent)).view(
            -1, heads, m.qk_nope_head_dim + m.v_head_dim).split([m.qk_nope_head_dim, m.v_head_dim], dim=-1)
        k_turned = rotate(_pairs_to_halves(k_turned[:, None]), rope).expand(-1, heads, -1)
        q_tqd = torch.cat((q_plain, rotate(_pairs_to_halves(q_turned), rope)), dim=-1) * self.factor
        return q_tqd, torch.cat((k_plain, k_turned), dim=-1), v_tgz


def rotary(rope: Rope, width: int, positions: int) -> LlamaRotaryEmbedding:
    """Hugging Face's, with YaRN's keys as engines read them: they pass over `attention_factor`, which it applies, and
    multiply by `attn_factor`, which it passes over.

    Args:
        rope: its parameters.
        width: R.
        positions: the whole length.
    """
    parameters, factor = rope.to_config(), 1.0
    if rope.type == "yarn":
        parameters.pop("attention_factor", None)
        factor = float(parameters.pop("attn_factor", factor))
    made = LlamaRotaryEmbedding(LlamaConfig(  # of one head: those of MLA need not divide the state's width
        hidden_size=width, num_attention_heads=1, head_dim=width, max_position_embeddings=positions,
        rope_parameters=parameters))
    made.attention_scaling *= factor
    return made


def score_factor(rope: Rope) -> float:
    """What DeepSeek multiplies its scores with under YaRN: `mscale_all_dim`'s scale, for queries and for keys."""
    scaling = dict(rope.scaling)
    every, stretch = float(scaling.get("mscale_all_dim") or 0), float(scaling.get("factor") or 1)
    return (0.1 * every * math.log(stretch) + 1) ** 2 if every and stretch > 1 else 1.0


def rotate(x_tnd: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
    """Rotary embedding, halves rotated (neox style). x [T, N, R], rope (cos, sin) [T, 1, R]."""
    cos, sin = rope
    low, high = x_tnd.chunk(2, dim=-1)
    return (x_tnd * cos + torch.cat((-high, low), dim=-1) * sin).to(x_tnd.dtype)


def _pairs_to_halves(x_tnr: Tensor) -> Tensor:
    """DeepSeek rotates pairs (0, 1), (2, 3), ...: laid out as halves, in queries and keys, their products stay."""
    return torch.cat((x_tnr[..., 0::2], x_tnr[..., 1::2]), dim=-1)
