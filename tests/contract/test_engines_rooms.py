"""The rooms beyond the good Llama draft on SGLang: MLA drafts, vLLM, contracts, GPUs, memory."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import drafts
import pytest
from drafts import Folder, bf16, ones

from eyas_contract import CaptureSpec, Contract, DraftSpec, MlaSizes, Rope, TargetSpec, VocabMap, store_tensors
from eyas_contract.engines import ServerFlags, check, verdict
from eyas_contract.engines.checks.capacity import kv_bytes_per_token
from eyas_contract.engines.hardware import find_gpu
from eyas_contract.engines.sglang import export_config

CHAIN = ServerFlags(speculative_num_steps=3, speculative_eagle_topk=1, speculative_num_draft_tokens=4)


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return drafts.target().write(tmp_path / "target")


@pytest.fixture
def kimi(tmp_path: Path) -> Path:
    return drafts.mla_target().write(tmp_path / "kimi")


def codes(folder: Folder, tmp_path: Path, target: Path, **options: object) -> dict[str, str]:
    findings = check(folder.write(tmp_path / "draft"), target, **options)  # type: ignore[arg-type]
    return {f.code: f.severity for f in findings if f.severity != "note"}


def test_an_mla_draft(tmp_path: Path, kimi: Path) -> None:
    assert codes(drafts.mla_draft(), tmp_path, kimi) == {}
    assert codes(drafts.mla_draft(target_hidden_size=None), tmp_path, kimi) == {}, "the MLA class takes hidden_size"
    assert codes(drafts.mla_draft(), tmp_path, kimi, version="0.5.11") == {"draft-architecture": "error"}
    assert codes(drafts.mla_draft(fc_norm=True), tmp_path, kimi, version="0.5.12")["norm-ignored"] == "error"
    assert codes(drafts.mla_draft(num_hidden_layers=2), tmp_path, kimi) == {"num-layers": "error"}
    prefixed = drafts.mla_draft()
    prefixed.rename("midlayer.", "model.midlayer.")
    assert codes(prefixed, tmp_path, kimi)["tensor-dropped"] == "error"
    lone = drafts.mla_draft()
    del lone.tensors["midlayer.self_attn.kv_a_proj_with_mqa.weight"]
    assert codes(lone, tmp_path, kimi) == {"tensor-missing": "error"}
    short = drafts.mla_draft()
    del short.config["q_lora_rank"]
    assert codes(short, tmp_path, kimi) == {"config-keys": "error"}


def test_version_dependent_norms_and_layers(tmp_path: Path, target: Path) -> None:
    normed = drafts.draft(norm_before_fc=True)
    normed.tensors["input_norm.weight"] = ones(192)
    assert codes(normed, tmp_path, target, version="0.5.17") == {}
    assert codes(normed, tmp_path, target, version="0.5.16") == {
        "norm-ignored": "error", "tensor-dropped": "error"}
    two = drafts.draft(num_hidden_layers=2)
    two.tensors |= {name.replace("midlayer", "layers.1"): value for name, value in two.tensors.items()
                    if name.startswith("midlayer") and "_proj" not in name.replace("mlp", "")}
    two.tensors |= {f"layers.1.self_attn.{n}_proj.weight": bf16([64 if n in "qo" else 32, 64]) for n in "qkvo"}
    two.tensors |= {name.replace("midlayer", "layers.1"): value for name, value in two.tensors.items()
                    if "mlp" in name and name.startswith("midlayer")}
    assert codes(two, tmp_path, target) == {"multi-layer-norms": "warning"}
    assert codes(two, tmp_path, target, version="0.5.11")["num-layers"] == "error"
    four = drafts.draft(num_aux_hidden_states=4)
    four.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 3, 5, 8]
    four.tensors["fc.weight"] = bf16([64, 256])
    assert codes(four, tmp_path, target) == {}
    assert codes(four, tmp_path, target, version="0.5.11") == {"aux-layer-count": "error"}


def test_gpt_oss_reads_a_last_boundary_as_such(tmp_path: Path) -> None:
    target = drafts.target(architectures=["GptOssForCausalLM"]).write(tmp_path / "target")
    folder = drafts.draft()
    folder.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [6, 9, 12]
    assert codes(folder, tmp_path, target, version="0.5.17") == {}
    assert codes(folder, tmp_path, target, version="0.5.16") == {"aux-layer-range": "error"}


def test_vllm(tmp_path: Path, target: Path) -> None:
    vllm = {"engine": "vllm", "version": "0.33.0"}
    both = drafts.draft(eagle_aux_hidden_state_layer_ids=[2, 6, 9])
    assert codes(both, tmp_path, target, **vllm) == {}
    assert codes(drafts.draft(), tmp_path, target, **vllm) == {"aux-layer-convention": "warning"}
    other = drafts.draft(eagle_aux_hidden_state_layer_ids=[2, 6, 9])
    other.rename("fc.", "model.fc.")
    assert codes(other, tmp_path, target, **vllm)["tensor-refused"] == "error"
    full = drafts.draft(full=True, eagle_aux_hidden_state_layer_ids=[2, 6, 9])
    full.tensors["d2t"] = drafts.int64([0] * 256)
    assert codes(full, tmp_path, target, **vllm) == {"d2t-unneeded": "error"}
    del full.tensors["d2t"], full.tensors["lm_head.weight"]
    assert codes(full, tmp_path, target, **vllm) == {}
    nested = drafts.speculators(drafts.draft())
    assert codes(nested, tmp_path, target, **vllm) == {}
    assert codes(nested, tmp_path, target)["config-nested"] == "error"
    nested.config["norm_before_residual"] = True
    assert codes(nested, tmp_path, target, **vllm) == {}
    assert codes(nested, tmp_path, target)["norm-before-residual"] == "error"
    assert verdict(check(both.write(tmp_path / "draft"), target, "vllm", "0.50.0")) == "warn"


def test_vllm_runners_that_read_different_layers_are_both_named(tmp_path: Path, target: Path) -> None:
    folder = drafts.draft()
    folder.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [3, 5, 8]
    folder.files["train_meta.json"] = json.dumps({"aux_layer_ids": [2, 4, 7]})
    findings = check(folder.write(tmp_path / "draft"), target, "vllm", "0.33.0")
    wrong = [f for f in findings if f.code == "aux-layer-ids"]
    assert ["eagle3_utils" in f.where for f in wrong] == [True]
    assert "[3, 5, 8]" in wrong[0].remedy


def contract(target: Path) -> Contract:
    spec = TargetSpec.from_folder(target)
    draft = DraftSpec("llama", 1, 64, 128, 4, 2, 16, 64, 3, 96, 256, 4096, Rope("default", 500000.0), 1e-5, "silu",
                      False, False, False, "bfloat16")
    return Contract(spec, CaptureSpec((1, 5, 8), 64, "pre_norm", store_tensors("BF16"), 1024),
                    VocabMap(256, tuple(drafts.IDS)), draft)


def exported(target: Path, made: Contract) -> Folder:
    folder = drafts.draft()
    folder.config = export_config(made)
    folder.files["contract.json"] = json.dumps(json.loads((made.save(target.parent)).read_text()))
    return folder


def test_a_draft_with_its_contract(tmp_path: Path, target: Path) -> None:
    made = contract(target)
    assert codes(exported(target, made), tmp_path, target, version=None) == {}
    other = exported(target, replace(made, vocab=VocabMap(256, tuple(range(96)))))
    assert codes(other, tmp_path, target) == {"d2t-not-trained": "error"}
    shifted = exported(target, made)
    shifted.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [2, 6, 9]
    assert codes(shifted, tmp_path, target) == {"aux-layer-ids": "error"}
    turned = exported(target, made)
    turned.config |= {"rope_theta": 10000.0, "rope_parameters": {"rope_theta": 10000.0, "rope_type": "default"}}
    assert codes(turned, tmp_path, target) == {"rope-not-as-trained": "error"}


@pytest.mark.parametrize("changes", [
    {"rms_norm_eps": 1e-2}, {"norm_output": True}, {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}])
def test_a_config_that_contradicts_its_contract(changes: dict[str, object], tmp_path: Path, target: Path) -> None:
    folder = exported(target, contract(target))
    folder.config |= changes
    findings = [f for f in check(folder.write(tmp_path / "draft"), target) if f.severity != "note"]
    assert [f.code for f in findings] == ["config-not-as-trained"]
    assert all(f"{key} {value}" in findings[0].found for key, value in changes.items())


def test_every_contradiction_of_an_mla_config_is_in_one_finding(tmp_path: Path, kimi: Path) -> None:
    sizes = MlaSizes(q_lora_rank=48, kv_lora_rank=32, qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16)
    spec, folder = TargetSpec.from_folder(kimi), drafts.mla_draft()
    draft = DraftSpec("mla", 1, 64, 128, 4, 4, 24, 64, 3, 256, 256, 4096, spec.rope, 1e-5, "silu", False, False, False,
                      "bfloat16", sizes)
    made = Contract(spec, CaptureSpec((1, 5, 8), 64, "pre_norm", store_tensors("BF16"), 1024), None, draft)
    folder.files["contract.json"] = made.save(tmp_path).read_text()
    assert codes(folder, tmp_path, kimi) == {}
    folder.config |= {"qk_nope_head_dim": 8, "v_head_dim": 24, "rms_norm_eps": 1e-6}
    found = {f.code: f.found for f in check(folder.write(tmp_path / "draft"), kimi)}["config-not-as-trained"]
    assert found == "rms_norm_eps 1e-06; qk_nope_head_dim 8; v_head_dim 24"


def test_a_share_of_rotation_written_outside_of_the_rope(tmp_path: Path, target: Path) -> None:
    folder = exported(target, contract(target))
    folder.config["partial_rotary_factor"] = 0.5
    assert codes(folder, tmp_path, target) == {"rope-not-as-trained": "error"}
    half = drafts.target(partial_rotary_factor=0.5).write(tmp_path / "half")
    assert codes(drafts.draft(partial_rotary_factor=0.5), tmp_path / "other", half) == {}
    assert codes(drafts.draft(partial_rotary_factor=0.5), tmp_path / "other", target) == {"rope-differs": "warning"}


@pytest.mark.parametrize(("code", "severity", "changes"), [
    ("other-target", "error", {"num_layers": 13}), ("other-target", "error", {"architecture": "Qwen3ForCausalLM"}),
    ("tokenizer-differs", "error", {"tokenizer_sha256": "a" * 64}),
    ("template-differs", "warning", {"chat_template_sha256": "a" * 64}),
    ("target-weights", "warning", {"weights_fingerprint": "a" * 64}),
    ("target-config", "warning", {"rms_norm_eps": 1e-6})])
def test_another_target_than_in_training(code: str, severity: str, changes: dict[str, object], tmp_path: Path) -> None:
    folder = drafts.target()
    folder.files |= {"tokenizer.json": "{}", "chat_template.jinja": "{{ messages }}"}
    folder.tensors["model.embed_tokens.weight"] = bf16([256, 64])
    target = folder.write(tmp_path / "target")
    made = contract(target)
    made = replace(made, target=replace(made.target, **changes))  # type: ignore[arg-type]
    assert codes(exported(target, made), tmp_path, target)[code] == severity


@pytest.mark.parametrize(("name", "found"), [
    ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX PRO 6000"), ("NVIDIA H200", "H200"), ("h100", "H100"),
    ("NVIDIA A100-SXM4-80GB", "A100"), ("NVIDIA GB200", "GB200"), ("NVIDIA L40S", "L40S"), ("H20", "H20"),
    ("NVIDIA GeForce RTX 4090", "RTX 4090"), ("Radeon", None), ("", None)])
def test_gpus_by_the_names_that_drivers_give(name: str, found: str | None) -> None:
    gpu = find_gpu(name)
    assert (gpu.name if gpu else None) == found


@pytest.mark.parametrize(("gpu", "flags", "code", "severity"), [
    ("RTX PRO 6000", {"attention_backend": "fa3"}, "backend-gpu", "error"),
    ("RTX PRO 6000", {"attention_backend": "flashmla"}, "backend-gpu", "error"),
    ("RTX PRO 6000", {"attention_backend": "flashinfer", "speculative_eagle_topk": 4,
                      "speculative_num_draft_tokens": 8}, "backend-tree", "error"),
    ("RTX PRO 6000", {"speculative_eagle_topk": 4, "speculative_num_draft_tokens": 8}, "tree-backend", "warning"),
    ("H100", {"attention_backend": "cutlass_mla"}, "backend-no-draft", "error"),
    ("H100", {"attention_backend": "trtllm_mha"}, "backend-model", "error"),
    ("Voodoo 2", {}, "gpu-unknown", "warning")])
def test_backends_against_gpu_and_mla(gpu: str, flags: dict[str, object], code: str, severity: str, tmp_path: Path,
                                      kimi: Path) -> None:
    given = replace(CHAIN, **flags)  # type: ignore[arg-type]
    assert codes(drafts.mla_draft(), tmp_path, kimi, gpu=gpu, flags=given)[code] == severity


def test_triton_does_trees_of_mla_on_sm120(tmp_path: Path, kimi: Path) -> None:
    flags = replace(CHAIN, speculative_eagle_topk=4, speculative_num_draft_tokens=8, attention_backend="triton")
    assert codes(drafts.mla_draft(), tmp_path, kimi, gpu="RTX PRO 6000", flags=flags) == {}


def sized(folder: Path, size: int) -> Path:
    """Give a target's folder a weight file of this many bytes, as a hole."""
    with (folder / "model.safetensors").open("wb") as sink:
        sink.truncate(size)
    return folder


@pytest.mark.parametrize(("gib", "tp", "context", "severity"), [
    (600, 8, None, "note"), (600, 4, None, "error"), (726, 8, 4096, "warning"), (740, 8, None, "error")])
def test_memory_per_gpu(gib: int, tp: int, context: int | None, severity: str, tmp_path: Path) -> None:
    target = sized(drafts.target(num_attention_heads=64, num_key_value_heads=64, head_dim=4096,
                                 max_position_embeddings=4096).write(tmp_path / "target"), gib * 2**30)
    findings = check(drafts.draft(num_attention_heads=64).write(tmp_path / "draft"), target, gpu="RTX PRO 6000", tp=tp,
                     flags=replace(CHAIN, context_length=context))
    found = [f for f in findings if f.code == "memory"]
    assert [f.severity for f in found] == [severity], found
    assert f"tp {tp}" in found[0].found


def test_kv_bytes() -> None:
    llama = {"num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096, "head_dim": 128}
    assert kv_bytes_per_token(llama, 32, 2, 1) == 2 * 32 * 8 * 128 * 2
    assert kv_bytes_per_token(llama, 32, 2, 8) == 2 * 32 * 1 * 128 * 2
    assert kv_bytes_per_token(llama, 32, 2, 16) == 2 * 32 * 1 * 128 * 2  # heads are not split further
    assert kv_bytes_per_token({"kv_lora_rank": 512, "qk_rope_head_dim": 64}, 61, 2, 8) == 61 * 576 * 2


def test_tensor_parallel_of_a_real_size(tmp_path: Path, target: Path) -> None:
    assert codes(drafts.draft(), tmp_path, target, tp=4) == {}  # 4 heads, 2 KV heads
    assert codes(drafts.draft(), tmp_path, target, tp=8) == {"tp-indivisible": "error"}


def test_flags_from_a_command_line() -> None:
    flags = ServerFlags.from_command("launch --tp 8 --speculative-num-steps=3 --page-size 16 --unknown x "
                                     "--speculative-algorithm EAGLE3")
    assert (flags.tp_size, flags.speculative_num_steps, flags.page_size) == (8, 3, 16)
    assert flags.speculative_algorithm == "EAGLE3"
    for bad in ("launch --tp", "launch --page-size many", "launch 'open"):
        with pytest.raises(ValueError, match=r"flag|quote"):
            ServerFlags.from_command(bad)
