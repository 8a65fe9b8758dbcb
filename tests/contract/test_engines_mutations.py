"""From a good draft, one change at a time: every harmful one is found under its code, no harmless one fails."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import drafts
import pytest
from drafts import Folder, Tensor, bf16, int64, mask, ones

from eyas_contract.engines import ServerFlags, check, verdict
from eyas_contract.errors import InvalidInput

Change = Callable[[Folder], Any]


def put(key: str, value: Any) -> Change:
    """Set a config key (`eagle_config.x` for a nested one)."""
    def change(folder: Folder) -> None:
        where = folder.config
        *path, last = key.split(".")
        for part in path:
            where = where[part]
        where[last] = value
    return change


def remove(key: str) -> Change:
    return lambda folder: folder.config.pop(key)


def tensor(name: str, value: Tensor) -> Change:
    def change(folder: Folder) -> None:
        folder.tensors[name] = value
    return change


def without(*names: str) -> Change:
    def change(folder: Folder) -> None:
        for name in names:
            del folder.tensors[name]
    return change


def renamed(old: str, new: str) -> Change:
    return lambda folder: folder.rename(old, new)


def overwrite(name: str, at: int, data: bytes) -> Change:
    def change(folder: Folder) -> None:
        old = folder.tensors[name].data
        folder.tensors[name].data = old[:at] + data + old[at + len(data):]
    return change


IDS = "eagle_config.eagle_aux_hidden_state_layer_ids"
Q, K, DOWN = (f"midlayer.{n}.weight" for n in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj"))
OFFSETS = [t - i for i, t in enumerate(drafts.IDS)]
HARMFUL: list[tuple[str, str, Change]] = [
    # names
    ("layer under an unknown name", "tensor-dropped", renamed("midlayer.", "decoder_layers.0.")),
    ("layer as midlayers.0", "tensor-dropped", renamed("midlayer.", "midlayers.0.")),
    ("layer as model.layers.1", "tensor-dropped", renamed("midlayer.", "layers.1.")),
    ("q_proj as query", "tensor-dropped", renamed("midlayer.self_attn.q_proj", "midlayer.self_attn.query")),
    ("fc as fusion", "tensor-dropped", renamed("fc.", "fusion.")),
    ("final norm as ln_f", "tensor-dropped", renamed("norm.", "ln_f.")),
    ("head as output", "tensor-dropped", renamed("lm_head.", "output.")),
    ("prefix draft.", "tensor-dropped", renamed("midlayer.", "draft.midlayer.")),
    ("Llama 4's other width", "tensor-shape", lambda f: f.config.update(model_type="llama4_text",
                                                                       intermediate_size_mlp=256)),
    ("extra tensor", "tensor-dropped", tensor("input_norm.weight", ones(192))),
    ("bias of q_proj", "tensor-dropped", tensor("midlayer.self_attn.q_proj.bias", ones(64))),
    ("layer twice", "tensor-twice", tensor("layers.0.self_attn.q_proj.weight", bf16([64, 128]))),
    # missing
    ("no fc", "tensor-missing", without("fc.weight")),
    ("no norm", "tensor-missing", without("norm.weight")),
    ("no hidden_norm", "tensor-missing", without("midlayer.hidden_norm.weight")),
    ("no input_layernorm", "tensor-missing", without("midlayer.input_layernorm.weight")),
    ("no v_proj", "tensor-missing", without("midlayer.self_attn.v_proj.weight")),
    ("no down_proj", "tensor-missing", without(DOWN)),
    ("no head", "head-missing", without("lm_head.weight")),
    ("no weights at all, but a contract", "contract-unreadable",
     lambda f: (f.tensors.clear(), f.files.update({"contract.json": "{}"}))),
    # shapes and dtypes
    ("fc for two states", "aux-layer-count", tensor("fc.weight", bf16([64, 128]))),
    ("fc of another height", "tensor-shape", tensor("fc.weight", bf16([32, 192]))),
    ("q_proj of one hidden width", "tensor-shape", tensor(Q, bf16([64, 64]))),
    ("k_proj of four heads", "tensor-shape", tensor(K, bf16([64, 128]))),
    ("down_proj transposed", "tensor-shape", tensor(DOWN, bf16([128, 64]))),
    ("norm of another width", "tensor-shape", tensor("norm.weight", ones(32))),
    ("head of 95 rows", "tensor-shape", tensor("lm_head.weight", bf16([95, 64]))),
    ("gate of another width", "tensor-shape", put("intermediate_size", 256)),
    ("fc in int8", "tensor-dtype", tensor("fc.weight", Tensor("I8", [64, 192], b"\1" * 64 * 192))),
    ("q_proj in fp8", "tensor-dtype", tensor(Q, Tensor("F8_E4M3", [64, 128], b"\1" * 64 * 128))),
    ("head_dim missing", "head-dim", lambda f: (f.config.pop("head_dim"), f.config.update(num_attention_heads=8,
                                                                                          num_key_value_heads=4),
                                                f.tensors.update({Q: bf16([128, 128]), K: bf16([64, 128])}))),
    ("head_dim wrong", "head-dim", put("head_dim", 32)),
    # vocabulary map
    ("no d2t", "d2t-missing", without("d2t")),
    ("absolute d2t", "d2t-absolute", tensor("d2t", int64(drafts.IDS))),
    ("absolute identity", "d2t-absolute", tensor("d2t", int64(list(range(96))))),
    ("absolute d2t that stays inside", "d2t-absolute", lambda f: (f.tensors.pop("t2d"), f.tensors.update(
        d2t=int64([i * 3 // 2 + i % 2 for i in range(96)])))),
    ("d2t negative", "d2t-values", tensor("d2t", int64([-1, *OFFSETS[1:]]))),
    ("d2t beyond", "d2t-values", tensor("d2t", int64([*OFFSETS[:-1], 400]))),
    ("d2t doubled", "d2t-values", tensor("d2t", int64([*OFFSETS[:5], OFFSETS[5] - drafts.IDS[5] + drafts.IDS[4],
                                                       *OFFSETS[6:]]))),
    ("d2t too short", "d2t-shape", tensor("d2t", int64(OFFSETS[:-1]))),
    ("d2t in floats", "d2t-shape", tensor("d2t", bf16([96]))),
    ("d2t all zeros", "t2d-disagrees", tensor("d2t", int64([0] * 96))),
    ("t2d of other tokens", "t2d-disagrees", tensor("t2d", mask(list(range(96)), 256))),
    ("t2d too short", "t2d-shape", tensor("t2d", mask(drafts.IDS, 255))),
    ("draft vocabulary above the target's", "vocab-size", put("draft_vocab_size", 300)),
    ("target vocabulary in the config", "vocab-size", put("vocab_size", 128)),
    ("draft_vocab_size left out", "config-keys", remove("draft_vocab_size")),
    # head and embedding
    ("another activation", "config-value", put("hidden_act", "gelu_pytorch_tanh")),
    ("head tied", "head-tied", put("tie_word_embeddings", True)),
    ("head replaced by the target's", "head-replaced", put("draft_vocab_size", None)),
    ("embedding of another width", "tensor-shape", tensor("embed_tokens.weight", bf16([256, 32]))),
    ("embedding of the draft's vocabulary", "tensor-shape", tensor("embed_tokens.weight", bf16([96, 64]))),
    ("narrow draft without embedding", "embedding-missing", put("target_hidden_size", 128)),
    ("target_hidden_size null", "config-value", put("target_hidden_size", None)),
    # aux layers
    ("states switched off", "aux-disabled", put("eagle_config.use_aux_hidden_state", False)),
    ("boundary ids", "aux-layer-convention", put(IDS, [2, 6, 9])),
    ("ids out of order", "aux-layer-range", put(IDS, [8, 5, 1])),
    ("ids doubled", "aux-layer-range", put(IDS, [1, 5, 5])),
    ("id of the last layer", "aux-layer-range", put(IDS, [1, 5, 11])),
    ("id beyond", "aux-layer-range", put(IDS, [1, 5, 40])),
    ("negative id", "aux-layer-range", put(IDS, [-1, 5, 8])),
    ("other layers named for another engine", "aux-layer-ids", put("eagle_aux_hidden_state_layer_ids", [4, 7, 9])),
    ("layers named for another engine alone", "aux-layer-ids", lambda f: (f.config.pop("eagle_config"), f.config.update(
        eagle_aux_hidden_state_layer_ids=[4, 7, 9]))),
    ("two ids", "aux-layer-count", put(IDS, [1, 8])),
    ("ids as text", "aux-layer-ids", put(IDS, "1,5,8")),
    ("ids as floats", "aux-layer-ids", put(IDS, [1.0, 5.0, 8.0])),
    ("num_aux_hidden_states 4", "aux-layer-count", put("num_aux_hidden_states", 4)),
    ("two ids, and a number that fits fc", "aux-layer-count", lambda f: (put(IDS, [1, 8])(f),
                                                                        put("num_aux_hidden_states", 3)(f))),
    ("fc for four states, no ids", "aux-layer-count", lambda f: (f.config.pop("eagle_config"), f.config.update(
        num_aux_hidden_states=4), f.tensors.update({"fc.weight": bf16([64, 256])}))),
    ("ids under the newer vLLM's key", "aux-layer-convention", put("eagle_config", {"layer_ids": [3, 6, 9]})),
    ("ids under a misspelt key", "aux-layer-convention", put("eagle_config", {
        "aux_hidden_state_layer_ids": [3, 6, 9]})),
    # norms
    ("norm before the residual", "norm-before-residual", put("norm_before_residual", True)),
    ("fc_norm asked for, not there", "tensor-missing", put("fc_norm", True)),
    ("norm_before_fc asked for, not there", "tensor-missing", put("norm_before_fc", True)),
    ("fc_norm there, not asked for", "norm-flag-missing", lambda f: f.tensors.update(
        {f"fc_norm.{i}.weight": ones(64) for i in range(3)})),
    ("input_norm there, not asked for", "norm-flag-missing", tensor("input_norm.weight", ones(192))),
    # rope and positions
    ("other theta", "rope-differs", put("rope_theta", 10000.0)),
    ("theta left out", "rope-differs", remove("rope_theta")),
    ("yarn", "rope-differs", put("rope_scaling", {"type": "yarn", "factor": 4.0})),
    ("two ropes", "rope-spellings", put("rope_parameters", {"rope_theta": 10000.0, "rope_type": "default"})),
    ("positions of 2048", "positions-short", put("max_position_embeddings", 2048)),
    ("positions left out", "positions-short", remove("max_position_embeddings")),
    ("theta of zero", "config-value", put("rope_theta", 0)),
    ("theta as text", "config-value", put("rope_theta", "500000")),
    # config
    ("plain Llama class", "draft-architecture", put("architectures", ["LlamaForCausalLM"])),
    ("no class", "draft-architecture", remove("architectures")),
    ("no hidden_size", "config-keys", remove("hidden_size")),
    ("no model_type", "config-keys", remove("model_type")),
    ("no num_hidden_layers", "config-keys", remove("num_hidden_layers")),
    ("norm_output as text", "config-value", put("norm_output", "false")),
    # what another model_type fills in
    ("Qwen 3's width of a head", "head-dim", lambda f: (f.config.pop("head_dim"), put("model_type", "qwen3")(f))),
    ("Mistral's key-value heads", "tensor-shape", lambda f: (f.config.pop("num_key_value_heads"),
                                                             put("model_type", "mistral")(f))),
    ("Gemma's tied head", "head-tied", lambda f: (f.config.pop("tie_word_embeddings"),
                                                  put("model_type", "gemma3_text")(f))),
    ("gpt-oss's bias", "tensor-missing", put("model_type", "gpt_oss")),
    ("half a head rotated", "rope-differs", put("model_type", "glm4_moe")),
    ("hidden_size as text", "config-value", put("hidden_size", "64")),
    ("heads of zero", "config-value", put("num_attention_heads", 0)),
    ("another hidden size", "target-hidden-size", put("hidden_size", 128)),
    ("eagle_config a list", "config-value", put("eagle_config", [])),
    ("quantisation of the target", "quantization-config", put("quantization_config", {"quant_method": "fp8"})),
    # values
    ("NaN in fc", "values-nonfinite", overwrite("fc.weight", 100, struct.pack("<H", 0x7FC0))),
    ("infinity in a norm", "values-nonfinite", overwrite("norm.weight", 2, struct.pack("<H", 0x7F80))),
    ("fc of zeros", "values-zero", overwrite("fc.weight", 0, b"\0" * 64 * 192 * 2)),
    ("norm of zeros", "values-zero", overwrite("norm.weight", 0, b"\0" * 128)),
]
WARN = {"aux-layer-convention", "rope-differs", "t2d-shape"}  # these warn; every other one fails


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return drafts.target().write(tmp_path_factory.mktemp("target"))


def test_the_good_draft_passes_in_every_version(tmp_path: Path, target: Path) -> None:
    folder = drafts.draft().write(tmp_path / "draft")
    for version in ("0.5.10", "0.5.11", "0.5.12", "0.5.16", "0.5.17", "0.5.20", "0.5.23", None):
        findings = check(folder, target, version=version)
        assert verdict(findings) == "pass", findings
        assert {f.severity for f in findings} <= {"note"}


@pytest.mark.parametrize(("code", "change"), [row[1:] for row in HARMFUL], ids=[row[0] for row in HARMFUL])
def test_each_harmful_change_is_found(code: str, change: Change, tmp_path: Path, target: Path) -> None:
    folder = drafts.draft()
    change(folder)
    findings = check(folder.write(tmp_path / "draft"), target)
    assert code in {f.code for f in findings}, findings
    assert verdict(findings) == ("warn" if code in WARN else "fail"), findings
    for finding in findings:
        assert all((finding.where, finding.found, finding.wanted, finding.consequence, finding.remedy)), finding


def test_a_map_that_was_never_filled(tmp_path: Path, target: Path) -> None:
    folder = drafts.draft()
    folder.tensors |= {"d2t": int64([0] * 96), "t2d": mask(list(range(96)), 256)}
    assert verdict(check(folder.write(tmp_path / "marked"), target)) == "pass", "t2d says the same"
    del folder.tensors["t2d"]
    assert [(f.code, f.severity) for f in check(folder.write(tmp_path / "draft"), target) if f.severity != "note"] \
        == [("d2t-values", "warning")]


def test_a_share_of_the_head_that_sglang_does_not_read(tmp_path: Path) -> None:
    """Draft and target alike; SGLang takes the share from outside of the rope alone, and rotates all of the head."""
    rope = {"rope_theta": 500000.0, "rope_type": "default", "partial_rotary_factor": 0.5}
    target = drafts.target(rope_parameters=rope).write(tmp_path / "target")
    found = check(drafts.draft(rope_parameters=rope, rope_scaling=rope).write(tmp_path / "draft"), target)
    assert ("rope-spellings", "warning") in {(f.code, f.severity) for f in found}
    both = drafts.draft(rope_parameters=rope, rope_scaling=rope, partial_rotary_factor=0.5).write(tmp_path / "both")
    assert verdict(check(both, target)) == "pass"


def test_there_are_sixty_harmful_changes() -> None:
    assert len(HARMFUL) >= 60


LAUNCHES: list[tuple[str, str, dict[str, Any]]] = [
    ("EAGLE", "algorithm", {"speculative_algorithm": "EAGLE"}),
    ("NEXTN", "algorithm", {"speculative_algorithm": "NEXTN"}),
    ("chain of 24", "speculation-shape", {"speculative_num_steps": 4, "speculative_eagle_topk": 1,
                                          "speculative_num_draft_tokens": 24}),
    ("no steps", "speculation-shape", {"speculative_num_steps": 0, "speculative_eagle_topk": 1,
                                       "speculative_num_draft_tokens": 1}),
    ("tree too large", "speculation-shape", {"speculative_num_steps": 3, "speculative_eagle_topk": 2,
                                             "speculative_num_draft_tokens": 12}),
    ("tokens alone", "speculation-partial", {"speculative_num_draft_tokens": 4}),
    ("torch_native", "backend-no-draft", {"attention_backend": "torch_native"}),
    ("mla backend", "backend-model", {"attention_backend": "flashmla"}),
    ("trtllm_mha with a tree", "backend-tree", {"attention_backend": "trtllm_mha", "speculative_num_steps": 3,
                                                "speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8}),
    ("pages of 16 with a tree", "backend-page-size", {
        "attention_backend": "fa4", "page_size": 16, "speculative_num_steps": 3, "speculative_eagle_topk": 4,
        "speculative_num_draft_tokens": 8}),
    ("context beyond the table", "positions-short", {"context_length": 8192}),
    ("heads by three", "tp-indivisible", {"tp_size": 3}),
    ("quantised target", "quantization-inherited", {"quantization": "fp8"}),
    ("token map", "token-map-ignored", {"speculative_token_map": "map.pt"}),
    ("YaRN for the target", "config-overridden", {"json_model_override_args": json.dumps(
        {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 4096}})}),
    ("the draft's rope without its theta", "config-overridden", {"json_model_override_args": json.dumps(
        {"rope_parameters": {"rope_type": "default"}})}),
    ("fewer layers of the target", "config-overridden", {"json_model_override_args": '{"num_hidden_layers": 4}'}),
    ("unknown backend", "backend-unknown", {"attention_backend": "mine"}),
]


@pytest.mark.parametrize(("code", "flags"), [row[1:] for row in LAUNCHES], ids=[row[0] for row in LAUNCHES])
def test_each_harmful_launch_is_found(code: str, flags: dict[str, Any], tmp_path: Path, target: Path) -> None:
    findings = check(drafts.draft().write(tmp_path / "draft"), target, flags=ServerFlags(**flags))
    assert code in {f.code for f in findings if f.severity != "note"}, findings


def test_an_override_that_leaves_the_draft_as_it_is_passes(tmp_path: Path, target: Path) -> None:
    folder = drafts.draft().write(tmp_path / "draft")
    same = {"rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}, "max_position_embeddings": 8192}
    flags = ServerFlags.from_command(f"serve --json-model-override-args '{json.dumps(same)}'")
    assert verdict(check(folder, target, flags=flags)) == "pass"
    for text in ("{", "[1]", '{"rope_scaling": 4}', '{"rope_scaling": {"factor": "4"}}'):
        with pytest.raises(InvalidInput, match="--json-model-override-args"):
            check(folder, target, flags=ServerFlags(json_model_override_args=text))


def _sharded(folder: Folder) -> None:
    folder.files["note.txt"] = "kept"


HARMLESS: list[tuple[str, Change]] = [
    ("layers.0", renamed("midlayer.", "layers.0.")),
    ("model. before the layer", renamed("midlayer.", "model.midlayer.")),
    ("model.layers.0", renamed("midlayer.", "model.layers.0.")),
    ("model. before fc", renamed("fc.", "model.fc.")),
    ("model. before norm", renamed("norm.", "model.norm.")),
    ("Llama 4's width of the feed-forward", lambda f: f.config.update(
        model_type="llama4_text", intermediate_size=64, intermediate_size_mlp=128)),
    ("a table of rope", tensor("midlayer.self_attn.rotary_emb.inv_freq", bf16([8]))),
    ("own embedding", tensor("embed_tokens.weight", bf16([256, 64]))),
    ("no t2d", without("t2d")),
    ("t2d as bytes", lambda f: setattr(f.tensors["t2d"], "dtype", "U8")),
    ("d2t as int32", tensor("d2t", Tensor("I32", [96], struct.pack("<96i", *OFFSETS)))),
    ("weights in float32", tensor("fc.weight", Tensor("F32", [64, 192], struct.pack("<f", 0.5) * 64 * 192))),
    ("weights in float16", tensor("fc.weight", Tensor("F16", [64, 192], struct.pack("<e", 0.5) * 64 * 192))),
    ("norms of other values", tensor("norm.weight", bf16([64], 9, 3.0))),
    ("large weights", tensor("fc.weight", bf16([64, 192], 5, 50.0))),
    ("one zero number", overwrite("fc.weight", 0, b"\0\0")),
    ("num_aux_hidden_states 3", put("num_aux_hidden_states", 3)),
    ("target_hidden_size equal", put("target_hidden_size", 64)),
    ("norm flags off", lambda f: f.config.update(fc_norm=False, norm_output=False, norm_before_fc=False,
                                                 norm_before_residual=False)),
    ("norm_output on", put("norm_output", True)),
    ("fc_norm, with its weights", lambda f: (f.config.update(fc_norm=True), f.tensors.update(
        {f"fc_norm.{i}.weight": ones(64) for i in range(3)}))),
    ("fc_norm by its old names", lambda f: (f.config.update(use_aux_norm=True), f.tensors.update(
        {f"aux_norm_{n}.weight": ones(64) for n in ("low", "mid", "high")}))),
    ("norm_before_fc, with its weight", lambda f: (f.config.update(norm_before_fc=True), f.tensors.update(
        {"input_norm.weight": ones(192)}))),
    ("both spellings of rope", put("rope_parameters", {"rope_theta": 500000.0, "rope_type": "default"})),
    ("rope_parameters alone", lambda f: (f.config.pop("rope_theta"), f.config.pop("rope_scaling"), f.config.update(
        rope_parameters={"rope_theta": 500000, "rope_type": "default"}))),
    ("another type, every key written", lambda f: f.config.update(model_type="qwen3", attention_bias=False)),
    ("the layers under another name, as the server captures them", put("eagle_config", {"layer_ids": [2, 6, 9]})),
    ("norm flags null or as numbers", lambda f: f.config.update(norm_output=0, fc_norm=None)),
    ("theta as a whole number", put("rope_theta", 500000)),
    ("more positions than the target", put("max_position_embeddings", 131072)),
    ("other eps", put("rms_norm_eps", 1e-6)),
    ("dtype key", put("dtype", "bfloat16")),
    ("unknown keys", lambda f: f.config.update(use_cache=True, _name_or_path="x", transformers_version="5.0")),
    ("no use_aux_hidden_state", lambda f: f.config["eagle_config"].pop("use_aux_hidden_state")),
    ("no ids: the defaults", lambda f: f.config["eagle_config"].pop("eagle_aux_hidden_state_layer_ids")),
    ("no eagle_config", remove("eagle_config")),
    ("other layers", put(IDS, [0, 3, 10])),
    ("top-level ids for another engine", put("eagle_aux_hidden_state_layer_ids", [2, 6, 9])),
    ("a file beside", _sharded),
    ("no tie_word_embeddings", remove("tie_word_embeddings")),
    ("attention_bias false", put("attention_bias", False)),
    ("a training record", lambda f: f.files.update({"train_meta.json": json.dumps({"max_length": 2048})})),
    ("key-value heads equal heads", lambda f: (f.config.update(num_key_value_heads=4), f.tensors.update(
        {f"midlayer.self_attn.{n}_proj.weight": bf16([64, 128]) for n in "kv"}))),
]


@pytest.mark.parametrize("change", [row[1] for row in HARMLESS], ids=[row[0] for row in HARMLESS])
def test_no_harmless_change_fails(change: Change, tmp_path: Path, target: Path) -> None:
    folder = drafts.draft()
    change(folder)
    findings = check(folder.write(tmp_path / "draft"), target)
    assert verdict(findings) == "pass", findings


def test_there_are_thirty_harmless_changes() -> None:
    assert len(HARMLESS) >= 30


def test_no_change_of_the_target_is_missed(tmp_path: Path) -> None:
    folder = drafts.draft().write(tmp_path / "draft")
    for code, changes in [("target-hidden-size", {"hidden_size": 128}), ("vocab-size", {"vocab_size": 512}),
                          ("aux-layer-range", {"num_hidden_layers": 8}),
                          ("target-without-hook", {"architectures": ["MixtralForCausalLM"]}),
                          ("target-class-unknown", {"architectures": ["NewForCausalLM"]}),
                          ("hook-marks-nothing", {"architectures": ["Qwen3_5ForConditionalGeneration"]})]:
        findings = check(folder, drafts.target(**changes).write(tmp_path / code))
        assert code in {f.code for f in findings}, findings
        assert verdict(findings) != "pass"
