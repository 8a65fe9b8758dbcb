"""Conversations -> token ids and the loss mask on what the assistant wrote, each proved by round trip.

Each assistant turn is rendered the way the target saw it when it wrote it: as the last turn. Turns whose renderings
continue one another become one sample. A template that shows an answer otherwise once it is history (stripped
reasoning, an empty thinking block in the last answer only) breaks that chain, and the conversation becomes several
samples, so that no answer is trained on in a form that the target never writes.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eyas_extract.config import Overlong
from eyas_extract.conversations import Conversation, RowFault
from eyas_extract.template import ChatTemplate


@dataclass(frozen=True)
class Sample:
    """One training sample.

    Attributes:
        id: the conversation's id, with `#turn-<n>` where a conversation became several samples.
        line: of the conversation in its file.
        input_ids: int32 token ids [T].
        loss_mask: one byte a token [T], 1 where the assistant produced it.
    """

    id: str
    line: int
    input_ids: array[int]
    loss_mask: bytes

    @property
    def trained(self) -> int:
        """Number of trained tokens."""
        return sum(self.loss_mask)


@dataclass(frozen=True)
class Turn:
    """One assistant turn as the target wrote it: all tokens up to its end, and where its own begin."""

    number: int
    ids: list[int]
    start: int


def encode(conversation: Conversation, template: ChatTemplate, *, max_length: int,
           overlong: Overlong) -> tuple[list[Sample], list[str]]:
    """Samples of a conversation, and the reasons of those that were left out.

    Args:
        max_length: most tokens of a sample.
        overlong: whether longer ones are left out or cut.
    """
    try:
        turns = _turns(conversation, template)
    except RowFault as fault:
        return [], [str(fault)]
    chains: list[list[Turn]] = []
    for turn in turns:
        if chains and turn.ids[:len(chains[-1][-1].ids)] == chains[-1][-1].ids:
            chains[-1].append(turn)
        else:
            chains.append([turn])
    samples, reasons = [], []
    for chain in chains:
        suffix = f"#turn-{chain[-1].number}" if len(chains) > 1 else ""
        try:
            samples.append(_sample(conversation, chain, suffix, max_length, overlong))
        except RowFault as fault:
            reasons.append(f"{suffix[1:]}: {fault}" if suffix else str(fault))
    return samples, reasons


def _sample(conversation: Conversation, chain: list[Turn], suffix: str, max_length: int,
            overlong: Overlong) -> Sample:
    ids = chain[-1].ids
    mask = bytearray(len(ids))
    for turn in chain:
        mask[turn.start:len(turn.ids)] = b"\1" * (len(turn.ids) - turn.start)
    if len(ids) > max_length:
        if overlong == "reject":
            raise RowFault(f"{len(ids)} tokens, longer than max_length {max_length}")
        ids, mask = ids[:max_length], mask[:max_length]
        if not any(mask):
            raise RowFault(f"cut at max_length {max_length}, nothing of the assistant is left to train on")
    if all(mask):
        raise RowFault("every token is the assistant's; there is no prompt")
    return Sample(conversation.id + suffix, conversation.line, array("i", ids), bytes(mask))


def _turns(conversation: Conversation, template: ChatTemplate) -> list[Turn]:
    """All assistant turns; RowFault where the row as a whole cannot be trained on."""
    messages, tools = conversation.messages, conversation.tools
    template.render(messages, tools)  # a refusal of the whole row is the template's to explain
    if conversation.order_fault:
        raise RowFault(conversation.order_fault)
    numbers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    if not numbers:
        raise RowFault("no assistant turn")
    result = []
    for i in numbers:
        message = messages[i]
        if not _said(message).strip() and not message.get("tool_calls"):
            raise RowFault(f"assistant turn {i} is empty")
        if message.get("output_ids") is not None:
            result.append(_known(messages[:i], message, i, tools, template))
        elif template.marks_generation:
            result.append(_marked(messages[:i + 1], i, tools, template))
        else:
            result.append(_rendered(messages[:i + 1], i, tools, template))
    return result


def _said(message: dict[str, Any]) -> str:
    reasoning = message.get("reasoning_content")
    return (reasoning if isinstance(reasoning, str) else "") + str(message["content"])


def _known(before: Sequence[dict[str, Any]], message: dict[str, Any], number: int, tools: Sequence[Any] | None,
           template: ChatTemplate) -> Turn:
    """A turn whose tokens the target's own run recorded: no tokenising of its text, which may come out otherwise."""
    ids, vocabulary = message["output_ids"], len(template.tokenizer)
    if not isinstance(ids, list) or not ids or not all(type(i) is int and 0 <= i < vocabulary for i in ids):
        raise RowFault(f"output_ids of turn {number} are not token ids below {vocabulary}")
    text = template.decode(ids[:-1] if ids[-1] in template.stop_ids else ids)
    if text != message["content"]:
        raise RowFault(f"output_ids of turn {number} decode to {text[:40]!r}, its content is "
                       f"{message['content'][:40]!r}")
    if any(i in template.stop_ids for i in ids[:-1]):
        raise RowFault(f"output_ids of turn {number} go on after an end-of-turn token")
    prompt = template.encode(template.render(before, tools, prompt=True))
    return Turn(number, prompt + ids, len(prompt))


def _marked(messages: Sequence[dict[str, Any]], number: int, tools: Sequence[Any] | None,
            template: ChatTemplate) -> Turn:
    """A turn of a template with `{% generation %}` marks: the last marked run, proved to hold the answer."""
    ids, mask = template.marked(messages, tools)
    if 1 not in mask:
        raise RowFault(f"the template's generation marks cover no token of turn {number}")
    end = len(mask) - mask[::-1].index(1)
    start = end
    while start and mask[start - 1]:
        start -= 1
    _prove(template, ids[start:end], messages[-1], number)
    return Turn(number, ids[:end], start)


def _rendered(messages: Sequence[dict[str, Any]], number: int, tools: Sequence[Any] | None,
              template: ChatTemplate) -> Turn:
    """A turn of a template without marks: what follows the prompt that the target answered, up to its stop token."""
    message = messages[-1]
    prompt = template.render(messages[:-1], tools, prompt=True)
    text = template.render(messages, tools)
    if not text.startswith(prompt):
        raise RowFault(f"turn {number}: the prompt that the target answers is no prefix of the rendered conversation")
    ids = template.encode(text)
    start_char, end_char = _answer(text, len(prompt), message, number)
    start = _boundary(template, text, start_char, ids)
    if start is None:
        raise RowFault(f"turn {number}: a token reaches over the answer's beginning")
    end = _end(template, text, end_char, ids, start, number)
    _prove(template, ids[start:end], message, number)
    return Turn(number, ids[:end], start)


def _end(template: ChatTemplate, text: str, end_char: int, ids: list[int], start: int, number: int) -> int:
    """Where the turn's tokens end: after the stop token that follows the content, or after the template's last text."""
    content_end = _boundary(template, text, end_char, ids)
    if content_end is not None:
        if any(i in template.stop_ids for i in ids[start:content_end]):
            raise RowFault(f"turn {number}: the answer's text holds an end-of-turn token")
        for at in range(content_end, len(ids)):
            if ids[at] in template.stop_ids:
                if (any(_speaks(template, i) for i in ids[at + 1:])
                        and _boundary(template, text, len(text.rstrip()), ids) not in (None, at + 1)):
                    raise RowFault(f"turn {number}: text follows the end-of-turn token")
                return at + 1
    stripped = _boundary(template, text, max(end_char, len(text.rstrip())), ids)
    return len(ids) if stripped is None else stripped


def _speaks(template: ChatTemplate, token: int) -> bool:
    """Whether a token is text: neither white space nor another stop token, which some templates add at the end."""
    return token not in template.stop_ids and bool(template.decode([token]).strip())


def _boundary(template: ChatTemplate, text: str, at: int, ids: list[int]) -> int | None:
    """Number of tokens of `text[:at]`, if they are the first of `ids`; None where a token reaches over `at`."""
    head = template.encode(text[:at])
    return len(head) if ids[:len(head)] == head else None


def _answer(text: str, prompt_end: int, message: dict[str, Any], number: int) -> tuple[int, int]:
    """Where, in the rendered text, what the target writes begins and its content ends.

    Text that the template puts between the prompt and the content is not the target's (an empty thinking block),
    unless the message has reasoning or tool calls, which are rendered there. An opening mark that the prompt already
    holds may begin the content.
    """
    if message.get("tool_calls") or message.get("reasoning_content"):
        return prompt_end, prompt_end
    content = message["content"]
    places = [i for i, char in enumerate(text) if not char.isspace()]
    solid, wanted = _solid(text), _solid(content)
    floor = sum(1 for i in places if i < prompt_end)
    at = solid.find(wanted, max(0, floor - len(wanted) + 1))
    while 0 <= at < floor and not _overlap_is_mark(wanted[:floor - at]):
        at = solid.find(wanted, at + 1)
    if at < 0:
        raise RowFault(f"turn {number}: the template does not show the answer's text as it is")
    end = places[at + len(wanted) - 1] + 1
    trailing = content[len(content.rstrip()):]
    if trailing and text.startswith(trailing, end):
        end += len(trailing)
    if at <= floor:
        return prompt_end, end
    start = places[at]
    leading = content[:len(content) - len(content.lstrip())]
    if leading and text[:start].endswith(leading):
        start = max(prompt_end, start - len(leading))
    return start, end


def _overlap_is_mark(overlap: str) -> bool:
    """Whether what prompt and content share is one opening mark such as `<think>` or `[think]`."""
    return len(overlap) > 2 and (overlap[0] + overlap[-1] in ("<>", "[]")) and "/" not in overlap


def _prove(template: ChatTemplate, ids: Sequence[int], message: dict[str, Any], number: int) -> None:
    """The masked tokens, decoded, hold the answer's text (an opening mark given by the prompt excepted)."""
    decoded, content = _solid(template.decode(ids)), _solid(message["content"])
    calls = [call.get("function", call)["name"] for call in message.get("tool_calls", [])]
    for part, what in ((message.get("reasoning_content"), "reasoning"), *((call, "tool call") for call in calls)):
        if part is not None and (not isinstance(part, str) or _solid(part) not in decoded):
            raise RowFault(f"turn {number}: the template does not show the {what}")
    if content in decoded:
        return
    if not any(_overlap_is_mark(content[:end]) and decoded.startswith(content[end:])
               for end in range(3, min(len(content), 40))):
        raise RowFault(f"turn {number}: the masked tokens do not decode to the answer's text")


def _solid(text: str) -> str:
    """Without white space, which templates trim and tokenizers move."""
    return "".join(text.split())
