"""Quantised drafts: parameters that the class loads pass, those of which it is not known warn, plain layers fail."""

from __future__ import annotations

import struct
from pathlib import Path

import drafts
import pytest
from drafts import Folder, Tensor, bf16, ones

from eyas_contract.engines import check

ONE = Tensor("F32", [], struct.pack("<f", 1.0))


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return drafts.target().write(tmp_path / "target")


def quantised(folder: Folder, method: str, *parameters: str) -> Folder:
    """Every projection in eight bits with these parameters beside it."""
    folder.config["quantization_config"] = {"quant_method": method}
    for name in [name for name in folder.tensors if name.endswith("_proj.weight")]:
        shape = folder.tensors[name].shape
        folder.tensors[name] = Tensor("F8_E4M3", shape, b"\x38" * (shape[0] * shape[1]))
        folder.tensors |= {name.replace("weight", parameter): ONE for parameter in parameters}
    return folder


def codes(folder: Folder, tmp_path: Path, target: Path, **options: str) -> dict[str, str]:
    findings = check(folder.write(tmp_path / "draft"), target, **options)  # type: ignore[arg-type]
    return {f.code: f.severity for f in findings if f.severity != "note"}


def test_parameters_that_sglang_registers_pass(tmp_path: Path, target: Path) -> None:
    assert codes(quantised(drafts.draft(), "fp8", "weight_scale", "input_scale"), tmp_path, target) == {}
    assert codes(quantised(drafts.draft(), "modelopt", "weight_scale", "input_scale"), tmp_path, target) == {}


def test_packed_weights_stand_for_the_plain_ones(tmp_path: Path, target: Path) -> None:
    folder = quantised(drafts.draft(), "gptq", "qweight", "qzeros", "scales", "g_idx")
    packed = Tensor("I32", [1], b"\1\0\0\0")
    folder.tensors = {name: packed if name.endswith((".qweight", ".qzeros", ".g_idx")) else tensor
                      for name, tensor in folder.tensors.items() if not name.endswith("_proj.weight")}
    assert codes(folder, tmp_path, target) == {}


def test_what_is_not_known_to_be_loaded_warns(tmp_path: Path, target: Path) -> None:
    unsure = {"tensor-quantised": "warning"}
    assert codes(quantised(drafts.draft(), "fp8", "weight_scale", "k_scale"), tmp_path, target) == unsure
    assert codes(quantised(drafts.draft(), "new-method", "weight_scale"), tmp_path, target) == unsure
    vllm = quantised(drafts.draft(eagle_aux_hidden_state_layer_ids=[2, 6, 9]), "fp8", "weight_scale")
    assert codes(vllm, tmp_path, target, engine="vllm", version="0.33.0") == unsure
    kimi = drafts.mla_target().write(tmp_path / "kimi")
    assert codes(quantised(drafts.mla_draft(), "fp8", "weight_scale"), tmp_path, kimi) == unsure


def test_a_plain_layer_in_eight_bits_fails(tmp_path: Path, target: Path) -> None:
    folder = quantised(drafts.draft(), "fp8", "weight_scale")
    folder.tensors["fc.weight"] = Tensor("F8_E4M3", [64, 192], b"\x38" * (64 * 192))
    folder.tensors["fc.weight_scale"] = ONE
    assert codes(folder, tmp_path, target) == {"tensor-dropped": "error", "tensor-dtype": "error"}


def test_scales_without_a_method_are_dropped(tmp_path: Path, target: Path) -> None:
    folder = drafts.draft()
    folder.tensors["midlayer.self_attn.q_proj.weight_scale"] = ones(1)
    assert codes(folder, tmp_path, target) == {"tensor-dropped": "error"}


def fused(tensor: Tensor) -> Folder:
    folder = drafts.draft()
    for part in "qkv":
        del folder.tensors[f"midlayer.self_attn.{part}_proj.weight"]
    folder.tensors["midlayer.self_attn.qkv_proj.weight"] = tensor
    return folder


def test_a_tensor_that_stands_for_several_has_their_shape_and_a_plain_dtype(tmp_path: Path, target: Path) -> None:
    assert codes(fused(bf16([128, 128])), tmp_path / "good", target) == {}
    assert codes(fused(bf16([96, 128])), tmp_path / "rows", target) == {"tensor-shape": "error"}
    assert codes(fused(bf16([128, 64])), tmp_path / "width", target) == {"tensor-shape": "error"}
    eight = Tensor("F8_E4M3", [128, 128], b"\x38" * (128 * 128))
    assert codes(fused(eight), tmp_path / "eight", target) == {"tensor-dtype": "error"}
    both = fused(bf16([128, 128]))
    both.tensors["midlayer.self_attn.q_proj.weight"] = bf16([64, 128])
    assert codes(both, tmp_path / "both", target) == {"tensor-twice": "error"}
