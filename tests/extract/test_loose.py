"""Another tool's hidden states, file by file: every fault named at once, and the final norm's side proved."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from eyas_contract import InvalidInput
from eyas_extract.loose import check_files

HIDDEN, VOCAB, TOKENS = 16, 40, 12


@pytest.fixture
def target(tmp_path: Path) -> Path:
    """A target's config, final norm and head."""
    folder = tmp_path / "target"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN, "num_hidden_layers": 8,
        "vocab_size": VOCAB, "max_position_embeddings": 512, "rms_norm_eps": 1e-5, "tie_word_embeddings": False}))
    torch.manual_seed(0)
    save_file({"model.norm.weight": torch.rand(HIDDEN) * 3, "lm_head.weight": torch.randn(VOCAB, HIDDEN)},
              folder / "model.safetensors")
    return folder


@pytest.fixture
def hidden(tmp_path: Path) -> Path:
    folder = tmp_path / "hidden"
    folder.mkdir()
    return folder


def write(folder: Path, number: int, **changes: torch.Tensor) -> None:
    torch.manual_seed(number)
    aux = torch.randn(TOKENS, 3 * HIDDEN).bfloat16()
    tensors = {"input_ids": torch.arange(TOKENS) + number, "aux_hidden_states": aux,
               "last_hidden_state": torch.randn(TOKENS, HIDDEN).bfloat16()}
    save_file(tensors | changes, folder / f"hs_{number}.safetensors")


def test_every_fault_is_told_at_once_with_its_place(hidden: Path, target: Path) -> None:
    torch.manual_seed(9)
    aux = torch.randn(TOKENS, 3 * HIDDEN).bfloat16()
    spoilt = aux.clone()
    spoilt[3, 5], spoilt[7, 2 * HIDDEN + 1] = torch.nan, torch.inf
    write(hidden, 0)
    write(hidden, 1, aux_hidden_states=spoilt)
    write(hidden, 2, aux_hidden_states=aux[:, :2 * HIDDEN].contiguous())
    write(hidden, 3, aux_hidden_states=aux.float())
    write(hidden, 4, aux_hidden_states=torch.zeros_like(aux))
    write(hidden, 5, aux_hidden_states=aux[4:].contiguous())
    write(hidden, 6)
    cut = hidden / "hs_6.safetensors"
    cut.write_bytes(cut.read_bytes()[:-100])
    write(hidden, 7)
    prompts = hidden.parent / "prompts.json"
    prompts.write_text(json.dumps({str(i): list(range(i, i + 5)) for i in range(7)} | {"7": [1, 2, 3]}))
    report = check_files(hidden, target, prompts, None)
    assert (report.files, len(report.bad)) == (8, 7)
    facts = {finding.code: f"{finding.where}: {finding.found}" for finding in report.findings}
    places = f"row 3 index 5 (state 0), row 7 index {2 * HIDDEN + 1} (state 2)"
    assert facts["states-nonfinite"] == f"hs_1.safetensors: aux_hidden_states: 1 NaN, 1 infinite: {places}"
    assert "2 states of 16" in facts["states-width"]
    assert facts["states-dtype"].endswith("F32")
    assert "hs_4" in facts["states-zero"]
    assert "4 rows missing at the front; was a prefix cache on?" in facts["states-rows"]
    assert "hs_6" in facts["states-file"]
    assert "hs_7" in facts["states-tokens"]


@pytest.mark.parametrize(("name", "code", "value"), [
    ("last_hidden_state", "states-width", torch.ones(TOKENS, HIDDEN // 2).bfloat16()),
    ("last_hidden_state", "states-file", torch.full((TOKENS, HIDDEN, 1), torch.nan).bfloat16()),
    ("last_hidden_state", "states-dtype", torch.full((TOKENS, HIDDEN), torch.nan).double()),
    ("aux_hidden_states", "states-file", torch.tensor(1.0).bfloat16()),
    ("aux_hidden_states", "states-dtype", torch.full((TOKENS, 3 * HIDDEN), torch.nan).double()),
    ("input_ids", "states-file", torch.tensor(3)),
    ("input_ids", "states-file", torch.arange(TOKENS)[None]),
    ("input_ids", "states-dtype", torch.arange(TOKENS).short())])
@pytest.mark.parametrize("number", [0, 1], ids=["first", "second"])
def test_tensors_of_another_form_are_told(hidden: Path, target: Path, name: str, code: str, value: torch.Tensor,
                                          number: int) -> None:
    """As the first file, which the norm is proved on, and as another."""
    write(hidden, 1 - number)
    write(hidden, number, **{name: value})
    prompts = hidden.parent / "prompts.json"
    prompts.write_text(json.dumps({"0": [0], "1": [1]}))
    report = check_files(hidden, target, prompts, None)
    assert report.bad == (f"hs_{number}.safetensors",)
    assert {(f.code, f.where) for f in report.findings} >= {(code, f"hs_{number}.safetensors: {name}")}


def test_a_link_to_nowhere_is_a_bad_file(hidden: Path, target: Path) -> None:
    write(hidden, 0)
    (hidden / "hs_1.safetensors").symlink_to("nowhere")
    report = check_files(hidden, target, None, None)
    assert report.bad == ("hs_1.safetensors",)


@pytest.mark.parametrize("text", ["[1]", '{"top": [1]}', '{"top1": ["a"]}', '{"top1": 3}'])
def test_a_teacher_or_prompts_of_another_form_are_refused(hidden: Path, target: Path, text: str) -> None:
    write(hidden, 0)
    path = hidden.parent / "other.json"
    path.write_text(text)
    with pytest.raises(InvalidInput, match="top1"):
        check_files(hidden, target, None, path)
    if text != '{"top": [1]}':
        with pytest.raises(InvalidInput, match="sample number -> list of token ids"):
            check_files(hidden, target, path, None)


def test_another_requests_rows_are_found_by_their_tokens(hidden: Path, target: Path, tmp_path: Path) -> None:
    write(hidden, 0)
    write(hidden, 1, input_ids=torch.arange(TOKENS))
    prompts = tmp_path / "prompts.json"
    prompts.write_text(json.dumps({"0": [0, 1, 2], "1": [1, 2, 3]}))
    report = check_files(hidden, target, prompts, None)
    assert "they are those of prompt 0" in report.findings[0].found


@pytest.mark.parametrize("side", ["pre_norm", "post_norm", "neither"])
def test_the_side_of_the_final_norm_is_proved(hidden: Path, target: Path, tmp_path: Path, side: str) -> None:
    from safetensors.torch import load_file

    weights = load_file(target / "model.safetensors")
    torch.manual_seed(4)
    states = torch.randn(TOKENS, HIDDEN).bfloat16()
    wide = states.float()
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weights["model.norm.weight"]
    source = {"pre_norm": normed, "post_norm": wide, "neither": wide.flip(-1)}[side]
    teacher = tmp_path / "teacher.json"
    teacher.write_text(json.dumps({"top1": (source @ weights["lm_head.weight"].T).argmax(-1).tolist()}))
    write(hidden, 0, last_hidden_state=states)
    report = check_files(hidden, target, None, teacher)
    assert report.last_state == side
    finding = report.findings[0]
    assert (finding.code, finding.severity) == ("states-norm", "error" if side == "neither" else "note")


def test_nothing_to_check_is_refused(hidden: Path, target: Path) -> None:
    with pytest.raises(InvalidInput, match="safetensors"):
        check_files(hidden, target, None, None)
    write(hidden, 0)
    with pytest.raises(InvalidInput, match="unreadable"):
        check_files(hidden, target, hidden / "absent.json", None)
