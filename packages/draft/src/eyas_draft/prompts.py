"""Reads prompts: JSONL, one conversation a line, as OpenAI `messages` or ShareGPT `conversations`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from eyas_contract import InvalidInput

ROLES = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}


def read_prompts(path: Path, tokenizer: Any, limit: int = 0) -> list[list[int]]:
    """Token ids of each conversation up to its last user turn, ready for an answer.

    Args:
        path: JSONL file.
        tokenizer: with a chat template.
        limit: lines read; 0 for all.

    Raises:
        InvalidInput: no file, none in UTF-8, no lines, or lines that are not conversations (all named by number).
    """
    wanted = "one JSON object a line with `messages` or `conversations`"
    if not path.is_file():
        raise InvalidInput(str(path), "no such file", wanted, "Check the path.")
    prompts: list[list[int]] = []
    faults: list[str] = []
    for number, line in enumerate(_lines(path), start=1):
        if limit and len(prompts) == limit:
            break
        if not line.strip():
            continue
        messages = _messages(line)
        if isinstance(messages, str):
            faults.append(f"line {number}: {messages}")
            continue
        prompts.append(list(tokenizer.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]))
    if faults or not prompts:
        raise InvalidInput(str(path), "; ".join(faults[:20]) or "no conversations", wanted,
                           "Correct or remove the lines.")
    return prompts


def _lines(path: Path) -> list[str]:
    """By newlines alone, of whatever system: U+2028 and the like, where `splitlines` cuts too, stand inside strings."""
    try:
        return path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise InvalidInput(str(path), f"not UTF-8 ({error})", "JSON lines in UTF-8",
                           "Write the file in UTF-8.") from error


def _messages(line: str) -> list[dict[str, str]] | str:
    """Messages up to the last user turn, or what is wrong with the line."""
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        return f"not JSON ({error})"
    turns = (row.get("messages") or row.get("conversations")) if isinstance(row, dict) else None
    if not isinstance(turns, list):
        return "no messages"
    messages = []
    for turn in turns:
        role = ROLES.get(str(turn.get("role", turn.get("from"))).lower()) if isinstance(turn, dict) else None
        content = turn.get("content", turn.get("value")) if isinstance(turn, dict) else None
        if role is None or not isinstance(content, str):
            return f"a turn that is no text of a known role: {str(turn)[:60]}"
        messages.append({"role": role, "content": content})
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    return messages or "no user turn"
