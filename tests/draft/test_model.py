"""The model against a literal restatement of SGLang's forward, weight by weight, in float64.

Of its Llama class; `test_mla_draft.py` has the MLA class.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from specs import SPEC, VARIANTS, pack, random_model, random_samples
from torch import Tensor

from eyas_contract import DraftSpec, InvalidInput, Rope
from eyas_draft.attention import TttAttention
from eyas_draft.model import DraftModel


def rms(x: Tensor, weight: Tensor, eps: float, residual: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """SGLang's fused RMSNorm: with a residual, norm(x + residual) and the sum."""
    x = x if residual is None else x + residual
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight, x


Floats = np.typing.NDArray[np.float64]


class Served:
    """`LlamaModel` of llama_eagle3.py for one sequence with a growing cache, as draft-extend and decode run it."""

    def __init__(self, model: DraftModel) -> None:
        self.w = {name: p.detach() for name, p in model.named_parameters()}
        self.spec, self.embed, self.rotary = model.spec, model.embedding_vh, model.rotary
        self.cache: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(model.spec.num_layers)]

    def forward(self, ids: list[int], hidden: Tensor, start: int) -> tuple[Tensor, Tensor]:
        """Tokens at positions start, start+1, ...; logits and the aux hidden states, row by row."""
        s, w = self.spec, self.w
        rows = []
        for i, token in enumerate(ids):
            h, embeds = hidden[i:i + 1], self.embed[token][None]
            if h.shape[-1] != embeds.shape[-1]:
                if s.fc_norm:
                    h = torch.cat([rms(c, w[f"fc_norm.{k}.weight"], s.rms_norm_eps)[0]
                                   for k, c in enumerate(h.chunk(s.num_aux, -1))], -1)
                h = h @ w["fc.weight"].T
            residual: Tensor | None = None
            for layer in range(s.num_layers):
                h, residual = self.layer(layer, embeds, h, residual, start + i)
            logits_in, summed = rms(h, w["norm.weight"], s.rms_norm_eps, residual)
            rows.append((logits_in @ w["lm_head.weight"].T, logits_in if s.norm_output else summed))
        return torch.cat([r[0] for r in rows]), torch.cat([r[1] for r in rows])

    def layer(self, index: int, embeds: Tensor, h: Tensor, residual: Tensor | None, pos: int) -> tuple[Tensor, Tensor]:
        """`LlamaDecoderLayer.forward`: the layer's output and the residual, not yet added."""
        def of(name: str) -> Tensor:
            return self.w[f"layers.{index}.{name}.weight"]

        s = self.spec
        if index == 0:
            residual = h
            h, _ = rms(h, of("hidden_norm"), s.rms_norm_eps)
            embeds, _ = rms(embeds, of("input_layernorm"), s.rms_norm_eps)
            h = torch.cat([embeds, h], -1)
        else:
            h, residual = rms(h, of("hidden_norm"), s.rms_norm_eps, residual)
        h = self.attention(index, h, pos) @ of("self_attn.o_proj").T
        h, residual = rms(h, of("post_attention_layernorm"), s.rms_norm_eps, residual)
        gate = h @ of("mlp.gate_proj").T
        h = (gate * gate.sigmoid() * (h @ of("mlp.up_proj").T)) @ of("mlp.down_proj").T
        return h, residual

    def attention(self, index: int, x: Tensor, pos: int) -> Tensor:
        """One query over everything cached, itself included."""
        s = self.spec
        cos, sin = self.rotary(x, torch.tensor([[pos]]))
        q, k, v = (x @ self.w[f"layers.{index}.self_attn.{n}_proj.weight"].T for n in "qkv")

        def turn(y: Tensor, heads: int) -> Tensor:
            y = y.view(heads, s.head_dim)
            half = s.head_dim // 2
            return y * cos[0] + torch.cat((-y[:, half:], y[:, :half]), -1) * sin[0]

        self.cache[index].append((turn(k, s.num_kv_heads), v.view(s.num_kv_heads, s.head_dim)))
        keys = torch.stack([c[0] for c in self.cache[index]])
        values = torch.stack([c[1] for c in self.cache[index]])
        out = []
        for head, query in enumerate(turn(q, s.num_heads)):
            group = head // (s.num_heads // s.num_kv_heads)
            weights = (keys[:, group] @ query / s.head_dim ** 0.5).softmax(0)
            out.append(weights @ values[:, group])
        return torch.cat(out)[None]


LLAMAS = {name: spec for name, spec in VARIANTS.items() if spec.kind == "llama"}


@pytest.mark.parametrize("spec", LLAMAS.values(), ids=LLAMAS.keys())
def test_equals_sglangs_forward_through_extend_and_own_steps(spec: DraftSpec) -> None:
    model = random_model(spec)
    batch = pack(random_samples(spec, (11,)))
    ids, n = batch.input_ids_t.roll(-1), 11
    served = Served(model)
    logits, aux = served.forward(ids.tolist(), batch.aux_tke, 0)
    attend = TttAttention((n,), spec.num_layers, torch.device("cpu"))
    normed, hidden = model(ids, model.fuse(batch.aux_tke), batch.positions_t, attend)
    torch.testing.assert_close(model.lm_head(normed), logits, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(hidden, aux, rtol=1e-6, atol=1e-6)
    # Own steps continue from the last position, as serving does; teacher forcing gives the same inputs here.
    tokens, last = ids, aux[-1:]
    for step in (1, 2, 3):
        tokens = tokens.roll(-1)
        logits, last = served.forward([int(tokens[-1])], last, n - 1 + step)
        normed, hidden = model(tokens, hidden, batch.positions_t + step, attend)
        torch.testing.assert_close(model.lm_head(normed[-1:]), logits, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(hidden[-1:], last, rtol=1e-6, atol=1e-6)


def angles(spec: DraftSpec, positions: int) -> tuple[Floats, Floats]:
    """cos and sin of a rope by its definition; YaRN as in SGLang's `rotary_embedding/yarn.py` (0.5.20)."""
    width, kind, keys = spec.rope_dim, spec.rope.type, dict(spec.rope.scaling)
    plain = [spec.rope.theta ** (-2 * i / width) for i in range(width // 2)]
    stretch, magnitude, rates = float(keys.get("factor", 1)), 1.0, []
    whole = float(keys.get("original_max_position_embeddings", spec.max_position_embeddings))
    low, high = (width * math.log(whole / (2 * math.pi * float(keys.get(key, usual)))) / (2 * math.log(spec.rope.theta))
                 for key, usual in (("beta_fast", 32), ("beta_slow", 1)))
    low, high = max(math.floor(low), 0), min(math.ceil(high), width - 1)
    for i, rate in enumerate(plain):
        share = 0.0  # of the rate that is kept as it is
        if kind == "llama3":
            least, most = float(keys["low_freq_factor"]), float(keys["high_freq_factor"])
            share = min(max((whole * rate / (2 * math.pi) - least) / (most - least), 0), 1)
        elif kind == "yarn":
            share = 1 - min(max((i - low) / (high - low or 0.001), 0), 1)
        rates.append(share * rate + (1 - share) * rate / stretch)
    if kind == "yarn":
        up, down = (0.1 * float(keys.get(key, usual)) * math.log(stretch) + 1
                    for key, usual in (("mscale", 1), ("mscale_all_dim", 0)))
        magnitude = up / down * float(keys.get("attn_factor", 1))
    turned = np.outer(np.arange(positions), [*rates, *rates])
    return np.cos(turned) * magnitude, np.sin(turned) * magnitude


HALF = ("factor", 4.0), ("original_max_position_embeddings", 64)
ROPES = {"plain": Rope("default", 1e4), "linear": Rope("linear", 1e4, (("factor", 4.0),)), "llama3": Rope(
    "llama3", 5e5, (("factor", 8.0), ("high_freq_factor", 4.0), ("low_freq_factor", 1.0),
                    ("original_max_position_embeddings", 64))), "yarn": Rope("yarn", 5e4, HALF),
    "yarn, betas": Rope("yarn", 5e4, (("beta_fast", 8.0), ("beta_slow", 2.0), *HALF)),
    "yarn, mscales": Rope("yarn", 5e4, (*HALF, ("mscale", 1.0), ("mscale_all_dim", 0.7))),
    "yarn, attention_factor": Rope("yarn", 5e4, (("attention_factor", 1.0), *HALF)),
    "yarn, attn_factor": Rope("yarn", 5e4, (("attn_factor", 1.3), *HALF)),
    "yarn, no original length": Rope("yarn", 5e4, (("factor", 4.0),))}


@pytest.mark.parametrize("rope", ROPES.values(), ids=ROPES.keys())
@pytest.mark.parametrize("head_dim", [6, 10, 64])
def test_rotation_is_that_of_the_definition(rope: Rope, head_dim: int) -> None:
    spec = replace(SPEC, head_dim=head_dim, rope=rope)
    found = random_model(spec).rotary(torch.zeros(1, dtype=torch.float64), torch.arange(200)[None])
    for mine, theirs in zip(found, angles(spec, 200), strict=True):
        np.testing.assert_allclose(mine[0], theirs, atol=2e-5)  # angles are float32, as in engines


def test_what_is_not_computed_is_refused_all_at_once() -> None:
    with pytest.raises(InvalidInput, match=r"6 heads beside states of 32"):
        DraftModel(replace(SPEC, num_heads=6), torch.zeros(50, 32))
    spec = replace(SPEC, rope=Rope("dynamic", 1e4), hidden_act="nope", own_embedding=True)
    with pytest.raises(InvalidInput, match=r"dynamic.*embedding of its own.*nope"):
        DraftModel(spec, torch.zeros(50, 32))
