"""Acceptance, flags, prompts, handshake and log reading, each alone."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from eyas_contract import EngineFailure, InvalidInput
from eyas_serve import ServeConfig, proof
from eyas_serve.acceptance import Acceptance
from eyas_serve.client import Client, Generation
from eyas_serve.failures import explain
from eyas_serve.flags import engine_arguments, engine_environment
from eyas_serve.handshake import RankStatus, read_all
from eyas_serve.interpreter import find_interpreter
from eyas_serve.log import LogReader, last_words
from eyas_serve.prompts import load_prompts


def test_acceptance_by_hand() -> None:
    acceptance = Acceptance.of([[2, 1, 0, 1], [0, 3]])
    assert acceptance.histogram == (2, 4, 0, 1)
    assert (acceptance.rounds, acceptance.accepted) == (7, 7)
    assert acceptance.length == 2.0
    assert acceptance.conditional_rates() == [5 / 7, 1 / 5, 1.0]
    assert Acceptance(()).length == 1.0


@given(st.lists(st.lists(st.integers(0, 50), max_size=5), max_size=5))
def test_acceptance_is_the_mean_of_rounds(rows: list[list[int]]) -> None:
    rounds = [1 + k for row in rows for k, count in enumerate(row) for _ in range(count)]
    acceptance = Acceptance.of(rows)
    assert acceptance.length == pytest.approx(sum(rounds) / len(rounds) if rounds else 1.0)
    reach = 1.0
    for k, rate in enumerate(acceptance.conditional_rates(), 1):
        reach *= rate
        assert reach == pytest.approx(sum(r > k for r in rounds) / len(rounds))


class Scripted(Client):
    """Answers every prompt with as many tokens and the next histogram."""

    def __init__(self, histograms: list[tuple[int, ...]], tokens: int = proof.TOKENS) -> None:
        self.url, self.histograms, self.tokens = "http://scripted", iter(histograms), tokens

    def generate(self, input_ids: list[int], max_new_tokens: int, *, ignore_eos: bool = False,
                 **fields: str) -> Generation:
        return Generation((7,) * self.tokens, next(self.histograms), 1.0, "length")


def test_first_generations_go_on_until_enough_is_accepted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "proof_prompts", lambda config: iter([[1], [2], [3]]))
    config = ServeConfig(target=tmp_path, draft=tmp_path, acceptance_floor=1.5)
    found = proof.prove(Scripted([(10, 0), (0, 10), (0, 10)]), config)
    assert (found.text, found.acceptance.rounds) == ("acceptance length 1.50 in the first 2 generations", 20)
    found = proof.prove(Scripted([(10, 0), (4, 6), (0, 10)]), config)
    assert found.generations == 3  # the second alone would have been enough, the first two together are not
    found = proof.prove(Scripted([(10, 0), (10, 0), (9, 1)]), config)  # none is left: the verdict is the caller's
    assert (found.generations, found.acceptance.accepted) == (3, 1)
    alone = proof.prove(Scripted([()]), ServeConfig(target=tmp_path))
    assert (alone.generations, alone.acceptance.rounds) == (1, 0)


def test_a_first_generation_that_proves_nothing_is_a_failure(tmp_path: Path) -> None:
    config = ServeConfig(target=tmp_path, draft=tmp_path)
    for histogram in ((), (0, 0)):
        with pytest.raises(EngineFailure, match="a first generation without a round of speculation"):
            proof.prove(Scripted([histogram]), config)
    with pytest.raises(EngineFailure, match=r"47 tokens.*48 tokens of a first generation"):
        proof.prove(Scripted([(0, 40)], 47), config)


def test_flags_of_a_cpu_chain(tmp_path: Path) -> None:
    words = engine_arguments(ServeConfig(target=tmp_path, draft=tmp_path, device="cpu", radix_cache=False,
                                         extra="--log-level 'warning'"), 5)
    text = " ".join(words)
    assert "--speculative-algorithm EAGLE3" in text
    assert "--decode-attention-backend intel_amx" in text
    assert "--disable-radix-cache" in words
    assert words[-2:] == ["--log-level", "warning"]
    with pytest.raises(InvalidInput, match="quotes"):
        engine_arguments(ServeConfig(target=tmp_path, extra="'"), 5)
    with pytest.raises(InvalidInput, match="draft tokens 9"):
        engine_arguments(ServeConfig(target=tmp_path, draft=tmp_path, num_draft_tokens=9), 5)


def test_each_cpu_rank_has_cores_of_its_own(tmp_path: Path) -> None:
    def bind(tp: int, cores: list[int]) -> str:
        config = ServeConfig(target=tmp_path, device="cpu", tp=tp)
        return engine_environment(config, tmp_path, cores, {})["SGLANG_CPU_OMP_THREADS_BIND"]

    assert bind(2, [0, 1, 4, 5]) == "0,1|4,5"
    assert bind(1, [3]) == "3"
    assert bind(2, [3]) == "3|3"
    assert "SGLANG_CPU_OMP_THREADS_BIND" not in engine_environment(
        ServeConfig(target=tmp_path), tmp_path, [0], {})


def test_prompts_are_what_transformers_renders(tiny_target: Path, tmp_path: Path) -> None:
    tokenizer = PreTrainedTokenizerFast.from_pretrained(tiny_target)
    turns = [{"role": "user", "content": "count from one to two"}, {"role": "assistant", "content": "one two"},
             {"role": "user", "content": "copy red"}]
    rows = [{"id": "a", "messages": [*turns, {"role": "assistant", "content": "red"}]},
            {"conversations": [{"from": "human", "value": "copy red"}, {"from": "gpt", "value": "red"}]}]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)) + "\n\n")
    first, second = load_prompts(file, tiny_target)
    wanted = [tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=True)["input_ids"]
              for messages in (turns, turns[2:])]
    assert [list(first.input_ids), list(second.input_ids)] == wanted
    assert first.id == "a"
    assert len(load_prompts(file, tiny_target, limit=1)) == 1


def test_bad_prompts_are_all_named(tiny_target: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"messages": [\n{"text": "x"}\n[1]\n{"messages": [{"role": "system", "content": "x"}]}\n'
                    '{"messages": [{"role": "user"}]}\n')
    with pytest.raises(InvalidInput) as caught:
        load_prompts(file, tiny_target)
    for number in range(1, 6):
        assert f"line {number}:" in str(caught.value)
    with pytest.raises(InvalidInput, match=r"tokenizer\.json"):
        load_prompts(file, tmp_path)


def test_half_of_a_character_is_named_by_its_line(tiny_target: Path, tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"messages": [{"role": "user", "content": "a"}]}\n'
                    '{"messages": [{"role": "user", "content": "cut \\ud83d"}]}\n')
    with pytest.raises(InvalidInput, match=r"line 2: .*surrogates not allowed"):
        load_prompts(file, tiny_target)


def test_an_interpreter_is_run_from_where_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def python(folder: Path) -> Path:
        (folder / "real").mkdir(parents=True)
        real, path = folder / "real" / "python", folder / "an-interpreter"
        real.write_text(f"#!/bin/sh\necho '{json.dumps({'sglang': folder.name, 'torch': None, 'eyas-native': '1'})}' | "
                        "sed 's/}/, \"plugin\": true}/'\n")
        real.chmod(0o755)
        path.symlink_to(real)
        return path

    here, on_path = python(tmp_path / "here"), python(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{on_path.parent}:{os.environ['PATH']}")
    monkeypatch.delenv("EYAS_ENGINE_PYTHON", raising=False)
    monkeypatch.chdir(here.parent)
    given = find_interpreter(Path("./an-interpreter"), "cpu")
    assert (given.python, given.sglang) == (here, "here")  # the link, not what it points to
    monkeypatch.chdir(tmp_path)
    assert find_interpreter(Path("here/an-interpreter"), "cpu").python == here
    assert find_interpreter(Path("an-interpreter"), "cpu").python == on_path
    monkeypatch.setenv("EYAS_ENGINE_PYTHON", "./an-interpreter")
    with pytest.raises(EngineFailure, match="cannot be run"):
        find_interpreter(None, "cpu")


def test_handshake_survives_rubbish(tmp_path: Path) -> None:
    RankStatus("tp0-pp0-dp0", 1, "ready").write(tmp_path)
    (tmp_path / "x.json").write_text("{")
    (tmp_path / "y.json").write_text('{"other": 1}')
    assert read_all(tmp_path) == {"tp0-pp0-dp0": RankStatus("tp0-pp0-dp0", 1, "ready")}


def test_log_phases_and_last_words(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"[x] Load weight begin. avail\n[x] KV Ca")
    reader = LogReader(log)
    assert reader.poll()
    assert reader.phase == "loading weights"
    assert not reader.poll()
    with log.open("ab") as sink:
        sink.write(b"che is allocated\n\xff\xfe\nTraceback (most recent call last):\n  File 'a'\n"
                   b"ValueError: bad\nmore\n\nend\n")
    assert reader.poll()
    assert reader.phase == "KV cache allocated"
    assert last_words(log) == "ValueError: bad\nmore"
    log.write_bytes(b"only\nthis\n")
    assert last_words(log) == "only\nthis"
    log.write_bytes(b"")
    assert last_words(log) == "it wrote nothing"


def test_the_log_is_read_to_its_end_through_a_flood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("eyas_serve.log.CHUNK", 1000)
    path = tmp_path / "server.log"
    path.write_text("[x TP0] Prefill batch, #new-seq: 1\n" * 500
                    + "[x TP3] Scheduler hit an exception: Traceback\nValueError: the last word\n")
    reader = LogReader(path)
    reader.finish()
    assert [(found.rank, found.error) for found in reader.exceptions] == [("tp3-pp0-dp0", "ValueError: the last word")]


def test_a_setting_in_the_log_is_no_cause(tmp_path: Path) -> None:
    """SGLang logs its settings first; an engine killed soon after has said nothing else."""
    setting = "[2026-01-01 00:00:00] server_args=ServerArgs(model_path='/m', trust_remote_code=True, device='cuda')\n"
    (tmp_path / "log").write_text(setting + "[2026-01-01 00:00:00] Loaded plugin eyas_serve\n")
    assert explain(last_words(tmp_path / "log")) is None
    asked = explain("ValueError: The repository /m contains custom code which must be executed to correctly load the "
                    "model.\nPlease pass the argument `trust_remote_code=True` to allow custom code to be run.")
    assert asked is not None
    assert asked.name == "remote_code"


def test_a_memory_that_is_too_small_is_told_in_numbers_and_by_phase() -> None:
    text = ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 1 has a total capacity of "
            "79.10 GiB of which 1.20 GiB is free. Including the rest, this process has 70.00 GiB memory in use")
    causes = [explain(text, phase) for phase in ("capturing target graphs", "loading target weights", "warm-up")]
    assert {cause.meaning for cause in causes if cause} == {
        "out of GPU memory: 2.00 GiB more wanted, 1.20 GiB of 79.10 GiB free on GPU 1, 70.00 GiB held by this process"}
    words = ("--cuda-graph-max-bs", "The weights do not fit", "nvidia-smi")
    assert all(cause is not None and word in cause.remedy for cause, word in zip(causes, words, strict=True))
    short = explain("CUDA out of memory", "")
    assert short is not None
    assert short.meaning == "out of GPU memory"


def test_a_flag_that_the_engine_does_not_know_is_its_last_word(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    line = "sglang serve: error: ambiguous option: --cuda-graph-max-bs could match --cuda-graph-max-bs-decode, ..."
    path.write_text("usage: sglang serve [-h]\n" + "          [--flag {a,b}]\n" * 50 + line + "\n")
    assert last_words(path) == line
    cause = explain(line)
    assert cause is not None
    assert cause.name == "wrong_flags"
