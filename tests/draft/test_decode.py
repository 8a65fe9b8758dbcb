"""The reference decoder: plain greedy token for token, native and plain operations alike, and the walk it confirms."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from unittest.mock import patch

import pytest
import storemaker
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny
from eyas_contract import Contract, InvalidInput
from eyas_draft.batches import Batch
from eyas_draft.config import EvalConfig, ExportConfig, TrainConfig, VerifyConfig
from eyas_draft.decode import Decoder
from eyas_draft.evaluate import evaluate
from eyas_draft.export import Verdict, export, verify
from eyas_draft.loading import load_draft
from eyas_draft.ops import get_ops
from eyas_draft.prompts import read_prompts
from eyas_draft.rounds import TreeShape
from eyas_draft.setup import draft_ids
from eyas_draft.states import States
from eyas_draft.store import Sample, Store
from eyas_draft.target_model import TargetModel
from eyas_draft.target_weights import TargetWeights
from eyas_draft.train import Trainer
from eyas_draft.walk import Walk, _rounds, _turns, walk

SHAPES = [(1, 1, 2), (3, 1, 4), (3, 2, 6), (4, 3, 16), (2, 4, 5)]
MAX_NEW = 24


@pytest.fixture(scope="module")
def run(store: Path, tiny_target: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A short run. Read-only."""
    out = tmp_path_factory.mktemp("decode") / "run"
    Trainer(TrainConfig(store, tiny_target, out, vocab_size=40, epochs=12, tokens_per_batch=256, lr=3e-3, ttt_steps=3,
                        precision="fp32"), io.StringIO()).run()
    return out


@pytest.fixture(scope="module")
def draft(run: Path) -> Path:
    """Its export. Read-only."""
    out = run.parent / "draft"
    export(ExportConfig(run, out))
    return out


@pytest.fixture(scope="module")
def prompts_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.write_jsonl(tmp_path_factory.mktemp("prompts") / "p.jsonl", tiny.conversations(24, 901))


@pytest.fixture(scope="module")
def plain(tiny_target: Path, prompts_file: Path) -> tuple[list[list[int]], list[list[int]]]:
    """Prompts and their greedy answers by Hugging Face alone."""
    prompts = read_prompts(prompts_file, AutoTokenizer.from_pretrained(tiny_target))
    model = AutoModelForCausalLM.from_pretrained(tiny_target, dtype=torch.float32)
    answers = [model.generate(torch.tensor([p]), attention_mask=torch.ones(1, len(p)), do_sample=False,
                              max_new_tokens=MAX_NEW)[0, len(p):].tolist() for p in prompts]
    return prompts, answers


def test_an_export_goes_over_nothing_but_its_own_runs(run: Path, tiny_target: Path, tmp_path: Path) -> None:
    """`--out` that names the target, say, would take its config and weights away."""
    folder = shutil.copytree(tiny_target, tmp_path / "target")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(InvalidInput, match=r"config\.json.*an export of this run"):
        export(ExportConfig(run, folder))
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    for checkpoint in ("last", "best"):
        export(ExportConfig(run, tmp_path / "draft", checkpoint=checkpoint, golden=False))
    (tmp_path / "draft" / "contract.json").write_text("{}")
    with pytest.raises(InvalidInput, match="an export of this run"):
        export(ExportConfig(run, tmp_path / "draft"))


@pytest.mark.parametrize("kind", ["itself", "a run of the same contract", "one without a checkpoint"])
def test_an_export_goes_over_no_run(run: Path, tmp_path: Path, kind: str) -> None:
    """It has the contract of its exports, and settings that an export's would take the place of."""
    folder = Path(shutil.copytree(run, tmp_path / "run"))
    if kind.startswith("one"):
        shutil.rmtree(folder / "checkpoints")
    before = {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    with pytest.raises(InvalidInput, match="an export of this run"):
        export(ExportConfig(folder if kind == "itself" else run, folder, golden=False))
    assert {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_a_run_begins_in_a_folder_of_its_own(store: Path, tiny_target: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_target, tmp_path / "target")
    before = sorted(path.name for path in folder.iterdir())
    with pytest.raises(InvalidInput, match="a new or empty folder, or a run"):
        Trainer(TrainConfig(store, tiny_target, folder, vocab_size=40), io.StringIO())
    assert sorted(path.name for path in folder.iterdir()) == before


def decoder(draft: Path, target: Path, shape: tuple[int, int, int], ops: str) -> Decoder:
    runner = TargetModel(target, Contract.load(draft).capture.aux_layer_ids, torch.float32, torch.device("cpu"))
    model, contract = load_draft(draft, TargetWeights.load(target, Contract.load(draft).target).embedding_vh)
    return Decoder(runner, model.float(), draft_ids(contract), TreeShape(*shape), get_ops(ops), MAX_NEW)


@pytest.mark.parametrize("ops", ["native", "torch"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_output_is_plain_greedy_token_for_token(draft: Path, tiny_target: Path, ops: str, shape: tuple[int, int, int],
                                                plain: tuple[list[list[int]], list[list[int]]]) -> None:
    prompts, wanted = plain
    answers = decoder(draft, tiny_target, shape, ops).decode(prompts)
    assert [answer.tokens for answer in answers] == wanted
    assert sum(map(sum, (answer.accepted for answer in answers))) > 0


def test_answers_do_not_depend_on_who_is_decoded_along(draft: Path, tiny_target: Path,
                                                       plain: tuple[list[list[int]], list[list[int]]]) -> None:
    prompts, _ = plain
    one = decoder(draft, tiny_target, (3, 2, 6), "native")
    together = one.decode(prompts[:6])
    alone = [one.decode([prompt])[0] for prompt in prompts[:6]]
    assert together == alone


def test_native_and_plain_operations_accept_the_same(draft: Path, tiny_target: Path,
                                                     plain: tuple[list[list[int]], list[list[int]]]) -> None:
    prompts, _ = plain
    for shape in ((3, 2, 6), (4, 3, 16)):
        accepted = [[a.accepted for a in decoder(draft, tiny_target, shape, ops).decode(prompts)]
                    for ops in ("native", "torch")]
        assert accepted[0] == accepted[1]


def test_rounds_and_their_statistics_by_hand() -> None:
    assert _rounds([1, 9, 0, 2, 9, 9], 0, 6) == [1, 0, 2]  # begun at rows 0, 2 and 3
    assert _rounds([0, 0, 0, 0], 0, 4) == [0, 0]  # the third would have no token behind its bonus
    walked = Walk((1, 0, 1))
    assert (walked.rounds, walked.acceptance_length, walked.standard_error) == (2, 2.0, 1.0)
    assert Walk((2, 1, 1)).rates == (0.5, 0.25)
    assert (Walk((0, 1)).standard_error, Walk((0, 0)).acceptance_length) == (0.0, 1.0)


def test_turns_end_with_their_document_and_begin_behind_a_token_of_it() -> None:
    masks = [[1, 0, 1, 1, 0, 0], [1, 0, 1, 1], [0, 1, 0, 1]]
    documents = [Sample(str(i), torch.zeros(len(mask), dtype=torch.int32), torch.tensor(mask, dtype=torch.bool),
                        States(torch.zeros(len(mask), 3)), States(torch.zeros(len(mask), 1)))
                 for i, mask in enumerate(masks)]
    assert _turns(Batch.pack(documents, torch.device("cpu"))) == [(1, 4), (7, 10), (10, 12), (12, 14)]


def test_the_walk_over_stored_answers_predicts_the_decoders_rounds(
        draft: Path, tiny_target: Path, store: Path, rows: list[storemaker.Row]) -> None:
    """Round for round, but for the last of each answer, which the walk leaves out where it holds only the bonus."""
    steps = 3
    weights = TargetWeights.load(tiny_target, Contract.load(draft).target)
    model, contract = load_draft(draft, weights.embedding_vh)
    opened, checked = Store(store), 0
    runner = decoder(draft, tiny_target, (steps, 1, steps + 1), "native")
    for index in range(24):
        sample, mask = opened.sample(index), rows[index][2]
        prompt = rows[index][1][:int((mask == 0).sum())].tolist()
        accepted = runner.decode([prompt])[0].accepted
        walked = walk(model.float(), [Batch.pack([sample], torch.device("cpu"))], steps, draft_ids(contract))
        histogram = [0] * (steps + 1)
        for count in accepted[:-1]:
            histogram[count] += 1
        difference = [a - b for a, b in zip(walked.histogram, histogram, strict=True)]
        assert min(difference) >= 0
        assert sum(difference) <= 1
        checked += len(accepted)
    assert checked > 24


def test_report(draft: Path, tiny_target: Path, prompts_file: Path) -> None:
    said = io.StringIO()
    report = evaluate(EvalConfig(draft, tiny_target, prompts_file, topk=2, num_draft_tokens=6, max_new_tokens=MAX_NEW,
                                 batch_size=7, compare_greedy=True), said)
    for name in ("eval", "without the draft"):  # a share, and so a time to wait
        assert f"{name}:  100 %  24/24 prompts" in said.getvalue()
    assert report["outputs_identical"]
    assert len(report["outputs"]) == report["prompts"] == 24
    assert sum(report["histogram"]) == report["rounds"]
    accepted = sum(i * n for i, n in enumerate(report["histogram"]))
    assert report["acceptance_length"] == pytest.approx(1 + accepted / report["rounds"])
    assert 1 + sum(report["position_rates"]) == pytest.approx(report["acceptance_length"])
    assert report["acceptance_length"] > 1.3
    json.dumps(report)


def test_prompts_are_read_before_the_targets_weights(draft: Path, tiny_target: Path, tmp_path: Path) -> None:
    """A wrong path is told at once, not after the minutes that a large target takes."""
    with patch("eyas_draft.evaluate.TargetWeights.load", side_effect=AssertionError("weights were read")), \
            pytest.raises(InvalidInput, match="no such file"):
        evaluate(EvalConfig(draft, tiny_target, tmp_path / "absent.jsonl"), io.StringIO())


@pytest.mark.parametrize("shape", [(0, 1, 1), (3, 1, 5), (2, 2, 8), (3, 2, 1)])
def test_shapes_that_make_no_tree_are_refused(draft: Path, tiny_target: Path, shape: tuple[int, int, int]) -> None:
    with pytest.raises(InvalidInput, match="--steps"):
        decoder(draft, tiny_target, shape, "torch")


def test_verify_passes_the_export_and_fails_another(run: Path, draft: Path, store: Path, tiny_target: Path,
                                                    tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file
    settings = VerifyConfig(run, draft, store, tiny_target)
    assert verify(settings).faults == ()
    assert verify(settings).largest_difference == 0.0
    for name in ("contract.json", "config.json", "config.resolved.json", "model.safetensors"):
        (tmp_path / name).write_bytes((draft / name).read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["midlayer.mlp.up_proj.weight"] *= 1.01
    save_file(tensors, tmp_path / "model.safetensors")
    plain = json.loads((tmp_path / "config.json").read_text())
    plain["norm_output"] = True
    (tmp_path / "config.json").write_text(json.dumps(plain))
    faults = verify(VerifyConfig(run, tmp_path, store, tiny_target)).faults
    assert len(faults) == 2
    assert "norm_output" in faults[0]
    assert "logits differ" in faults[1]


def test_verify_fails_what_gives_no_numbers(run: Path, draft: Path, store: Path, tiny_target: Path,
                                             tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file
    folder = shutil.copytree(draft, tmp_path / "draft")
    tensors = load_file(folder / "model.safetensors")
    tensors["midlayer.mlp.up_proj.weight"][0, 0] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    found = verify(VerifyConfig(run, folder, store, tiny_target))
    assert found.faults == ("logits differ from the trainer's by nan of the largest",)
    assert found.largest_difference is None


def test_verify_passes_over_samples_whose_states_are_not_finite(run: Path, draft: Path, tiny_target: Path,
                                                                rows: list[storemaker.Row], tmp_path: Path) -> None:
    bad = [(*row[:3], row[3] * float("nan"), row[4]) for row in rows[:2]]
    settings = VerifyConfig(run, draft, storemaker.write_store(tmp_path / "a", tiny_target, bad + rows[2:8]),
                            tiny_target)
    assert verify(settings) == Verdict(4, 2 * sum(row[1].numel() for row in rows[2:6]), 0.0, ())
    settings = VerifyConfig(run, draft, storemaker.write_store(tmp_path / "b", tiny_target, bad), tiny_target)
    with pytest.raises(InvalidInput, match="no sample with finite states"):
        verify(settings)


def test_every_fault_of_a_folder_is_named(draft: Path, tiny_target: Path, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file
    tensors = load_file(draft / "model.safetensors")
    absolute = tensors["d2t"] + torch.arange(tensors["d2t"].numel())
    broken = {name.replace("midlayer", "decoder"): value for name, value in tensors.items() if name != "lm_head.weight"}
    broken["d2t"] = absolute
    broken["fc.weight"] = broken["fc.weight"][:, :64].contiguous()
    (tmp_path / "contract.json").write_bytes((draft / "contract.json").read_bytes())
    save_file(broken, tmp_path / "model.safetensors")
    with pytest.raises(InvalidInput) as caught:
        load_draft(tmp_path, TargetWeights.load(tiny_target, Contract.load(draft).target).embedding_vh)
    for part in ("lm_head.weight is missing", "midlayer.mlp.up_proj.weight is missing",
                 "decoder.mlp.up_proj.weight is unknown", "fc.weight is [64, 64], not [64, 192]", "d2t (torch.int64)"):
        assert part in caught.value.found
    save_file({name: value for name, value in tensors.items() if name != "d2t"}, tmp_path / "model.safetensors")
    with pytest.raises(InvalidInput, match="d2t is missing"):
        load_draft(tmp_path, TargetWeights.load(tiny_target, Contract.load(draft).target).embedding_vh)


def test_prompt_lines_that_are_no_conversations_are_all_named(tmp_path: Path, tiny_target: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(tiny_target)
    path = tmp_path / "p.jsonl"
    path.write_text('{"messages": [{"role": "user", "content": "copy red"}, {"role": "assistant", "content": "x"}]}\n'
                    '{"conversations": [{"from": "human", "value": "copy red"}, {"from": "gpt", "value": "y"}]}\n')
    first, second = read_prompts(path, tokenizer)
    assert first == second
    path.write_text('{"a": 1\n{"messages": []}\n\n{"messages": [{"role": "robot", "content": "x"}]}\n')
    with pytest.raises(InvalidInput, match=r"line 1: not JSON.*line 2: no messages.*line 4: a turn"):
        read_prompts(path, tokenizer)
