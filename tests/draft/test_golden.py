"""The golden record: stages as the trainer's own model computes them, written, read back and refused when damaged."""

from __future__ import annotations

import dataclasses
import json
from array import array
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from eyas_contract import CorruptFile, InvalidInput, TargetSpec, VocabMap
from eyas_contract.engines import sglang
from eyas_contract.golden import VALUES_NAME, load_golden
from eyas_draft.attention import TttAttention
from eyas_draft.config import TrainConfig
from eyas_draft.convert import ConvertConfig, convert, read_source
from eyas_draft.golden import make_golden, staged_draft
from eyas_draft.golden_config import GoldenConfig
from eyas_draft.model import DraftModel
from eyas_draft.setup import draft_spec
from eyas_draft.store import Store
from eyas_draft.target_weights import TargetWeights


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory, store: Path, tiny_target: Path) -> Path:
    """A random draft with EAGLE-3.1 norms, exported by hand; norms are no ones. Read-only."""
    return write_draft(tmp_path_factory.mktemp("draft"), store, tiny_target, fc_norm=True, norm_output=True)


def write_draft(folder: Path, store: Path, target: Path, **settings: bool) -> Path:
    found = Store(store)
    vocab = VocabMap(found.contract.target.vocab_size, tuple(range(3, 200, 2)))
    config = TrainConfig(store, target, folder, **settings)  # type: ignore[arg-type]
    contract = found.contract.with_sections(vocab=vocab, draft=draft_spec(config, found.contract, vocab))
    assert contract.draft is not None
    torch.manual_seed(0)
    model = DraftModel(contract.draft, torch.zeros(vocab.target_vocab_size, contract.draft.hidden_size))
    for parameter in model.parameters():
        nn.init.uniform_(parameter, -0.5, 1.0) if parameter.dim() == 1 else nn.init.normal_(parameter, std=0.2)
    tensors = {sglang.export_name(name): value.detach() for name, value in model.state_dict().items()}
    tensors |= {"d2t": torch.tensor(vocab.d2t()), "t2d": torch.tensor(vocab.t2d())}
    contract.save(folder)
    (folder / "config.json").write_text(json.dumps(sglang.export_config(contract)))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_stages_are_those_of_the_trainers_model(draft: Path, store: Path, tiny_target: Path) -> None:
    source = read_source(ConvertConfig(draft, draft, target=tiny_target))
    weights = TargetWeights.load(tiny_target, TargetSpec.from_folder(tiny_target))
    staged, to_target = staged_draft(source, weights, TargetSpec.from_folder(tiny_target))
    sample = Store(store).sample(0)
    following = torch.cat((sample.input_ids_t[1:], torch.tensor([5]))).long()
    stages = staged.run(following, sample.aux_tke.float())

    assert source.contract is not None
    assert source.contract.draft is not None
    model = DraftModel(source.contract.draft, weights.embedding_vh)
    model.load_state_dict({sglang.import_name(name): value for name, value in
                           load_file(draft / "model.safetensors").items() if name not in ("d2t", "t2d")})
    seen: dict[str, Tensor] = {}

    def keep(name: str, module: nn.Module) -> None:
        module.register_forward_hook(lambda _m, _a, out: seen.update({name: out.detach()}))

    layer = model.layers[0]
    model.norm.register_forward_pre_hook(lambda _m, args: seen.update(layer=args[0].detach()))
    for name, module in (("hidden_norm", layer.hidden_norm), ("embedding_norm", layer.input_layernorm),
                         ("attention", layer.self_attn.o_proj), ("mlp_norm", layer.post_attention_layernorm),
                         ("norm", model.norm), ("fused", model.fc),
                         *((f"aux_norm.{i}", norm) for i, norm in enumerate(model.fc_norm))):
        keep(name, module)
    count = following.numel()
    with torch.no_grad():
        attend = TttAttention([count], 1, torch.device("cpu"))
        normed, _ = model(following, model.fuse(sample.aux_tke.float()), torch.arange(count), attend)
        logits = model.lm_head(normed)
    assert len(seen) == 10
    for name, value in seen.items():
        torch.testing.assert_close(stages.values[name], value, rtol=1e-5, atol=1e-5, msg=name)
    torch.testing.assert_close(stages.logits_tv, logits, rtol=1e-5, atol=1e-5)
    assert to_target.tolist() == list(range(3, 200, 2))


def test_record_holds_the_targets_own_states_and_tokens(draft: Path, tiny_target: Path) -> None:
    make_golden(GoldenConfig(draft, tiny_target, tokens=24))
    record = load_golden(draft)
    golden = record.golden
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    with torch.no_grad():
        out = model(torch.tensor([golden.input_ids]), output_hidden_states=True)
    assert golden.next_id == int(out.logits[0, -1].argmax())
    assert golden.positions[:2] == (0, 1)
    assert golden.positions[-1] == 23
    for chunk, layer in enumerate(golden.aux_layer_ids):
        states = out.hidden_states[layer + 1][0]
        rows = [list(row) for row in record.stage(f"aux.{chunk}")]
        torch.testing.assert_close(torch.tensor(rows), states[list(golden.positions)], rtol=1e-5, atol=1e-5)
        statistics = golden.stages[chunk]
        assert statistics.shape == (24, 64)
        assert statistics.mean == pytest.approx(float(states.mean()), abs=1e-6)
        assert statistics.std == pytest.approx(float(states.std()), rel=1e-5)
    table = record.layers()
    assert (len(table), len(table[0])) == (2, 8)
    middle = out.hidden_states[4][0][golden.layer_positions[0]]
    torch.testing.assert_close(torch.tensor(list(table[0][3])), middle, rtol=1e-5, atol=1e-5)
    ids, scores = record.proposals()
    assert set(ids[0]) <= set(record.draft_to_target())
    assert list(scores[0]) == sorted(scores[0], reverse=True)


def test_record_from_the_store_equals_that_of_the_target(draft: Path, store: Path, tiny_target: Path,
                                                         tmp_path: Path) -> None:
    from shutil import copytree

    folder = copytree(draft, tmp_path / "draft")
    summary = make_golden(GoldenConfig(folder, tiny_target, store))
    assert summary["source"] == "store"
    stored = load_golden(folder)
    values = {name: stored.stage(name) for name in stored.golden.names}
    from transformers import AutoTokenizer

    words = AutoTokenizer.from_pretrained(tiny_target).decode(stored.golden.input_ids)
    make_golden(GoldenConfig(folder, tiny_target, text=words, tokens=len(stored.golden.input_ids)))
    run = load_golden(folder)
    assert run.golden.input_ids == stored.golden.input_ids
    assert run.golden.next_id == stored.golden.next_id
    for name in run.golden.names:
        for a, b in zip(run.stage(name), values[name], strict=True):
            assert list(a) == pytest.approx(list(b), rel=1e-3, abs=1e-3), name


@pytest.mark.parametrize("goal", ["vllm", "hf"])
def test_a_converted_draft_has_the_same_record(draft: Path, tiny_target: Path, tmp_path: Path, goal: str) -> None:
    """By meaning, whatever the dialect: names, ids and norms are read back."""
    out = tmp_path / "converted"
    convert(ConvertConfig(draft, out, to=goal, target=tiny_target))  # type: ignore[arg-type]
    (out / "contract.json").unlink()
    make_golden(GoldenConfig(draft, tiny_target))
    make_golden(GoldenConfig(out, tiny_target))
    ours, theirs = load_golden(draft), load_golden(out)
    assert dataclasses.replace(theirs.golden, values_sha256="") == dataclasses.replace(ours.golden, values_sha256="")
    for name in ours.golden.names:
        assert ours.stage(name) == theirs.stage(name), name
    assert ours.proposals()[0] == theirs.proposals()[0]


def test_damage_is_refused(draft: Path, tiny_target: Path, tmp_path: Path) -> None:
    from shutil import copytree

    folder = copytree(draft, tmp_path / "draft")
    make_golden(GoldenConfig(folder, tiny_target))
    raw = bytearray((folder / VALUES_NAME).read_bytes())
    raw[-5] ^= 1
    (folder / VALUES_NAME).write_bytes(raw)
    with pytest.raises(CorruptFile):
        load_golden(folder)
    plain = json.loads((folder / "golden.json").read_text())
    plain["positions"] = [5, 2]
    (folder / "golden.json").write_text(json.dumps(plain))
    with pytest.raises(InvalidInput, match="positions"):
        load_golden(folder)
    path = Path(str(make_golden(GoldenConfig(folder, tiny_target))["golden"]))
    plain = json.loads(path.read_text())
    plain["stages"][0]["shape"] = []
    path.write_text(json.dumps(plain))
    with pytest.raises(InvalidInput, match=r"aux\.0 is F32"):
        load_golden(folder)
    (folder / VALUES_NAME).unlink()
    with pytest.raises(InvalidInput, match="eyas-draft golden"):
        load_golden(folder)


def test_what_cannot_be_recorded_is_refused(draft: Path, tiny_target: Path) -> None:
    with pytest.raises(InvalidInput, match="layers below 8"):
        make_golden(GoldenConfig(draft, tiny_target, aux_layer_ids=(1, 3, 8)))
    with pytest.raises(InvalidInput, match="at least 8"):
        make_golden(GoldenConfig(draft, tiny_target, text="a"))


def test_half_precision_rows_are_decoded() -> None:
    from eyas_contract.floats import decode

    values = torch.tensor([0.5, -3.25, 1e-3, 65000.0])
    for dtype, name in ((torch.bfloat16, "BF16"), (torch.float16, "F16"), (torch.float64, "F64")):
        raw = values.to(dtype).view(torch.uint8).numpy().tobytes()
        assert decode(name, raw) == array("f", values.to(dtype).float().tolist())


def test_a_quantised_draft_has_no_record(store: Path, tiny_target: Path, tmp_path: Path) -> None:
    """What is computed of codes without their scales would blame a server that is right."""
    folder = write_draft(tmp_path, store, tiny_target)
    tensors = load_file(folder / "model.safetensors")
    name = "midlayer.mlp.up_proj.weight"
    scale = tensors[name].abs().max() / 448
    tensors |= {name: (tensors[name] / scale).to(torch.float8_e4m3fn), f"{name}_scale": scale.view(1)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(InvalidInput, match=r"layers\.0\.mlp\.up_proj\.weight in F8_E4M3"):
        make_golden(GoldenConfig(folder, tiny_target))
    assert not (folder / VALUES_NAME).exists()


def test_a_folder_that_takes_no_record_is_refused_before_the_target_is_run(
        draft: Path, tiny_target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas_draft.golden.states_of_target", lambda *_: pytest.fail("the target was run"))
    monkeypatch.setattr("os.access", lambda *_: False)
    with pytest.raises(InvalidInput, match="cannot be written to"):
        make_golden(GoldenConfig(draft, tiny_target))
