"""The EAGLE-3 draft, computed exactly as SGLang serves it; training and the reference decoder share this one module.

Attention is passed in: `projections` makes queries, keys and values and applies the rotary embedding, the caller
decides what may be seen (`attention.TttAttention` in training, `pool.ExtendAttention` and `BranchAttention` in
decoding).

Shape suffixes: T tokens, H hidden, I intermediate, Q query heads, G key/value heads, D width of queries and keys, Z of
values, V draft vocabulary, K aux states, E target hidden.

Source: `LlamaModel.forward` and `LlamaDecoderLayer.forward` in SGLang's `srt/models/llama_eagle3.py`,
`Eagle3MLAModel.forward` and `Eagle3MLADecoderLayer.forward` in `srt/models/kimi_k25_eagle3.py` (0.5.20).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from eyas_contract import DraftSpec, InvalidInput, MlaSizes, draft_tensors
from eyas_draft.projections import Attention, MlaAttention, QueryKeyValue, RmsNorm, rotary
from eyas_draft.regions import region

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(layer, q_TQD, k_TGD, v_TGZ) -> out_TQZ."""

ROPE_TYPES = ("default", "linear", "llama3", "yarn")  # those that do not depend on the length of the sequence
MLA_ROPE_TYPES = ("default", "yarn")  # SGLang's MLA class takes every other for YaRN


class Mlp(nn.Module):
    """Gated feed-forward."""

    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x_th: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x_th)) * self.up_proj(x_th))
        return out


class Layer(nn.Module):
    """One decoder layer. Layer 0 reads [embedding, hidden] side by side and keeps the un-normed hidden as residual."""

    def __init__(self, spec: DraftSpec, index: int) -> None:
        super().__init__()
        self.index = index
        self.input_layernorm = RmsNorm(spec.hidden_size, spec.rms_norm_eps)
        self.hidden_norm = RmsNorm(spec.hidden_size, spec.rms_norm_eps)
        projections = Attention if spec.mla is None else MlaAttention
        self.self_attn = projections(spec, (2 if index == 0 else 1) * spec.hidden_size)
        self.post_attention_layernorm = RmsNorm(spec.hidden_size, spec.rms_norm_eps)
        self.mlp = Mlp(spec)

    def forward(self, embeds_th: Tensor, hidden_th: Tensor, rope: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """[T, H] -> the residual stream after the layer, [T, H]."""
        q_tqd, k_tgd, v_tgz = _before_attention(self, embeds_th, hidden_th, rope)
        return _after_attention(self, hidden_th, attend(self.index, q_tqd, k_tgd, v_tgz))


@region
def _before_attention(layer: Layer, embeds_th: Tensor, hidden_th: Tensor,
                      rope: tuple[Tensor, Tensor]) -> QueryKeyValue:
    """Queries, keys and values of a layer."""
    x = layer.hidden_norm(hidden_th)
    if layer.index == 0:
        x = torch.cat((layer.input_layernorm(embeds_th), x), dim=-1)
    qkv: QueryKeyValue = layer.self_attn(x, rope)
    return qkv


@region
def _after_attention(layer: Layer, hidden_th: Tensor, out_tqz: Tensor) -> Tensor:
    """The residual stream, from the layer's input and its attention's output."""
    residual = hidden_th + layer.self_attn.o_proj(out_tqz.flatten(1))
    out: Tensor = residual + layer.mlp(layer.post_attention_layernorm(residual))
    return out


@region
def _normed(norm: RmsNorm, hidden_th: Tensor) -> Tensor:
    out: Tensor = norm(hidden_th)
    return out


class DraftModel(nn.Module):
    """An EAGLE-3 draft, Llama-style or MLA. Parameter names are those of `eyas_contract.draft_tensors`.

    The embedding is the target's: `embedding_vh` [target vocabulary, H], a frozen buffer outside the state dict.

    Raises:
        InvalidInput: a kind or rotary embedding that this module does not compute.
    """

    embedding_vh: Tensor

    def __init__(self, spec: DraftSpec, embedding_vh: Tensor) -> None:
        super().__init__()
        check_supported(spec)
        assert embedding_vh.shape == (spec.target_vocab_size, spec.hidden_size), embedding_vh.shape
        self.spec = spec
        self.register_buffer("embedding_vh", embedding_vh, persistent=False)
        self.fc = nn.Linear(spec.num_aux * spec.target_hidden_size, spec.hidden_size, bias=False)
        if spec.fc_norm:
            self.fc_norm = nn.ModuleList(RmsNorm(spec.target_hidden_size, spec.rms_norm_eps)
                                         for _ in range(spec.num_aux))
        self.layers = nn.ModuleList(Layer(spec, i) for i in range(spec.num_layers))
        self.norm = RmsNorm(spec.hidden_size, spec.rms_norm_eps)
        self.lm_head = nn.Linear(spec.hidden_size, spec.draft_vocab_size, bias=False)
        self.rotary = rotary(spec.rope, spec.rope_dim, spec.max_position_embeddings)
        assert {n: tuple(p.shape) for n, p in self.named_parameters()} == draft_tensors(spec)

    def fuse(self, aux_tke: Tensor) -> Tensor:
        """Target states [T, K*E] -> draft hidden [T, H]; own states skip this, as in serving."""
        if self.spec.fc_norm:
            chunks = aux_tke.chunk(self.spec.num_aux, dim=-1)
            aux_tke = torch.cat([norm(c) for norm, c in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        out: Tensor = self.fc(aux_tke)
        return out

    def forward(self, input_ids_t: Tensor, hidden_th: Tensor, positions_t: Tensor,
                attend: Attend) -> tuple[Tensor, Tensor]:
        """One pass of the layers.

        Args:
            input_ids_t: int64 [T], target ids; at step 0 the token after the one whose state is in `hidden_th`.
            hidden_th: [T, H], `fuse` of the target's states, or the recurrent output of the step before.
            positions_t: int64 [T], rotary positions.
            attend: attention.

        Returns:
            normed [T, H] for `lm_head`, and the state [T, H] that the next step is fed: the residual stream, or the
            normed state where the spec says `norm_output`.
        """
        embeds = F.embedding(input_ids_t, self.embedding_vh).to(hidden_th.dtype)
        cos, sin = self.rotary(hidden_th, positions_t[None])
        rope = (cos[0, :, None], sin[0, :, None])
        for layer in self.layers:
            hidden_th = layer(embeds, hidden_th, rope, attend)
        normed = _normed(self.norm, hidden_th)
        return normed, normed if self.spec.norm_output else hidden_th


def check_supported(spec: DraftSpec) -> None:
    """Raise InvalidInput naming everything in `spec` that this module does not compute."""
    faults = []
    types = ROPE_TYPES if spec.mla is None else MLA_ROPE_TYPES
    if spec.rope.type not in types:
        faults.append(f"rope type {spec.rope.type}")
    if spec.mla is not None:
        faults += _mla_faults(spec, spec.mla)
    elif spec.hidden_size % spec.num_heads:
        faults.append(f"{spec.num_heads} heads beside states of {spec.hidden_size}, no multiple of them, which a Llama "
                      "config, in which engines read a draft, may not have")
    if spec.own_embedding:
        faults.append("an embedding of its own")
    if spec.hidden_size != spec.target_hidden_size:
        faults.append(f"hidden_size {spec.hidden_size} beside the target's {spec.target_hidden_size}")
    if spec.hidden_act != "silu":
        faults.append(f"hidden_act {spec.hidden_act}, with which neither SGLang nor vLLM builds a draft")
    if faults:
        raise InvalidInput("contract.draft", ", ".join(faults),
                           f"a draft that shares the target's embedding, silu, rope one of {list(types)}",
                           "Correct the draft's settings.")


def _mla_faults(spec: DraftSpec, sizes: MlaSizes) -> list[str]:
    """What of an MLA draft is not computed here, or not by SGLang."""
    faults = [f"{spec.num_layers} layers, where SGLang's MLA class builds one"] if spec.num_layers != 1 else []
    if sizes.v_head_dim > sizes.qk_head_dim:
        faults.append(f"v_head_dim {sizes.v_head_dim} above the queries' width {sizes.qk_head_dim}")
    scaling = dict(spec.rope.scaling)
    if spec.rope.type == "yarn" and bool(scaling.get("mscale")) != bool(scaling.get("mscale_all_dim")):
        faults.append("YaRN with one of mscale and mscale_all_dim, which engines read differently")
    return faults
