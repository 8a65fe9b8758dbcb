"""Faults from public reports, on inputs made here: what the checks must say, and must not say."""

from __future__ import annotations

import json
from pathlib import Path

import drafts
import pytest
from drafts import Tensor, bf16, int64, mask

import samples
from eyas_contract import Contract
from eyas_contract.engines import Finding, ServerFlags, check, verdict
from eyas_contract.engines.capture_probe import check_captured
from eyas_contract.engines.logs import check_log


def only(findings: list[Finding], code: str) -> Finding:
    found = [f for f in findings if f.code == code]
    assert len(found) == 1, findings
    return found[0]


def errors(findings: list[Finding]) -> set[str]:
    return {f.code for f in findings if f.severity == "error"}


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return drafts.target().write(tmp_path / "target")


def test_a_good_draft_passes_and_nobody_asks_for_an_embedding(tmp_path: Path, target: Path) -> None:
    flags = ServerFlags.from_command(
        "python3 -m sglang.launch_server --model-path ./target --speculative-algorithm EAGLE3 "
        "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4 --port 30000")
    findings = check(drafts.draft().write(tmp_path / "draft"), target, flags=flags)
    assert [f.severity for f in findings] == ["note"]
    assert "1, 5, 8" in findings[0].consequence
    assert "[2, 6, 9]" in findings[0].consequence


@pytest.mark.parametrize("make", [drafts.draft, drafts.mla_draft], ids=["llama", "mla"])
def test_full_vocabulary_without_head(make: object, tmp_path: Path, target: Path) -> None:
    llama = make is drafts.draft
    folder = drafts.draft(full=True) if llama else drafts.mla_draft()
    del folder.tensors["lm_head.weight"]
    place = target if llama else drafts.mla_target().write(tmp_path / "mla")
    finding = only(check(folder.write(tmp_path / "draft"), place), "head-missing")
    assert finding.severity == "error"
    assert "lm_head.weight" in finding.where
    assert "random" in finding.consequence
    assert "1.00" in finding.consequence
    assert "draft_vocab_size: null" in finding.remedy
    folder.config["draft_vocab_size"] = None
    assert verdict(check(folder.write(tmp_path / "draft"), place)) == "pass"


def test_a_log_of_dead_speculation() -> None:
    line = "[2026-01-05] Decode batch, #running-req: 1, accept len: 1.00, accept rate: 0.00, cuda graph: True\n"
    finding = only(check_log([line] * 6), "log-acceptance-one")
    assert finding.severity == "error"
    assert "1.00 over 6" in finding.found
    assert "healthy" in finding.consequence
    order = [finding.remedy.index(word) for word in ("dropped", "algorithm flag", "vocabulary map", "aux layers")]
    assert order == sorted(order)
    assert check_log([line.replace("1.00", "2.31")]) == []
    assert only(check_log([line.replace("1.00", "1.08")]), "log-acceptance-low").severity == "warning"
    assert only(check_log(["nothing\n"]), "log-no-rounds")
    skipped = check_log(["Eagle3 MLA: skipping unexpected weight model.midlayer.mlp.up_proj.weight\n", line])
    assert errors(skipped) == {"log-weight-skipped", "log-acceptance-one"}


def test_layer_names_depend_on_the_version(tmp_path: Path, target: Path) -> None:
    folder = drafts.draft()
    folder.rename("midlayer.", "layers.0.")
    folder.write(tmp_path / "draft")
    old = only(check(tmp_path / "draft", target, version="0.5.11"), "tensor-dropped")
    assert old.found.count("layers.0.") == 10
    assert old.remedy.count("-> midlayer.") == 10
    assert verdict(check(tmp_path / "draft", target, version="0.5.12")) == "pass"
    unknown = check(tmp_path / "draft", target, version=None)
    assert verdict(unknown) == "warn"
    assert "0.5.10 to 0.5.11: fail" in only(unknown, "engine-version-unknown").consequence
    assert "0.5.12 to 0.5.23: pass" in only(unknown, "engine-version-unknown").consequence


def test_a_version_that_is_not_known_is_never_a_bare_pass(tmp_path: Path, target: Path) -> None:
    drafts.draft().write(tmp_path / "draft")
    for version in ("0.6.0", "0.5.9", "1.2.3"):
        assert verdict(check(tmp_path / "draft", target, version=version)) == "warn"


def test_attention_that_reads_two_hidden_sizes_is_right(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}  # 8 x 16 = 128, hidden 64
    target = drafts.target(**heads, architectures=["Qwen3ForCausalLM"]).write(tmp_path / "target")
    folder = drafts.draft(full=True, **heads)
    folder.tensors |= {"midlayer.self_attn.q_proj.weight": bf16([128, 128]),
                       "midlayer.self_attn.o_proj.weight": bf16([64, 128])}
    folder.rename("midlayer.", "layers.0.")
    assert verdict(check(folder.write(tmp_path / "draft"), target)) == "pass"
    folder.config["architectures"] = ["Qwen3ForCausalLM"]
    finding = only(check(folder.write(tmp_path / "draft"), target), "draft-architecture")
    assert "128 = 2 x 64" in finding.found
    assert "another model class" in finding.consequence
    assert "change no weight" in finding.remedy


def test_a_whole_model_in_the_drafts_place_is_told(tmp_path: Path) -> None:
    """Draft and target given the other way round."""
    model = drafts.target()
    model.tensors |= {"model.norm.weight": bf16([64])}
    target, draft = model.write(tmp_path / "target"), drafts.draft().write(tmp_path / "draft")
    finding = only(check(target, draft), "draft-architecture")
    assert "change no weight" not in finding.remedy
    assert "as --target" in finding.remedy


def test_head_dim_is_read_off_the_rows(tmp_path: Path) -> None:
    heads = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 16}
    target = drafts.target(**heads).write(tmp_path / "target")
    folder = drafts.draft(**heads)
    folder.tensors |= {"midlayer.self_attn.q_proj.weight": bf16([128, 128]),
                       "midlayer.self_attn.o_proj.weight": bf16([64, 128])}
    del folder.config["head_dim"]
    findings = check(folder.write(tmp_path / "draft"), target)
    finding = only(findings, "head-dim")
    assert errors(findings) == {"head-dim"}
    for text in ("128 rows = 8 x 16", "32 = 2 x 16", "64 / 8 is 8"):
        assert text in finding.found
    assert '"head_dim": 16' in finding.remedy
    assert "equal to the target's" in finding.wanted


@pytest.mark.parametrize(("architecture", "version", "a", "b"), [
    ("LlamaForCausalLM", "0.5.20", "pass", "warn"), ("DeepseekV3ForCausalLM", "0.5.12", "pass", "warn"),
    ("DeepseekV3ForCausalLM", "0.5.13", "pass", "pass"), ("KimiK25ForConditionalGeneration", "0.5.20", "pass", "pass")])
def test_two_meanings_of_the_layer_ids(architecture: str, version: str, a: str, b: str, tmp_path: Path) -> None:
    target = drafts.target(architectures=[architecture]).write(tmp_path / "target")
    flags = ServerFlags(speculative_num_steps=3, speculative_eagle_topk=1, speculative_num_draft_tokens=4)
    for ids, wanted in (([1, 5, 8], a), ([2, 6, 9], b)):
        folder = drafts.draft()
        folder.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = ids
        findings = check(folder.write(tmp_path / "draft"), target, version=version, flags=flags)
        assert verdict(findings) == wanted, findings
        said = only(findings, "aux-layer-reading" if wanted == "pass" else "aux-layer-convention")
        assert "1, 5, 8" in said.consequence + said.wanted


def test_a_training_record_decides_what_the_ids_should_mean(tmp_path: Path, target: Path) -> None:
    folder = drafts.draft()
    folder.files["train_meta.json"] = json.dumps({"aux_layer_ids": [1, 5, 8]})
    assert verdict(check(folder.write(tmp_path / "draft"), target)) == "pass"
    folder.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] = [2, 6, 9]
    finding = only(check(folder.write(tmp_path / "draft"), target), "aux-layer-ids")
    assert "outputs of layers [2, 6, 9]" in finding.found
    assert "[1, 5, 8]" in finding.remedy


class NoHook:
    """A target class without the method."""


def test_what_a_target_hands_over_is_counted_and_measured() -> None:
    assert only(check_captured("NoHook", False, [], 3, 5, 64), "states-missing").severity == "error"
    listed = only(check_captured("ListOnly", True, [], 3, 5, 64), "states-count")
    assert "hook present but 0 of 3" in listed.found
    wide = only(check_captured("Wide", True, [(5, 256)] * 3, 3, 5, 64), "states-width")
    assert "3 states of 256, expected 64" in wide.found
    assert "4 rows" in only(check_captured("Short", True, [(4, 64)] * 3, 3, 5, 64), "states-width").found
    assert check_captured("Good", True, [(5, 64)] * 3, 3, 5, 64) == []


def test_absolute_ids_in_d2t(tmp_path: Path, target: Path) -> None:
    folder = drafts.draft()
    folder.tensors["d2t"] = int64(drafts.IDS)
    finding = only(check(folder.write(tmp_path / "draft"), target), "d2t-absolute")
    mapped = [i + t for i, t in enumerate(drafts.IDS)]
    assert f"{sum(m >= 256 for m in mapped)} of 96 land outside" in finding.found
    assert f"on {len(set(mapped) & set(drafts.IDS))} of 96" in finding.found
    assert "sorted positions of t2d" in finding.found
    assert "subtract 0..95" in finding.remedy
    full = drafts.draft(full=True)
    full.tensors |= {"d2t": int64(list(range(256))), "t2d": mask(list(range(256)), 256)}
    finding = only(check(full.write(tmp_path / "full"), target), "d2t-absolute")
    assert "draft id 128 maps to 256" in finding.found
    assert "zeros, or leave" in finding.remedy
    full.tensors["d2t"] = int64([0] * 256)
    assert verdict(check(full.write(tmp_path / "full"), target)) == "pass"


def test_a_map_left_in_a_side_file(tmp_path: Path, target: Path) -> None:
    folder = drafts.draft()
    del folder.tensors["d2t"], folder.tensors["t2d"]
    folder.files["selection.json"] = json.dumps({"version": 1, "kept": drafts.IDS})
    folder.files["other.json"] = json.dumps({"kept": drafts.IDS[:-1]})
    finding = only(check(folder.write(tmp_path / "draft"), target), "d2t-missing")
    assert finding.severity == "error"
    assert "selection.json" in finding.remedy
    assert "other.json" not in finding.remedy
    assert "convert" in finding.remedy


def test_positions_of_the_table_and_of_training_are_two_facts(tmp_path: Path) -> None:
    target = drafts.target(max_position_embeddings=40960).write(tmp_path / "target")
    folder = drafts.draft(max_position_embeddings=2048)
    folder.files["train_meta.json"] = json.dumps({"max_length": 4096})
    findings = check(folder.write(tmp_path / "draft"), target, flags=ServerFlags(context_length=32768))
    finding = only(findings, "positions-short")
    assert finding.severity == "error"
    assert "32768 (served context)" in finding.wanted
    assert "4096 (trained length)" in finding.wanted
    assert "falling acceptance" in finding.consequence
    assert "40960" in finding.remedy
    folder.config["max_position_embeddings"] = 40960
    findings = check(folder.write(tmp_path / "draft"), target, flags=ServerFlags(context_length=32768))
    assert verdict(findings) == "pass"
    assert "measure" in only(findings, "trained-length").remedy.lower()


def test_extractions_limit_is_no_trained_length_of_a_short_target(tmp_path: Path) -> None:
    """`max_length` 1024 with a target of 512 positions: no sample was longer than 512."""
    target = drafts.target(max_position_embeddings=512, rope_theta=500000.0).write(tmp_path / "target")
    contract = Contract(samples.target(), samples.capture(), samples.vocab(), samples.draft())
    folder = drafts.draft(max_position_embeddings=512).write(tmp_path / "draft")
    contract.save(folder)
    codes = {finding.code for finding in check(folder, target)}
    assert not codes & {"positions-short", "trained-length"}


def test_rope_of_a_template_and_of_a_trained_draft(tmp_path: Path, target: Path) -> None:
    template = drafts.draft(rope_theta=1000000.0)
    template.tensors = {}
    kimi = drafts.mla_target().write(tmp_path / "kimi")
    findings = check(template.write(tmp_path / "template"), kimi)
    assert verdict(findings) == "warn"
    both = only(findings, "rope-differs")
    assert "1e+06" in both.found
    assert "yarn" in both.wanted
    assert "50000" in both.wanted
    trained = drafts.draft()
    del trained.config["rope_theta"], trained.config["rope_scaling"]
    trained.files["train_meta.json"] = json.dumps({"rope_theta_used": 10000.0, "max_length": 2048})
    findings = check(trained.write(tmp_path / "trained"), target)
    assert verdict(findings) == "warn"
    said = only(findings, "rope-implicit")
    assert "Write rope_theta 10000. Do not change it to the target's." in said.remedy
    trained.config["rope_theta"] = 500000.0
    assert "rope-not-as-trained" in errors(check(trained.write(tmp_path / "trained"), target))
    trained.config["rope_theta"] = 10000.0
    assert verdict(check(trained.write(tmp_path / "trained"), target)) == "pass"


@pytest.mark.parametrize(("numbers", "backend", "code", "severity", "text"), [
    ((3, 1, 4), None, "", "", ""),
    ((4, 1, 24), None, "speculation-shape", "error", "draft tokens 5"),
    ((3, 4, 8), None, "tree-backend", "note", "at most 37"),
    ((5, 8, 64), None, "tree-backend", "note", "tree of 64"),
    ((3, 2, 12), None, "speculation-shape", "error", "at most 11 draft tokens: 1 + 2 + 4 + 4"),
    ((None, None, 4), None, "speculation-partial", "error", "--speculative-num-steps"),
    ((3, 4, 8), "fa3", "backend-tree", "warning", "topk 1 only"),
    ((3, 4, 8), "triton", "tree-backend", "note", "")])
def test_steps_topk_and_tokens(numbers: tuple[int | None, ...], backend: str | None, code: str, severity: str,
                               text: str, tmp_path: Path, target: Path) -> None:
    flags = ServerFlags(speculative_num_steps=numbers[0], speculative_eagle_topk=numbers[1],
                        speculative_num_draft_tokens=numbers[2], attention_backend=backend)
    findings = check(drafts.draft().write(tmp_path / "draft"), target, flags=flags)
    if not code:
        assert {f.code for f in findings} == {"aux-layer-reading"}
        return
    finding = only(findings, code)
    assert finding.severity == severity
    assert text in finding.found + finding.wanted


def test_a_placeholder_of_zeros_is_named_as_one(tmp_path: Path, target: Path) -> None:
    folder = drafts.draft()
    for name, tensor in folder.tensors.items():
        if tensor.dtype == "BF16":
            folder.tensors[name] = Tensor("BF16", tensor.shape, b"\0" * len(tensor.data))
    findings = check(folder.write(tmp_path / "draft"), target)
    assert only(findings, "values-placeholder").severity == "warning"
    assert not errors(findings)
