"""The decoder against Hugging Face's own `generate`, and its sampling."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

import tiny
from eyas_contract import InvalidInput
from eyas_extract.decoding import ATTENTION, Sampling, choose, decode
from eyas_extract.template import ChatTemplate

GREEDY = Sampling()


@pytest.fixture(scope="module")
def model(tiny_target: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(tiny_target).eval()


@pytest.fixture(scope="module")
def prompts(tiny_target: Path) -> list[list[int]]:
    chat = ChatTemplate(tiny_target)
    return [chat.encode(chat.render(row["messages"], None, prompt=True))  # type: ignore[arg-type]
            for row in tiny.conversations(12, seed=3)]


def reference(model: Any, prompt: list[int], new: int, stop: int | None) -> list[int]:
    model.set_attn_implementation("sdpa")
    out = model.generate(torch.tensor([prompt]), max_new_tokens=new, do_sample=False, eos_token_id=stop,
                         attention_mask=torch.ones(1, len(prompt)), pad_token_id=0)
    model.set_attn_implementation(ATTENTION)
    return list(out[0, len(prompt):].tolist())


def test_equals_generate_whatever_the_company(model: Any, prompts: list[list[int]]) -> None:
    assert len({len(p) for p in prompts}) > 3
    wanted = [reference(model, p, 40, 2) for p in prompts]
    assert len({len(w) for w in wanted}) > 3  # rows end at different steps, so the batch is made smaller on the way
    for group in (prompts, prompts[:1], prompts[::-1]):
        found = decode(model, group, stop_ids=frozenset([2]), max_new_tokens=40, sampling=GREEDY)
        assert found == [wanted[prompts.index(p)] for p in group]


def test_cache_grows_past_its_first_room(model: Any, prompts: list[list[int]]) -> None:
    wanted = reference(model, prompts[0], 120, None)
    assert decode(model, prompts[:2], stop_ids=frozenset(), max_new_tokens=120, sampling=GREEDY)[0] == wanted


def test_sliding_window_target() -> None:
    torch.manual_seed(0)
    model = MistralForCausalLM(MistralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, sliding_window=6, initializer_range=0.5, eos_token_id=None)).eval()
    groups = [list(range(3, 20)), list(range(30, 35))]
    wanted = [reference(model, p, 20, None) for p in groups]
    assert decode(model, groups, stop_ids=frozenset(), max_new_tokens=20, sampling=GREEDY) == wanted


def test_sampling_repeats_by_seed_and_stream(model: Any, prompts: list[list[int]]) -> None:
    def sample(seed: int, stream: int) -> list[list[int]]:
        return decode(model, prompts, stop_ids=frozenset([2]), max_new_tokens=12, stream=stream,
                      sampling=Sampling(temperature=3.0, seed=seed))

    assert sample(1, 0) == sample(1, 0)
    assert sample(1, 0) != sample(2, 0)
    assert sample(1, 0) != sample(1, 1)


def test_choose_keeps_to_top_k_and_top_p() -> None:
    logits = torch.tensor([[0.0, 3.0, 2.0, 1.0], [1.0, 1.0, 1.0, 9.0]]).repeat(500, 1)
    generator = torch.Generator().manual_seed(0)
    assert set(choose(logits[::2], Sampling(1.0, top_k=2), generator).tolist()) == {1, 2}
    assert set(choose(logits[::2], Sampling(1.0, top_p=0.7), generator).tolist()) == {1, 2}  # 0.644, then 0.237
    assert set(choose(logits[::2], Sampling(1.0, top_p=0.6), generator).tolist()) == {1}
    assert set(choose(logits[::2], Sampling(1.0), generator).tolist()) == {0, 1, 2, 3}
    share = float((choose(logits[::2].repeat(40, 1), Sampling(1.0), generator) == 1).double().mean())
    assert abs(share - float(logits[0].double().softmax(-1)[1])) < 0.02


@pytest.mark.parametrize("width", [64, 640, 100])
def test_greedy_takes_the_first_of_equals(width: int) -> None:
    logits = torch.randn(50, width, generator=torch.Generator().manual_seed(0)).bfloat16()
    logits[:, 7] = logits[:, 50] = 20
    assert choose(logits, GREEDY, None).tolist() == [7] * 50
    logits = torch.randn(50, width, generator=torch.Generator().manual_seed(0))
    assert choose(logits, GREEDY, None).tolist() == logits.argmax(-1).tolist()


@pytest.mark.parametrize("bad", [{"temperature": -1.0}, {"temperature": float("nan")}, {"top_p": 0.0}, {"top_p": 1.5},
                                 {"top_k": -1}])
def test_sampling_settings_are_checked(bad: dict[str, Any]) -> None:
    with pytest.raises(InvalidInput, match="sampling"):
        Sampling(**bad)
