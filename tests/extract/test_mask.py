"""Loss masks: what is supervised, for templates of every kind, and refusals where it cannot be proved."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

import tiny
from eyas_extract.conversations import Conversation, order_fault
from eyas_extract.mask import Sample, encode
from eyas_extract.template import ChatTemplate

Make = Callable[[str], ChatTemplate]
PLAIN = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>{% endfor %}"
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
MARKED = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}"
          "{{ m.content }}<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}"
          "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
# The last answer has a thinking block, made up where the data has none; earlier answers lose theirs.
THINKING = ("{% for m in messages %}<|im_start|>{{ m.role }}\n"
            "{% if m.role == 'assistant' %}{% set parts = m.content.split('</think>') %}{% if loop.last %}<think>"
            "{{ parts[0].replace('<think>', '') if parts|length > 1 else '' }}</think>{% endif %}{{ parts[-1] }}"
            "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")
OPENED = THINKING.replace("assistant\n{% endif %}", "assistant\n<think>{% endif %}")
STRICT = ("{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
          "{{ raise_exception('turns must alternate') }}{% endif %}{% endfor %}" + PLAIN + PROMPT)
# As Phi-3's: what ends the text is a stop token too, and follows the answer's own.
ENDED = tiny.CHATML.replace("{% endif %}", "{% else %}{{ '<|endoftext|>' }}{% endif %}")
TOOLS = ("{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.reasoning_content %}<think>{{ m.reasoning_content }}"
         "</think>{% endif %}{{ m.content }}{% for c in m.tool_calls or [] %}<call>{{ c.function.name }} "
         "{{ c.function.arguments.town }}</call>{% endfor %}<|im_end|>\n{% endfor %}"
         "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}")


def talk(*turns: str | dict[str, Any], system: str = "") -> Conversation:
    """User and assistant in turn."""
    messages: list[dict[str, Any]] = [{"role": "system", "content": system}] if system else []
    for i, turn in enumerate(turns):
        more = turn if isinstance(turn, dict) else {"content": turn}
        messages.append({"role": ("user", "assistant")[i % 2], **more})
    return Conversation(1, "c", tuple(messages), None, order_fault([m["role"] for m in messages]))


def both(conversation: Conversation, template: ChatTemplate, max_length: int = 4096, overlong: Any = "reject"
         ) -> tuple[list[str], list[str]]:
    """Supervised text of each sample, turns apart by ` | `; and reasons."""
    samples, reasons = encode(conversation, template, max_length=max_length, overlong=overlong)
    return [text(sample, template) for sample in samples], reasons


def text(sample: Sample, template: ChatTemplate) -> str:
    runs, before = [], 0
    for token, bit in zip(sample.input_ids, sample.loss_mask, strict=True):
        if bit:
            runs += [] if before else [[]]
            runs[-1].append(token)
        before = bit
    return " | ".join(template.decode(run) for run in runs)


@pytest.mark.parametrize("kind", [tiny.CHATML, MARKED])
def test_every_answer_and_its_end_mark(template: Make, kind: str) -> None:
    chat = template(kind)
    assert both(talk("red", "green", "blue", "count to two", system="say"), chat) == (
        ["green<|im_end|> | count to two<|im_end|>"], [])


def test_marked_and_unmarked_templates_agree(template: Make) -> None:
    conversation = talk("red", " green\n", "blue", "one")
    plain, _ = encode(conversation, template(tiny.CHATML), max_length=99, overlong="reject")
    marked, _ = encode(conversation, template(MARKED), max_length=99, overlong="reject")
    assert plain == marked


def test_further_stop_tokens_after_the_answers_own(template: Make) -> None:
    chat = template(ENDED)
    assert both(talk("a", "b"), chat) == ([], ["turn 1: text follows the end-of-turn token"])
    chat.stop_ids |= {chat.tokenizer.pad_token_id}  # <|endoftext|>
    assert both(talk("red", "green", "blue", "one"), chat) == (["green<|im_end|> | one<|im_end|>"], [])
    chat.tokenizer.chat_template = ENDED.replace("}}{% endif %}", "}}say{% endif %}")
    assert both(talk("a", "b"), chat) == ([], ["turn 1: text follows the end-of-turn token"])


def test_end_mark_of_several_tokens(template: Make) -> None:
    assert both(talk("a", "b", "c", "d"), template(PLAIN + PROMPT)) == (["b<|end|> | d<|end|>"], [])


@pytest.mark.parametrize("kind", [THINKING, OPENED])
def test_answers_shown_otherwise_as_history_become_samples_of_their_own(template: Make, kind: str) -> None:
    chat = template(kind)
    assert both(talk("red", "green", "blue", "one"), chat) == (["green<|im_end|>", "one<|im_end|>"], [])
    opening = "" if kind == OPENED else "<think>"
    assert both(talk("red", "<think>a</think>green", "blue", "<think>b</think>one"), chat) == (
        [f"{opening}a</think>green<|im_end|>", f"{opening}b</think>one<|im_end|>"], [])
    samples, _ = encode(talk("red", "green", "blue", "one"), chat, max_length=999, overlong="reject")
    assert [s.id for s in samples] == ["c#turn-1", "c#turn-3"]


def test_a_refusing_template_gives_its_own_reason(template: Make) -> None:
    rows = talk("a", "b"), Conversation(2, "d", (*talk("a").messages, *talk("a", "b").messages))
    assert both(rows[0], template(STRICT)) == (["b<|end|>"], [])
    assert both(rows[1], template(STRICT)) == ([], ["the chat template refuses the row: turns must alternate"])


def test_wrong_order_is_rejected_where_the_template_does_not_mind(template: Make) -> None:
    messages = talk("a", "b").messages[::-1]
    row = Conversation(1, "c", messages, None, order_fault([m["role"] for m in messages]))
    assert both(row, template(tiny.CHATML)) == ([], ["the first turn is assistant, not user"])


def test_tool_calls_and_reasoning_are_supervised_and_results_are_not(template: Make) -> None:
    call = {"content": "", "tool_calls": [{"function": {"name": "weather", "arguments": {"town": "Oslo"}}}]}
    row = Conversation(1, "c", ({"role": "user", "content": "a"}, {"role": "assistant", **call},
                                {"role": "tool", "content": "4 C"},
                                {"role": "assistant", "content": "four", "reasoning_content": "list"}))
    chat = template(TOOLS)
    assert both(row, chat) == (["<call>weather Oslo</call><|im_end|> | <think>list</think>four<|im_end|>"], [])
    hidden = template(TOOLS.replace("m.reasoning_content", "m.nothing").replace("m.tool_calls", "m.none"))
    assert both(talk("a", call), hidden) == ([], ["turn 1: the template does not show the tool call"])
    assert both(talk("a", {"content": "b", "reasoning_content": "list"}), hidden) == (
        [], ["turn 1: the template does not show the reasoning"])


@pytest.mark.parametrize(("kind", "turns", "reason"), [
    (tiny.CHATML, ("a",), "no assistant turn"), (tiny.CHATML, ("a", " \n"), "assistant turn 1 is empty"),
    (tiny.CHATML.replace("message['content']", "message['content']|upper"), ("a", "b"), "does not show the answer"),
    (PLAIN + "{% if add_generation_prompt %}<|model|>{% endif %}", ("a", "b"), "no prefix of the rendered"),
    (tiny.CHATML, ("a", "b<|im_end|>c"), "holds an end-of-turn token"),
    ("{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}"
     "{% if add_generation_prompt %}assistant: {% endif %}", ("a", "stone"),
     "a token reaches over the answer's beginning"),
    ("{{ messages[-1].content if not add_generation_prompt }}", ("a", "b"), "there is no prompt"),
    ("{{ messages.no.such }}", ("a", "b"), "the chat template refuses the row"),
    (MARKED.replace("{{ m.content }}<|im_end|>{% endgeneration %}", "{% endgeneration %}{{ m.content }}"), ("a", "b"),
     "cover no token"),
    (MARKED.replace("{{ m.content }}<|im_end|>{% endgeneration %}", "x{% endgeneration %}{{ m.content }}"), ("a", "b"),
     "do not decode to the answer's text"),
])
def test_what_cannot_be_proved_is_rejected(template: Make, kind: str, turns: tuple[str, ...], reason: str) -> None:
    texts, [found] = both(talk(*turns), template(kind))
    assert not texts
    assert reason in found


def test_overlong_samples_are_rejected_or_cut(template: Make) -> None:
    chat, row = template(tiny.CHATML), talk("red", "one two three four")
    [whole], _ = encode(row, chat, max_length=99, overlong="reject")
    length = len(whole.input_ids)
    assert both(row, chat, length) == (["one two three four<|im_end|>"], [])
    assert both(row, chat, length - 1) == ([], [f"{length} tokens, longer than max_length {length - 1}"])
    assert both(row, chat, length - 2, "truncate") == (["one two three"], [])
    assert both(row, chat, 5, "truncate") == (
        [], ["cut at max_length 5, nothing of the assistant is left to train on"])


def test_known_output_ids_are_used_as_they_are(template: Make) -> None:
    chat = template(tiny.CHATML)
    letters = [i for char in "one" for i in chat.encode(char)]
    assert letters != chat.encode("one")
    stop = chat.tokenizer.eos_token_id
    row = talk("red", {"content": "one", "output_ids": [*letters, stop], "finish_reason": "stop"}, "blue",
               {"content": "two", "output_ids": chat.encode("two"), "finish_reason": "length"})
    samples, reasons = encode(row, chat, max_length=99, overlong="reject")
    assert not reasons
    assert [text(s, chat) for s in samples] == ["one<|im_end|>", "two"]  # retokenised history breaks the chain
    assert list(samples[0].input_ids)[-4:] == [*letters, stop]
    again = talk("red", {"content": "one", "output_ids": [*chat.encode("one"), stop]}, "blue",
                 {"content": "two", "output_ids": chat.encode("two")})
    assert both(again, chat) == (["one<|im_end|> | two"], [])


def test_known_output_ids_that_go_on_after_their_end_are_rejected(template: Make) -> None:
    chat = template(tiny.CHATML)
    stop = chat.tokenizer.eos_token_id
    row = talk("red", {"content": "one<|im_end|>", "output_ids": [*chat.encode("one"), stop, stop]})
    assert both(row, chat) == ([], ["output_ids of turn 1 go on after an end-of-turn token"])


def test_white_space_that_begins_an_answer_is_the_answers(template: Make) -> None:
    """Behind a thinking block that the template makes up, which is not."""
    assert both(talk("red", "\n\ngreen"), template(THINKING)) == (["\n\ngreen<|im_end|>"], [])


@pytest.mark.parametrize(("ids", "reason"), [
    ("x", "are not token ids"), ([], "are not token ids"), ([-1], "are not token ids"), ([True], "are not token ids"),
    ([10**6], "are not token ids"), ([5], "decode to"), ([2, 2], "decode to"),
])
def test_output_ids_that_are_not_the_content_are_rejected(template: Make, ids: Any, reason: str) -> None:
    texts, [found] = both(talk("red", {"content": "one", "output_ids": ids}), template(tiny.CHATML))
    assert not texts
    assert reason in found
