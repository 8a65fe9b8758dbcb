"""What a run starts from, and what it refuses to start from."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import storemaker
import torch
from safetensors.torch import load_file, save_file

from eyas_contract import ContractMismatch, InvalidInput, Rope, TargetSpec
from eyas_draft.config import TrainConfig
from eyas_draft.setup import draft_ids, prepare, special_ids_seen
from eyas_draft.sizes import draft_sizes
from eyas_draft.target_weights import TargetWeights
from eyas_draft.train import Trainer


def settings(store: Path, target: Path, out: Path, **changes: object) -> TrainConfig:
    return TrainConfig(store, target, out, **{"vocab_size": 64, **changes})  # type: ignore[arg-type]


def test_every_difference_to_another_target_is_listed(store: Path, tiny_target: Path, tmp_path: Path) -> None:
    other = Path(shutil.copytree(tiny_target, tmp_path / "other"))
    plain = json.loads((other / "config.json").read_text())
    plain["rms_norm_eps"] = 1e-3
    (other / "config.json").write_text(json.dumps(plain))
    weights = load_file(other / "model.safetensors")
    weights["model.norm.weight"] += 1
    save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ContractMismatch) as caught:
        prepare(settings(store, other, tmp_path / "run"))
    assert {m.field for m in caught.value.mismatches} == {"target.rms_norm_eps", "target.weights_fingerprint"}


def test_the_draft_takes_the_targets_sizes_and_special_tokens(store: Path, tiny_target: Path, tmp_path: Path) -> None:
    made = prepare(settings(store, tiny_target, tmp_path))
    spec = made.contract.draft
    assert spec is not None
    assert (spec.hidden_size, spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.intermediate_size) == (
        64, 4, 2, 16, 192)
    assert (spec.num_aux, spec.draft_vocab_size, spec.dtype) == (3, 64, "float32")
    end = json.loads((tiny_target / "config.json").read_text())["eos_token_id"]
    assert end in draft_ids(made.contract).tolist()
    assert end in special_ids_seen(tiny_target, made.store.token_counts())
    assert made.coverage.mass == 1.0


def test_the_draft_computes_silu_whatever_the_target_does(store: Path, tiny_target: Path, tmp_path: Path) -> None:
    """Engines build their draft layers with no other activation."""
    target = tmp_path / "gelu"
    target.mkdir()
    config = json.loads((tiny_target / "config.json").read_text()) | {"hidden_act": "gelu_pytorch_tanh"}
    (target / "config.json").write_text(json.dumps(config))
    wishes = settings(store, target, tmp_path)
    assert draft_sizes(wishes, TargetSpec.from_folder(tiny_target), 3, 64).hidden_act == "silu"


def test_the_draft_rotates_whole_heads_whatever_the_target_does(store: Path, tiny_target: Path, tmp_path: Path) -> None:
    """Of a part, engines know by different keys; a rope that is stretched over a part was no rope of the draft's."""
    wishes, target = settings(store, tiny_target, tmp_path), TargetSpec.from_folder(tiny_target)
    scaling = (("factor", 4.0), ("original_max_position_embeddings", 64))
    part = replace(target, rope=Rope("yarn", 1e4, (*scaling, ("partial_rotary_factor", 0.5))))
    assert draft_sizes(wishes, part, 3, 64).rope == Rope("yarn", 1e4, scaling)


def test_target_initialisation_computes_the_targets_last_layer(store: Path, tiny_target: Path, tmp_path: Path) -> None:
    """Before training: fc passes the last aux state on, and the layer is the target's own on the hidden half."""
    made = prepare(settings(store, tiny_target, tmp_path, init="target"))
    aux = torch.randn(5, 3 * 64)
    assert torch.equal(made.model.fuse(aux), aux[:, -64:])
    layer, last = made.model.layers[0], made.weights.last_layer
    q = layer.self_attn.q_proj.weight
    assert torch.equal(q[:, 64:], last["self_attn.q_proj.weight"].float())
    assert not q[:, :64].any()
    assert torch.equal(layer.hidden_norm.weight, last["input_layernorm.weight"].float())
    assert torch.equal(made.model.lm_head.weight, made.weights.head_vh[draft_ids(made.contract)].float())


def test_random_initialisation_follows_the_seed(store: Path, tiny_target: Path, tmp_path: Path) -> None:
    one, same, other = (prepare(settings(store, tiny_target, tmp_path, init="random", seed=s)).model.fc.weight
                        for s in (1, 1, 2))
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_the_teacher_is_the_target(store: Path, tiny_target: Path, tmp_path: Path,
                                   rows: list[storemaker.Row]) -> None:
    """Stored last states through norm and head give the greedy tokens that followed, and probabilities summing to 1."""
    trainer = Trainer(settings(store, tiny_target, tmp_path, precision="fp32", vocab_size=0))
    for _, ids, mask, _, last in rows[:8]:
        probabilities = trainer.teacher.probabilities(last)
        torch.testing.assert_close(probabilities.sum(-1), torch.ones(ids.numel()))
        wanted = torch.nonzero(mask.bool()).squeeze(1)
        assert torch.equal(probabilities[wanted - 1].argmax(-1), ids[wanted].long())
        assert trainer.teacher.proposable(last).all()


def test_a_family_with_another_norm_is_refused(tiny_target: Path) -> None:
    from dataclasses import replace
    spec = replace(TargetSpec.from_folder(tiny_target), model_type="gemma2")
    with pytest.raises(InvalidInput, match="gemma2"):
        TargetWeights.load(tiny_target, spec)


def test_too_few_steps_for_one_update_are_refused(store: Path, tiny_target: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="--accumulate"):
        Trainer(settings(store, tiny_target, tmp_path, epochs=1, accumulate=10_000))


def test_a_wider_feed_forward_begins_as_the_targets(store: Path, tiny_target: Path, tmp_path: Path) -> None:
    plain = TrainConfig(store, tiny_target, tmp_path / "a", vocab_size=64)
    narrow = prepare(plain).model
    wide = prepare(replace(plain, intermediate_size=narrow.spec.intermediate_size + 24)).model
    x = torch.randn(5, narrow.spec.hidden_size)
    torch.testing.assert_close(wide.layers[0].mlp(x), narrow.layers[0].mlp(x))
    assert wide.layers[0].mlp.gate_proj.weight[-24:].abs().min() > 0


def test_a_quantised_last_layer_gives_nothing_whatever_its_dtype(tiny_target: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_target, tmp_path / "target")
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.7.mlp.up_proj.weight"
    for dtype in (torch.int8, torch.float8_e5m2, torch.float8_e8m0fnu, torch.uint16):
        tensors[name] = torch.ones(tensors[name].shape).to(dtype)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        last = TargetWeights.load(folder, TargetSpec.from_folder(folder)).last_layer
        assert "mlp.up_proj.weight" not in last
        assert "mlp.gate_proj.weight" in last
