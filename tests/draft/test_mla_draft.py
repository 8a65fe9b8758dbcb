"""MLA drafts: against SGLang's absorbed form written out plainly, and from store to decoding on a DeepSeek target."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import storemaker
import torch
from plain_attention import PlainAttention
from safetensors.torch import load_file
from specs import MLA, pack, random_model, random_samples
from test_loss import DECAY, LENGTHS, STEPS, plain_loss
from torch import Tensor

import deepseek
import tiny
from eyas_contract import DraftSpec, InvalidInput, Rope, TargetSpec, draft_tensors
from eyas_draft.attention import TttAttention
from eyas_draft.config import EvalConfig, ExportConfig, PlanConfig, TrainConfig, VerifyConfig
from eyas_draft.convert import ConvertConfig, read_source
from eyas_draft.evaluate import evaluate
from eyas_draft.export import export, verify
from eyas_draft.flops import layer_weights
from eyas_draft.golden import staged_draft
from eyas_draft.loading import load_draft
from eyas_draft.loss import ttt_loss
from eyas_draft.model import DraftModel
from eyas_draft.plan import plan
from eyas_draft.setup import prepare
from eyas_draft.store import Store
from eyas_draft.target_weights import TargetWeights, initial_from_target
from eyas_draft.train import Trainer
from eyas_draft.ttt import scored_positions

SPECS = {"yarn": MLA, "eagle-3.1, no yarn": replace(MLA, fc_norm=True, norm_output=True, rope=Rope("default", 1e4))}


class Absorbed:
    """`Eagle3MLAModel` over a cache of latents, as SGLang decodes; from the weights alone, one row at a time."""

    def __init__(self, model: DraftModel) -> None:
        self.spec, self.w, self.embedding = model.spec, dict(model.named_parameters()), model.embedding_vh
        self.cos, self.sin = angles(model.spec)

    def fuse(self, aux: Tensor) -> Tensor:
        chunks = aux.chunk(self.spec.num_aux, -1)
        if self.spec.fc_norm:
            chunks = tuple(self.norm(f"fc_norm.{i}", c) for i, c in enumerate(chunks))
        return torch.cat(chunks, -1) @ self.w["fc.weight"].T

    def lm_head(self, x: Tensor) -> Tensor:
        return x @ self.w["lm_head.weight"].T

    def __call__(self, tokens: Tensor, hidden: Tensor, positions: Tensor, seen: PlainAttention
                 ) -> tuple[Tensor, Tensor]:
        seen.blocks[0].append([])  # type: ignore[arg-type]  # latents here, not keys and values
        rows = []
        for t, position in enumerate(positions.tolist()):
            h = hidden[t]
            x = torch.cat((self.norm("layers.0.input_layernorm", self.embedding[tokens[t]]),
                           self.norm("layers.0.hidden_norm", h)))
            h = h + self.attention(x, position, t, seen.blocks[0])
            x = self.norm("layers.0.post_attention_layernorm", h)
            gate = self.linear("mlp.gate_proj", x)
            rows.append(h + self.linear("mlp.down_proj", gate * gate.sigmoid() * self.linear("mlp.up_proj", x)))
        summed = torch.stack(rows)
        normed = self.norm("norm", summed)
        return normed, normed if self.spec.norm_output else summed

    def attention(self, x: Tensor, position: int, t: int, blocks: list[Any]) -> Tensor:
        s, m = self.spec, self.spec.mla
        assert m is not None
        q = self.linear("self_attn.q_b_proj", self.norm("layers.0.self_attn.q_a_layernorm",
                                                        self.linear("self_attn.q_a_proj", x)))
        latent, turned = self.linear("self_attn.kv_a_proj_with_mqa", x).split([m.kv_lora_rank, m.qk_rope_head_dim])
        blocks[-1].append((self.norm("layers.0.self_attn.kv_a_layernorm", latent), self.turn(turned, position)))
        cache = blocks[0][:t + 1] + [block[t] for block in blocks[1:]]
        latents, keys = (torch.stack(part) for part in zip(*cache, strict=True))
        w_k, w_v = self.w["layers.0.self_attn.kv_b_proj.weight"].view(s.num_heads, -1, m.kv_lora_rank).split(
            [m.qk_nope_head_dim, m.v_head_dim], dim=1)
        out = []
        for head, query in enumerate(q.view(s.num_heads, -1)):
            plain, rotated = query.split([m.qk_nope_head_dim, m.qk_rope_head_dim])
            scores = latents @ (plain @ w_k[head]) + keys @ self.turn(rotated, position)
            weights = (scores * m.qk_head_dim ** -0.5 * mscale(s.rope, "mscale_all_dim") ** 2).softmax(0)
            out.append(w_v[head] @ (weights @ latents))
        return self.linear("self_attn.o_proj", torch.cat(out))

    def turn(self, x: Tensor, position: int) -> Tensor:
        """Pairs (0, 1), (2, 3), ... rotated, as DeepSeek lays them out."""
        a, b, cos, sin = x[0::2], x[1::2], self.cos[position], self.sin[position]
        return torch.stack((a * cos - b * sin, b * cos + a * sin), -1).flatten()

    def linear(self, name: str, x: Tensor) -> Tensor:
        return self.w[f"layers.0.{name}.weight"] @ x

    def norm(self, name: str, x: Tensor) -> Tensor:
        return x / (x.pow(2).mean(-1, keepdim=True) + self.spec.rms_norm_eps).sqrt() * self.w[f"{name}.weight"]


def mscale(rope: Rope, key: str) -> float:
    """`yarn_get_mscale` of SGLang's `rotary_embedding`."""
    scaling = dict(rope.scaling)
    return 0.1 * float(scaling[key]) * math.log(float(scaling["factor"])) + 1 if rope.type == "yarn" else 1.0


def angles(spec: DraftSpec) -> tuple[Tensor, Tensor]:
    """Cosines and sines [positions, R/2] by SGLang's `DeepseekScalingRotaryEmbedding`."""
    width, theta = spec.rope_dim, spec.rope.theta
    frequencies = theta ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)
    if spec.rope.type == "yarn":
        s = {key: float(value) for key, value in spec.rope.scaling}
        low, high = (width * math.log(s["original_max_position_embeddings"] / (s[key] * 2 * math.pi))
                     / (2 * math.log(theta)) for key in ("beta_fast", "beta_slow"))
        first, last = max(math.floor(low), 0), min(math.ceil(high), width - 1)
        kept = 1 - ((torch.arange(width // 2) - first) / max(last - first, 0.001)).clamp(0, 1)
        frequencies = frequencies / s["factor"] * (1 - kept) + frequencies * kept
    turns = torch.arange(64)[:, None] * frequencies
    factor = mscale(spec.rope, "mscale") / mscale(spec.rope, "mscale_all_dim")
    return turns.cos() * factor, turns.sin() * factor


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_packed_loss_and_gradients_equal_the_absorbed_form(spec: DraftSpec) -> None:
    model, samples = random_model(spec), random_samples(spec, LENGTHS)
    teacher = torch.randn(spec.draft_vocab_size, spec.target_hidden_size, dtype=torch.float64,
                          generator=torch.Generator().manual_seed(9))
    wanted = plain_loss(Absorbed(model), samples, teacher)  # type: ignore[arg-type]
    batch = pack(samples)
    packed = ttt_loss(model, batch, scored_positions(batch), lambda last: (last @ teacher.T).softmax(-1),
                      steps=STEPS, decay=DECAY)
    names, parameters = zip(*model.named_parameters(), strict=True)
    torch.testing.assert_close(packed.loss, wanted, rtol=1e-6, atol=1e-6)  # the angles are float32
    for name, mine, theirs in zip(names, torch.autograd.grad(packed.loss, parameters),
                                  torch.autograd.grad(wanted, parameters), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(scope="module")
def target(tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return deepseek.write_target(tmp_path_factory.mktemp("deepseek") / "target", tiny_target)


@pytest.fixture(scope="module")
def store(target: Path) -> Path:
    return storemaker.write_store(target.parent / "store", target, storemaker.answered_rows(target, 10, 3, max_new=12))


@pytest.fixture(scope="module")
def config(target: Path, store: Path) -> TrainConfig:
    return TrainConfig(store, target, target.parent / "run", vocab_size=70, ttt_steps=3, epochs=4, lr=3e-3,
                       tokens_per_batch=128, precision="fp32", holdout=0.1, fc_norm=True)


@pytest.fixture(scope="module")
def draft(config: TrainConfig) -> Path:
    """Trained and exported. Read-only."""
    Trainer(config, io.StringIO()).run()
    out = config.out.parent / "draft"
    export(ExportConfig(config.out, out))
    return out


def test_the_export_is_the_trained_draft_and_decodes(config: TrainConfig, draft: Path, tmp_path: Path) -> None:
    verdict = verify(VerifyConfig(config.out, draft, config.store, config.target))
    assert (verdict.faults, verdict.largest_difference) == ((), 0.0)
    assert {"midlayer.self_attn.q_a_proj.weight", "midlayer.self_attn.kv_b_proj.weight"} <= set(
        load_file(draft / "model.safetensors"))
    prompts = tiny.write_jsonl(tmp_path / "p.jsonl", tiny.conversations(3, 901))
    report = evaluate(EvalConfig(draft, config.target, prompts, topk=2, num_draft_tokens=6, max_new_tokens=16,
                                 compare_greedy=True), io.StringIO())
    assert report["outputs_identical"]
    plain = evaluate(EvalConfig(draft, config.target, prompts, topk=2, num_draft_tokens=6, max_new_tokens=16,
                                ops="torch"), io.StringIO())
    assert plain["histogram"] == report["histogram"]


def test_stages_of_the_golden_record_are_those_of_the_trained_draft(config: TrainConfig, draft: Path) -> None:
    spec = TargetSpec.from_folder(config.target)
    weights = TargetWeights.load(config.target, spec)
    staged, _ = staged_draft(read_source(ConvertConfig(draft, draft, target=config.target)), weights, spec)
    model, _ = load_draft(draft, weights.embedding_vh)
    sample = Store(config.store).sample(0)
    ids = sample.input_ids_t.long().roll(-1)
    with torch.no_grad():
        attend = TttAttention([ids.numel()], 1, torch.device("cpu"))
        normed, _ = model(ids, model.fuse(sample.aux_tke.float()), torch.arange(ids.numel()), attend)
        torch.testing.assert_close(staged.run(ids, sample.aux_tke.float()).logits_tv, model.lm_head(normed),
                                   rtol=1e-4, atol=1e-4)


def test_it_begins_as_the_targets_last_layer_or_as_a_published_draft(config: TrainConfig, draft: Path) -> None:
    cold = dict(prepare(config).model.named_parameters())
    last = {name.split("layers.7.")[1]: value for name, value in
            load_file(config.target / "model.safetensors").items() if "layers.7." in name}
    for name in ("q_a_proj", "kv_a_proj_with_mqa"):
        weight = cold[f"layers.0.self_attn.{name}.weight"]
        assert not weight[:, :deepseek.HIDDEN].any()
        torch.testing.assert_close(weight[:, deepseek.HIDDEN:], last[f"self_attn.{name}.weight"])
    for name in ("self_attn.q_b_proj", "self_attn.kv_b_proj", "self_attn.q_a_layernorm", "self_attn.kv_a_layernorm",
                 "self_attn.o_proj", "mlp.down_proj", "post_attention_layernorm"):
        torch.testing.assert_close(cold[f"layers.0.{name}.weight"], last[f"{name}.weight"])
    warm = prepare(replace(config, warm_start=draft)).model
    trained, _ = load_draft(draft, warm.embedding_vh)
    for name, value in warm.named_parameters():
        torch.testing.assert_close(value, dict(trained.named_parameters())[name])


def test_experts_give_their_shared_one_and_quantised_weights_nothing() -> None:
    h, inner, m = MLA.hidden_size, MLA.intermediate_size, MLA.mla
    assert m is not None
    last = {"mlp.shared_experts.up_proj.weight": torch.randn(inner - 8, h), "mlp.gate.weight": torch.randn(4, h),
            "mlp.experts.0.up_proj.weight": torch.randn(inner, h),
            "self_attn.q_a_proj.weight": torch.randn(m.q_lora_rank, h).to(torch.float8_e4m3fn)}
    weights = TargetWeights(torch.randn(50, h), torch.randn(50, h), torch.ones(h), 1e-5, last)
    start = initial_from_target(weights, MLA, torch.arange(20))
    assert set(start) == {"fc.weight", "norm.weight", "lm_head.weight", "layers.0.mlp.up_proj.weight"}
    torch.testing.assert_close(start["layers.0.mlp.up_proj.weight"][:inner - 8],
                               last["mlp.shared_experts.up_proj.weight"])


def test_kind_follows_the_target_or_the_wish(config: TrainConfig, tiny_target: Path) -> None:
    wishes = PlanConfig(config.target, tokens=10**6, vocab_size=70)
    spec = prepare(config).contract.draft
    assert spec is not None
    assert spec.kind == "mla"
    assert plan(wishes).parameters == sum(math.prod(shape) for shape in draft_tensors(replace(spec, fc_norm=False))
                                          .values())
    assert plan(replace(wishes, kind="llama")).parameters > plan(wishes).parameters
    assert prepare(replace(config, kind="llama")).contract.draft.kind == "llama"  # type: ignore[union-attr]
    with pytest.raises(InvalidInput, match="no q_lora_rank, kv_lora_rank"):
        plan(replace(wishes, target=tiny_target, kind="mla"))
    with pytest.raises(InvalidInput, match="2 layers"):
        prepare(replace(config, num_layers=2))


def test_operations_count_the_latents() -> None:
    m, heads, h = MLA.mla, MLA.num_heads, MLA.hidden_size
    assert m is not None
    attention = 2 * h * (m.q_lora_rank + m.kv_lora_rank + m.qk_rope_head_dim) + m.q_lora_rank * heads * m.qk_head_dim
    attention += m.kv_lora_rank * heads * (m.qk_nope_head_dim + m.v_head_dim) + heads * m.v_head_dim * h
    assert layer_weights(MLA) == attention + 3 * h * MLA.intermediate_size
