"""Prompts as conversations that wait for their answers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from eyas_extract.config import RegenerateConfig
from eyas_extract.conversations import Conversation, Reject, RowFault, read_conversations
from eyas_extract.template import ChatTemplate


@dataclass
class Dialogue:
    """One conversation being answered: what is said so far, and what others still say after each answer."""

    line: int
    id: str
    tools: tuple[Any, ...] | None
    messages: list[dict[str, Any]]
    later: list[list[dict[str, Any]]] = field(default_factory=list)
    length: int = 0


def dialogues_of(config: RegenerateConfig, template: ChatTemplate, limit: int
                 ) -> tuple[list[Dialogue], list[Reject]]:
    """Every row that can be answered, and rejects for the others."""
    good, rejects = [], []
    for row in read_conversations(config.prompts):
        if isinstance(row, Reject):
            rejects.append(row)
            continue
        try:
            good.append(dialogue_of(row, config, template, limit))
        except RowFault as fault:
            rejects.append(Reject(row.line, row.id, str(fault)))
    return good, rejects


def dialogue_of(row: Conversation, config: RegenerateConfig, template: ChatTemplate, limit: int) -> Dialogue:
    roles = [m["role"] for m in row.messages]
    if "tool" in roles or any(m.get("tool_calls") for m in row.messages):
        raise RowFault("tool calls: their results belong to the old answers, so they cannot be regenerated")
    messages = list(row.messages[:-1] if roles[-1] == "assistant" else row.messages)
    template.render(messages, row.tools, prompt=True)
    if row.order_fault:
        raise RowFault(row.order_fault)
    groups: list[list[dict[str, Any]]] = [[]]
    for message in messages:
        if message["role"] == "assistant" and config.turns == "all":
            groups.append([])
        else:
            groups[-1].append(message)
    dialogue = Dialogue(row.line, row.id, row.tools, groups[0], groups[1:])
    length = len(template.encode(template.render(messages, row.tools, prompt=True)))
    dialogue.length = length + config.max_new_tokens * len(groups)
    if limit and dialogue.length > limit:
        raise RowFault(f"{length} tokens of prompt and {len(groups)} answers of {config.max_new_tokens} do not fit "
                       f"the target's {limit} positions")
    return dialogue
