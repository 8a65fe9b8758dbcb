"""A draft's computation stage by stage, from anybody's weights: the reference that a server is held against.

Stated once more, plainly and in float32, beside `model.DraftModel` (which trains what eyas trains): drafts of other
tools bring norms, biases, embeddings and attention that eyas does not train. A test holds the two together.

Shape suffixes: T tokens, H hidden, N heads, G key/value heads, D head width, R rotary width, K aux states, E target
hidden.

Source: `LlamaModel.forward` in SGLang's `srt/models/llama_eagle3.py`, `Eagle3MLAModel.forward` in
`srt/models/kimi_k25_eagle3.py` and `DeepseekV2AttentionMLA` in `srt/models/deepseek_v2.py` (0.5.20).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from transformers.activations import ACT2FN

from eyas_contract import InvalidInput
from eyas_contract.dialects import Neutral
from eyas_draft.projections import rotary, rotate


@dataclass(frozen=True)
class Stages:
    """Values at every position.

    Attributes:
        values: stage name (see `eyas_contract.golden`) -> [T, width].
        logits_tv: [T, draft vocabulary].
        rope: cosines and sines, [T, R].
    """

    values: dict[str, Tensor]
    logits_tv: Tensor
    rope: Tensor


class StagedDraft:
    """A draft as plain tensors.

    Args:
        neutral: its config.
        weights: by trainer's name, float32.
        embedding_vh: the rows it is served with: its own, else the target's.
        head_vh: its head, else the target's.

    Raises:
        InvalidInput: weights missing, or a rotary embedding over a part of the head.
    """

    def __init__(self, neutral: Neutral, weights: dict[str, Tensor], embedding_vh: Tensor, head_vh: Tensor) -> None:
        self.neutral, self.weights = neutral, weights
        self.embedding_vh, self.head_vh = embedding_vh, head_vh
        base = neutral.base
        if float(base.get("partial_rotary_factor") or 1) != 1:
            raise InvalidInput("partial_rotary_factor", str(base["partial_rotary_factor"]), "1, by eyas-draft golden",
                               "This draft rotates a part of each head, which is not computed here.")
        self.eps = float(base.get("rms_norm_eps") or 1e-6)
        self.num_layers = int(base.get("num_hidden_layers") or 1)

    def run(self, next_ids_t: Tensor, aux_tke: Tensor) -> Stages:
        """Compute every stage for one document.

        Args:
            next_ids_t: int64 [T], the token after each position.
            aux_tke: [T, K*E], the target's states.
        """
        values = self._fuse(aux_tke)
        cos, sin = self._cos_sin(next_ids_t.numel())
        hidden = values["fused"]
        values["embedding"] = F.embedding(next_ids_t, self.embedding_vh).float()
        for layer in range(self.num_layers):
            hidden = self._layer(layer, values, hidden, (cos, sin))
        values["layer"] = hidden
        values["norm"] = self._norm("norm", hidden)
        half = cos.shape[-1] // 2
        rope = torch.cat((cos[:, 0, :half], sin[:, 0, :half]), dim=-1)
        return Stages(values, values["norm"] @ self.head_vh.T, rope)

    def _fuse(self, aux_tke: Tensor) -> dict[str, Tensor]:
        norms = self.neutral.norms
        width = self.weight("fc.weight").shape[1]
        if aux_tke.shape[1] != width:
            raise InvalidInput("fc.weight", f"input width {width}", f"{aux_tke.shape[1]}, the target's states side by "
                               "side", "Name the trained layers with --aux-layer-ids, or give the right target.")
        count = len(self.neutral.aux_layer_ids or (0, 0, 0))
        values = {f"aux.{i}": chunk for i, chunk in enumerate(aux_tke.chunk(count, dim=-1))}
        fused = aux_tke
        if "norm_before_fc" in norms:
            fused = values["input_norm"] = self._norm("input_norm", fused)
        if "fc_norm" in norms:
            chunks = [self._norm(f"fc_norm.{i}", c) for i, c in enumerate(fused.chunk(count, dim=-1))]
            values |= {f"aux_norm.{i}": chunk for i, chunk in enumerate(chunks)}
            fused = torch.cat(chunks, dim=-1)
        values["fused"] = self._linear("fc", fused)
        return values

    def _layer(self, layer: int, values: dict[str, Tensor], hidden_th: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        prefix, residual = f"layers.{layer}.", hidden_th
        x = self._norm(f"{prefix}hidden_norm", hidden_th)
        if layer == 0:
            if "norm_before_residual" in self.neutral.norms:
                residual = x
            values["embedding_norm"] = self._norm(f"{prefix}input_layernorm", values["embedding"])
            values["hidden_norm"] = x
            x = torch.cat((values["embedding_norm"], x), dim=-1)
        attend = self._mla if self.neutral.kind == "mla" else self._attention
        attended = attend(f"{prefix}self_attn.", x, rope)
        residual = residual + attended
        x = self._norm(f"{prefix}post_attention_layernorm", residual)
        if layer == 0:
            values["attention"], values["mlp_norm"] = attended, x
        act = ACT2FN[str(self.neutral.base.get("hidden_act") or "silu")]
        gated = act(self._linear(f"{prefix}mlp.gate_proj", x)) * self._linear(f"{prefix}mlp.up_proj", x)
        return residual + self._linear(f"{prefix}mlp.down_proj", gated)

    def _attention(self, prefix: str, x_tw: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        base = self.neutral.base
        heads = int(base["num_attention_heads"])
        groups = int(base.get("num_key_value_heads") or heads)
        q_tnd = rotate(_split(self._linear(f"{prefix}q_proj", x_tw), heads), rope)
        k_tgd = rotate(_split(self._linear(f"{prefix}k_proj", x_tw), groups), rope)
        v_tgd = _split(self._linear(f"{prefix}v_proj", x_tw), groups)
        out = _causal(q_tnd, k_tgd, v_tgd, q_tnd.shape[-1] ** -0.5)
        return self._linear(f"{prefix}o_proj", out.flatten(1))

    def _mla(self, prefix: str, x_tw: Tensor, rope: tuple[Tensor, Tensor]) -> Tensor:
        base = self.neutral.base
        heads, nope, turned = (int(base[k]) for k in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim"))
        rank = int(base["kv_lora_rank"])
        low = self._norm(f"{prefix}q_a_layernorm", self._linear(f"{prefix}q_a_proj", x_tw))
        q_tnd = _split(self._linear(f"{prefix}q_b_proj", low), heads)
        latent, k_rope = torch.split(self._linear(f"{prefix}kv_a_proj_with_mqa", x_tw), [rank, turned], dim=-1)
        wide = self._linear(f"{prefix}kv_b_proj", self._norm(f"{prefix}kv_a_layernorm", latent))
        k_nope, v_tnd = torch.split(_split(wide, heads), [nope, int(base["v_head_dim"])], dim=-1)
        k_turned = rotate(_pairs_to_halves(k_rope[:, None]), rope).expand(-1, heads, -1)
        q_turned = rotate(_pairs_to_halves(q_tnd[..., nope:]), rope)
        out = _causal(torch.cat((q_tnd[..., :nope], q_turned), dim=-1), torch.cat((k_nope, k_turned), dim=-1), v_tnd,
                      (nope + turned) ** -0.5 * self._yarn_scale() ** 2)
        return self._linear(f"{prefix}o_proj", out.flatten(1))

    def _yarn_scale(self) -> float:
        """DeepSeek's factor on queries and keys under YaRN: `mscale_all_dim` gives one for each."""
        scaling = dict(self.neutral.rope.scaling)
        every = float(scaling.get("mscale_all_dim") or 0)
        factor = float(scaling.get("factor") or 1)
        return 0.1 * every * math.log(factor) + 1 if every and factor > 1 else 1.0

    def _cos_sin(self, count: int) -> tuple[Tensor, Tensor]:
        """[T, 1, D] each, as the trained draft rotates."""
        base: dict[str, Any] = self.neutral.base
        heads = int(base["num_attention_heads"])
        width = int(base["qk_rope_head_dim"]) if self.neutral.kind == "mla" else \
            int(base.get("head_dim") or int(base["hidden_size"]) // heads)
        made = rotary(self.neutral.rope, width, int(base.get("max_position_embeddings") or 2048))
        cos, sin = made(torch.zeros(1), torch.arange(count)[None])
        return cos[0, :, None], sin[0, :, None]

    def weight(self, name: str) -> Tensor:
        """A weight in float32."""
        if name not in self.weights:
            raise InvalidInput("draft", f"no tensor for {name}", "every weight of the draft, by eyas-draft golden",
                               "Check the draft with eyas-serve preflight.")
        return self.weights[name].float()

    def _linear(self, name: str, x: Tensor) -> Tensor:
        bias = self.weights.get(f"{name}.bias")
        return F.linear(x, self.weight(f"{name}.weight"), None if bias is None else bias.float())

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * self.weight(f"{name}.weight")


def _causal(q_tnd: Tensor, k_tgd: Tensor, v_tgd: Tensor, scale: float) -> Tensor:
    q, k, v = (x.transpose(0, 1)[None] for x in (q_tnd, k_tgd, v_tgd))
    out = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def _split(x_tw: Tensor, heads: int) -> Tensor:
    return x_tw.view(x_tw.shape[0], heads, -1)


def _pairs_to_halves(x_tnd: Tensor) -> Tensor:
    """Rotated pairs (0, 1), (2, 3), ... laid out as halves; queries and keys alike, so their products stay."""
    return torch.cat((x_tnd[..., 0::2], x_tnd[..., 1::2]), dim=-1)
