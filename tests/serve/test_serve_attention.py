"""Where two backends' answers part: what the attention benchmark calls a near tie."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from eyas_serve.client import Client, Generation
from eyas_serve.config import BenchConfig
from eyas_serve.measure import Run
from eyas_serve.prompts import Prompt

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import serve_attention


def answer(*ids: int) -> Generation:
    return Generation(ids, (), 0.0, "length")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """A server whose best tokens are 7, 8 and 9, two of them as good; the prompts that it was asked."""
    prompts: list[list[int]] = []

    def post(url: str, *, json: dict[str, Any], **options: object) -> httpx.Response:
        prompts.append(json["input_ids"])
        best = [[-0.5, 7, None], [-0.5, 8, None], [-0.75, 9, None]]
        return httpx.Response(200, json={"meta_info": {"output_top_logprobs": [best]}})

    monkeypatch.setattr(serve_attention.httpx, "post", post)
    return prompts


@pytest.mark.parametrize(("ours", "theirs", "gap"), [(7, 8, 0.0), (8, 9, 0.25), (9, 7, 0.25), (7, 3, None)])
def test_the_gap_is_of_the_two_tokens_in_question(asked: list[list[int]], ours: int, theirs: int,
                                                  gap: float | None) -> None:
    found = serve_attention.near_ties("http://nowhere", [[1], [2]], [answer(5, 6), answer(5, ours)],
                                      [answer(5, 6), answer(5, theirs)])
    assert found == [{"prompt": 1, "token": 1, "gap_nats": gap}]
    assert asked == [[2, 5]]


def test_several_at_a_time_are_measured_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four answers of 101 tokens in 10 s, their prompts alone 2 s. The warm-up of two answers is counted in what the
    server says of its GPU: 606 tokens in 0.303 s of verification."""
    counters = [(1.0, 10), (1.303, 616)]

    def get(client: Client, path: str) -> tuple[int, bytes]:
        seconds, tokens = counters.pop(0)
        return 200, (f'sglang:forward_execution_seconds_total{{category="target_verify",rank="0"}} {seconds}\n'
                     f'sglang:generation_tokens_total{{model="m"}} {tokens}\n').encode()

    def measure(client: object, prompts: list[Prompt], config: BenchConfig, label: str) -> Run:
        assert config.concurrency == 2
        answers = [Generation((i,) * config.max_new_tokens, (1, 1), 0.0, "length") for i in range(len(prompts))]
        return Run(tuple(answers), 2.0 if config.max_new_tokens == 1 else 10.0)

    monkeypatch.setattr(serve_attention, "measure", measure)
    monkeypatch.setattr(Client, "get", get)
    one_at_a_time = [Generation((i % 3,) * 101, (), 0.0, "length") for i in range(4)]
    found = serve_attention.measured_at_once(Client("http://nowhere"), [[1]] * 4, 2, one_at_a_time)
    assert found == {"at_a_time": 2, "identical": 3, "tokens": 404, "tokens_per_second": 40.4, "prompt_seconds": 2.0,
                     "acceptance_length": 1.5,
                     "gpu_milliseconds_a_token": {"verify": 0.5}}


def test_a_backend_may_have_another_for_prompts() -> None:
    assert serve_attention.backend_flags("eyas") == ["--attention-backend", "eyas"]
    assert serve_attention.backend_flags("eyas+flashinfer") == [
        "--decode-attention-backend", "eyas", "--prefill-attention-backend", "flashinfer",
        "--speculative-attention-mode", "decode"]
