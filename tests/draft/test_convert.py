"""Conversion between dialects: by meaning, complete, exact on the way back, refusing what cannot be said."""

from __future__ import annotations

import json
from itertools import permutations
from pathlib import Path

import drafts
import pytest
from drafts import Folder, bf16, ones

from eyas_contract import InvalidInput
from eyas_contract.checkpoint_files import read_checkpoint
from eyas_contract.dialects import GOALS, Goal
from eyas_contract.engines import check, verdict
from eyas_contract.safetensors_header import read_header, read_values
from eyas_draft.convert import Conversion, ConvertConfig, convert


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return drafts.target().write(tmp_path / "target")


def contents(folder: Path) -> dict[str, tuple[str, tuple[int, ...], bytes]]:
    """Name -> dtype, shape, bytes of every tensor."""
    return {name: (info.dtype, info.shape, info.file.read_bytes()[info.start:info.end])
            for name, info in read_checkpoint(folder).items()}


def to(draft: Path, out: Path, goal: Goal, **options: object) -> Conversion:
    return convert(ConvertConfig(draft, out, goal, **options))  # type: ignore[arg-type]


def severe(draft: Path, target: Path, engine: str, version: str) -> dict[str, str]:
    return {f.code: f.severity for f in check(draft, target, engine, version) if f.severity != "note"}


@pytest.mark.parametrize("full", [False, True], ids=["reduced", "full"])
@pytest.mark.parametrize(("first", "second"), list(permutations(GOALS, 2)))
def test_there_and_back_is_exact(first: Goal, second: Goal, full: bool, tmp_path: Path, target: Path) -> None:
    made = drafts.draft(full=full)
    made.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [1, 4, 9]
    start = made.write(tmp_path / "draft")
    a, b, back = (tmp_path / name for name in ("a", "b", "back"))
    to(start, a, first, target=target)
    to(a, b, second, target=target)
    returned = to(b, back, first, target=target)
    assert json.loads((back / "config.json").read_text()) == json.loads((a / "config.json").read_text())
    assert contents(back) == contents(a)
    assert not returned.made
    assert sorted(v for v in contents(a).values()) == sorted(v for v in contents(start).values())


@pytest.mark.parametrize(("goal", "engine", "versions"), [
    ("sglang", "sglang", ["0.5.10", "0.5.12", "0.5.20", "0.5.23"]), ("vllm", "vllm", ["0.33.0"]),
    ("hf", "vllm", ["0.33.0"]), ("sglang,vllm", "sglang", ["0.5.10", "0.5.12", "0.5.20", "0.5.23"]),
    ("sglang,vllm", "vllm", ["0.33.0"]), ("specforge", "sglang", ["0.5.10", "0.5.20"])])
@pytest.mark.parametrize("dialect", ["midlayer", "layers.0", "speculators"])
def test_the_result_passes_where_it_is_meant_to_be_served(dialect: str, goal: Goal, engine: str, versions: list[str],
                                                          tmp_path: Path, target: Path) -> None:
    made = drafts.draft()
    if dialect == "layers.0":
        made.rename("midlayer.", "layers.0.")
    start = (drafts.speculators(made) if dialect == "speculators" else made).write(tmp_path / "draft")
    to(start, tmp_path / "out", goal, target=target)
    for version in versions:
        assert severe(tmp_path / "out", target, engine, version) == {}


@pytest.mark.parametrize(("architecture", "version", "spelled"), [
    ("LlamaForCausalLM", "0.5.20", [3, 5, 8]), ("DeepseekV3ForCausalLM", "0.5.20", [4, 6, 9]),
    ("DeepseekV3ForCausalLM", "0.5.12", [3, 5, 8]), ("KimiK25ForConditionalGeneration", "0.5.23", [4, 6, 9])])
def test_layer_ids_go_over_by_meaning(architecture: str, version: str, spelled: list[int], tmp_path: Path) -> None:
    target = drafts.target(architectures=[architecture]).write(tmp_path / "target")
    made = drafts.speculators(drafts.draft())
    made.config["eagle_aux_hidden_state_layer_ids"] = [4, 6, 9]  # boundaries: outputs of 3, 5, 8
    to(made.write(tmp_path / "draft"), tmp_path / "out", "sglang,vllm", target=target, engine_version=version)
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == spelled
    assert config["eagle_aux_hidden_state_layer_ids"] == [4, 6, 9]


def test_ids_whose_meaning_nobody_tells_are_not_guessed(tmp_path: Path, target: Path) -> None:
    made = drafts.draft()
    made.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [3, 5, 8]
    start = made.write(tmp_path / "draft")
    with pytest.raises(InvalidInput, match="--ids-mean"):
        to(start, tmp_path / "no", "vllm", target=target)
    assert not (tmp_path / "no").exists()
    for mean, boundaries in (("output", [4, 6, 9]), ("boundary", [3, 5, 8])):
        to(start, tmp_path / mean, "vllm", target=target, ids_mean=mean)
        assert json.loads((tmp_path / mean / "config.json").read_text())[
            "eagle_aux_hidden_state_layer_ids"] == boundaries
    to(start, tmp_path / "named", "vllm", aux_layer_ids=(0, 4, 7))
    assert json.loads((tmp_path / "named" / "config.json").read_text())["eagle_aux_hidden_state_layer_ids"] == [1, 5, 8]
    made.config["eagle_aux_hidden_state_layer_ids"] = [7, 8, 9]
    with pytest.raises(InvalidInput, match="the same layers in both"):
        to(made.write(tmp_path / "draft"), tmp_path / "no", "vllm", target=target)


def test_without_the_target_only_unambiguous_ids_are_written(tmp_path: Path) -> None:
    made = drafts.draft()
    to(made.write(tmp_path / "draft"), tmp_path / "out", "sglang")
    other = drafts.speculators(made)
    other.config["eagle_aux_hidden_state_layer_ids"] = [4, 6, 9]
    with pytest.raises(InvalidInput, match="--target"):
        to(other.write(tmp_path / "other"), tmp_path / "no", "sglang")


def refused() -> dict[str, tuple[Folder, Goal, str]]:
    residual = drafts.speculators(drafts.draft())
    residual.config["norm_before_residual"] = True
    output = drafts.draft(norm_output=True)
    strange = drafts.draft()
    strange.tensors["midlayer.self_attn.gate.weight"] = bf16([4, 4])
    strange.tensors["extra"] = bf16([4])
    no_ids = drafts.draft()
    del no_ids.config["eagle_config"]
    no_map = drafts.draft()
    del no_map.tensors["d2t"]
    absolute = drafts.draft()
    absolute.tensors["d2t"] = drafts.int64(drafts.IDS)
    return {"residual to sglang": (residual, "sglang", "norm_before_residual"),
            "residual to both": (residual, "sglang,vllm", "norm_before_residual"),
            "residual to specforge": (residual, "specforge", "norm_before_residual"),
            "norm_output to specforge": (output, "specforge", "norm_output"),
            "mla to hf": (drafts.mla_draft(), "hf", "speculators has none"),
            "mla to specforge": (drafts.mla_draft(), "specforge", "SpecForge has none"),
            "unknown name": (strange, "sglang", "extra: no dialect"), "no ids": (no_ids, "vllm", "--aux-layer-ids"),
            "no map": (no_map, "sglang", "--vocab-from"), "absolute map": (absolute, "sglang", "offsets")}


@pytest.mark.parametrize("name", refused())
def test_what_cannot_be_said_is_refused_and_nothing_is_written(name: str, tmp_path: Path, target: Path) -> None:
    folder, goal, reason = refused()[name]
    with pytest.raises(InvalidInput, match=reason):
        to(folder.write(tmp_path / "draft"), tmp_path / "out", goal, target=target)
    assert not (tmp_path / "out").exists()


def test_norm_before_residual_goes_to_vllm(tmp_path: Path, target: Path) -> None:
    folder = drafts.speculators(drafts.draft())
    folder.config["norm_before_residual"] = True
    to(folder.write(tmp_path / "draft"), tmp_path / "out", "vllm", target=target)
    assert json.loads((tmp_path / "out" / "config.json").read_text())["norm_before_residual"] is True
    assert severe(tmp_path / "out", target, "vllm", "0.33.0") == {}


def test_an_mla_draft_for_both_engines(tmp_path: Path) -> None:
    kimi = drafts.mla_target().write(tmp_path / "kimi")
    start = drafts.mla_draft()
    start.rename("midlayer.", "layers.0.")
    to(start.write(tmp_path / "draft"), tmp_path / "out", "sglang,vllm", target=kimi)
    assert severe(tmp_path / "out", kimi, "sglang", "0.5.20") == {}
    assert severe(tmp_path / "out", kimi, "vllm", "0.33.0") == {}


def two_layers() -> Folder:
    """As SGLang reads it: above layer 0, hidden_norm is the norm that is applied."""
    folder = drafts.draft(num_hidden_layers=2)
    upper = {"self_attn.q_proj": [64, 64], "self_attn.k_proj": [32, 64], "self_attn.v_proj": [32, 64],
             "self_attn.o_proj": [64, 64], "mlp.gate_proj": [128, 64], "mlp.up_proj": [128, 64],
             "mlp.down_proj": [64, 128]}
    folder.tensors |= {f"layers.1.{n}.weight": bf16(s, i) for i, (n, s) in enumerate(upper.items(), 40)}
    folder.tensors |= {"layers.1.hidden_norm.weight": bf16([64], 50, 1.0), "layers.1.input_layernorm.weight": ones(64),
                       "layers.1.post_attention_layernorm.weight": ones(64)}
    return folder


def test_upper_norms_change_their_names_with_their_meaning(tmp_path: Path, target: Path) -> None:
    start = two_layers().write(tmp_path / "draft")
    done = to(start, tmp_path / "vllm", "vllm", target=target)
    assert ("layers.1.hidden_norm.weight", "layers.1.input_layernorm.weight") in done.renamed
    before, after = contents(start), contents(tmp_path / "vllm")
    assert after["layers.1.input_layernorm.weight"] == before["layers.1.hidden_norm.weight"]
    to(tmp_path / "vllm", tmp_path / "back", "sglang", target=target)
    assert contents(tmp_path / "back") == before
    with pytest.raises(InvalidInput, match="several layers"):
        to(start, tmp_path / "both", "sglang,vllm", target=target)


def test_a_map_is_built_from_a_side_file(tmp_path: Path, target: Path) -> None:
    folder = drafts.draft()
    whole = drafts.draft().tensors
    del folder.tensors["d2t"], folder.tensors["t2d"]
    folder.files["kept.json"] = json.dumps({"ids": drafts.IDS})
    done = to(folder.write(tmp_path / "draft"), tmp_path / "out", "sglang", vocab_from="kept.json")
    assert done.made == ("d2t", "t2d")
    made = contents(tmp_path / "out")
    assert made["d2t"][2] == whole["d2t"].data
    assert made["t2d"][2] == whole["t2d"].data
    assert verdict(check(tmp_path / "out", target)) == "pass"
    with pytest.raises(InvalidInput, match="96 distinct"):
        to(tmp_path / "draft", tmp_path / "no", "sglang", vocab_from="config.json")


def test_every_change_is_listed(tmp_path: Path, target: Path) -> None:
    folder = drafts.draft(full=True)
    folder.rename("midlayer.", "model.layers.0.")
    folder.tensors |= {"embed_tokens.weight": bf16([256, 64]), "d2t": drafts.int64([0] * 256)}
    start = folder.write(tmp_path / "draft")
    done = to(start, tmp_path / "out", "sglang", target=target)
    before, after = set(read_checkpoint(start)), set(read_checkpoint(tmp_path / "out"))
    assert before - set(done.dropped) - {a for a, _ in done.renamed} == before & after
    assert after - set(done.made) - {b for _, b in done.renamed} == before & after
    assert set(done.dropped) == {"d2t", "embed_tokens.weight"}
    text = "\n".join(done.lines())
    assert all(name in text for name in before - after)
    old, new = (json.loads((p / "config.json").read_text()) for p in (start, tmp_path / "out"))
    assert {line.split(":")[0] for line in done.keys} == {k for k in old.keys() | new.keys()
                                                          if old.get(k, "-") != new.get(k, "-")}


def test_a_shared_head_stays_shared(tmp_path: Path, target: Path) -> None:
    folder = drafts.draft(full=True, draft_vocab_size=None)
    del folder.tensors["lm_head.weight"]
    to(folder.write(tmp_path / "draft"), tmp_path / "vllm", "vllm", target=target)
    assert severe(tmp_path / "vllm", target, "vllm", "0.33.0") == {}
    to(tmp_path / "vllm", tmp_path / "back", "sglang", target=target)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["draft_vocab_size"] is None
    assert severe(tmp_path / "back", target, "sglang", "0.5.20") == {}


def test_metadata_and_beside_files_are_carried(tmp_path: Path, target: Path) -> None:
    folder = drafts.draft()
    folder.files |= {"README.md": "a draft", "train_meta.json": "{}"}
    start = folder.write(tmp_path / "draft")
    drafts.write_safetensors(start / "model.safetensors", folder.tensors, {"format": "pt", "capture": "abc"})
    to(start, tmp_path / "out", "vllm", target=target)
    assert read_header(tmp_path / "out" / "model.safetensors").metadata == {"format": "pt", "capture": "abc"}
    assert (tmp_path / "out" / "README.md").read_text() == "a draft"
    assert read_values(read_checkpoint(tmp_path / "out")["d2t"]) == [t - i for i, t in enumerate(drafts.IDS)]


def test_a_folder_with_something_in_it_is_not_written_over(tmp_path: Path) -> None:
    start = drafts.draft().write(tmp_path / "draft")
    with pytest.raises(InvalidInput, match="not empty"):
        to(start, start, "vllm")


@pytest.mark.parametrize("name", ["d2t", "t2d"])
def test_a_map_in_floats_is_written_anew_or_refused(name: str, tmp_path: Path, target: Path) -> None:
    """As `model.to(torch.bfloat16)` of a careless trainer leaves it: offsets above 256 are rounded."""
    made = drafts.draft()
    made.tensors[name] = bf16(made.tensors[name].shape)
    made.files["ids.json"] = json.dumps(drafts.IDS)
    start = made.write(tmp_path / "draft")
    to(start, tmp_path / "out", "vllm", target=target, vocab_from="ids.json")
    assert contents(tmp_path / "out")[name] == contents(drafts.draft().write(tmp_path / "good"))[name]
    if name == "d2t":
        with pytest.raises(InvalidInput, match="absent, or of another length"):
            to(start, tmp_path / "other", "vllm", target=target)
    else:
        assert name in to(start, tmp_path / "other", "vllm", target=target).made


@pytest.mark.parametrize(("key", "value"), [
    ("vocab_size", None), ("num_hidden_layers", "two"), ("rope_parameters", [1]), ("rope_theta", "x"),
    ("draft_vocab_size", "many"), ("architectures", {"a": 1}), ("architectures", [[]])])
def test_a_config_of_impossible_values_is_refused(key: str, value: object, tmp_path: Path, target: Path) -> None:
    made = drafts.draft()
    made.config[key] = value
    with pytest.raises(InvalidInput, match=key):
        to(made.write(tmp_path / "draft"), tmp_path / "out", "vllm", target=target)
    assert not (tmp_path / "out").exists()
