"""Prompt files -> token ids, with the target's own tokenizer and chat template."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from eyas_contract import InvalidInput
from eyas_serve.renderer import Renderer

ROLES = {"human": "user", "gpt": "assistant"}  # ShareGPT's names
Turns = Literal["last", "live"]
Messages = tuple[dict[str, str], ...]


@dataclass(frozen=True)
class Prompt:
    """One question, ready for the engine.

    Attributes:
        later: of a conversation that goes on, what is said after each further answer.
        messages, renderer: what it goes on from.
    """

    id: str
    input_ids: tuple[int, ...]
    data_set: str = ""
    later: tuple[Messages, ...] = ()
    messages: Messages = ()
    renderer: Renderer | None = field(default=None, repr=False, compare=False)

    @property
    def ids(self) -> list[str]:
        """Its own and those of the questions that will follow."""
        name, _, number = self.id.rpartition("/")
        return [self.id, *(f"{name}/{int(number) + i}" for i in range(1, len(self.later) + 1))]

    def follow(self, output_ids: Sequence[int]) -> Prompt | None:
        """The conversation's next question, after this answer; None at its end.

        Raises:
            InvalidInput: the chat template refuses it.
        """
        if not self.later or self.renderer is None:
            return None
        answer = {"role": "assistant", "content": self.renderer.decode(output_ids)}
        messages = (*self.messages, answer, *self.later[0])
        try:
            rendered = self.renderer.encode(list(messages))
        except InvalidInput as error:
            raise InvalidInput(f"conversation {self.id}", error.found,
                               "a conversation that the template renders, by --turns live",
                               "Remove it, or ask only last turns.") from error
        return Prompt(self.ids[1], rendered, self.data_set, self.later[1:], messages, self.renderer)


def load_prompts(path: Path, target: Path, limit: int | None = None, turns: Turns = "last") -> list[Prompt]:
    """Render every conversation up to its last user turn; `live` up to its first, the others to follow.

    Raises:
        InvalidInput: unreadable file or tokenizer, or rows that cannot be asked (all named with their line).
    """
    return _load(path, Renderer(target), limit, turns)


def load_data_sets(paths: Sequence[Path], target: Path, limit: int | None = None, turns: Turns = "last"
                   ) -> list[Prompt]:
    """Every file's prompts, `limit` of each, under data-set names and ids that no two files share.

    Where files share an id, as they do where rows are numbered, each id gets its data set's name in front.

    Raises:
        InvalidInput: a file given twice, or whatever `load_prompts` refuses.
    """
    names, renderer = data_set_names(paths), Renderer(target)
    files = [_load(path, renderer, limit, turns) for path in paths]
    holders = Counter(name for prompts in files for name in {prompt.id for prompt in prompts})
    shared = max(holders.values(), default=0) > 1
    return [replace(prompt, data_set=name, id=f"{name}/{prompt.id}" if shared else prompt.id)
            for name, prompts in zip(names, files, strict=True) for prompt in prompts]


def data_set_names(paths: Sequence[Path]) -> list[str]:
    """The files' stems, with as many of their folders before as tell them apart; at last the whole path.

    Never `all`: that is a report's row over all data sets.

    Raises:
        InvalidInput: a file given twice.
    """
    # Not resolved: a file behind a symbolic link is known by the link's name.
    absolute = [Path(os.path.normpath(path.absolute())) for path in paths]
    twice = [str(path) for path, count in Counter(absolute).items() if count > 1]
    if twice:
        raise InvalidInput(", ".join(twice), "given more than once", "each file of prompts once, for its numbers go "
                           "under its name", "Leave out the repetition.")
    parts = [(*path.parent.parts[1:], path.stem) for path in absolute]
    return [next(("/".join(own[-depth:]) for depth in range(1, len(own) + 1)
                  if own[-depth:] != ("all",) and [other[-depth:] for other in parts].count(own[-depth:]) == 1),
                 str(path)) for path, own in zip(absolute, parts, strict=True)]


def _load(path: Path, renderer: Renderer, limit: int | None, turns: Turns) -> list[Prompt]:
    try:
        # Not splitlines: it also splits at U+2028, U+0085 and others that a JSON string may hold as they are.
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(str(path), f"unreadable ({error})", "JSONL with one conversation a line",
                           "Check the path.") from error
    prompts, faults = list[Prompt](), list[str]()
    for number, line in enumerate(lines, 1):
        if limit is not None and len(prompts) >= limit:
            break
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            name = str(row.get("id", number)) if isinstance(row, dict) else str(number)
            messages = _messages(row)
            if turns == "last":
                prompts.append(Prompt(name, renderer.encode(messages), path.stem))
            else:
                first, *later = _questions(messages)
                prompts.append(Prompt(f"{name}/1", renderer.encode(list(first)), path.stem, tuple(later), first,
                                      renderer))
        except ValueError as error:
            faults.append(f"line {number}: {error.found if isinstance(error, InvalidInput) else error}")
    if faults or not prompts:
        raise InvalidInput(str(path), "; ".join(faults[:20]) or "no prompt", "conversations with a user turn, as "
                           "`messages` or `conversations`", "Correct or remove these lines.")
    return prompts


def _messages(row: Any) -> list[dict[str, str]]:
    """The turns up to the last one of the user, in OpenAI's form."""
    turns = row.get("messages", row.get("conversations")) if isinstance(row, dict) else None
    if not isinstance(turns, list):
        raise ValueError("neither `messages` nor `conversations`")
    messages = []
    for turn in turns:
        role = turn.get("role", turn.get("from")) if isinstance(turn, dict) else None
        content = turn.get("content", turn.get("value")) if isinstance(turn, dict) else None
        if not isinstance(role, str) or not isinstance(content, str):
            raise ValueError("a turn without a role or text")
        content.encode()  # scraped texts hold halves of a character; of these tokenizers' own complaint tells nothing
        messages.append({"role": ROLES.get(role, role), "content": content})
    while messages and messages[-1]["role"] != "user":
        messages.pop()
    if not messages:
        raise ValueError("no user turn")
    return messages


def _questions(messages: list[dict[str, str]]) -> list[Messages]:
    """What is said before each answer; the file's own answers are left out."""
    parts: list[list[dict[str, str]]] = [[]]
    for message in messages:
        if message["role"] not in ("system", "user", "assistant"):
            raise ValueError(f"a turn of role {message['role']!r}, which depends on the file's own answers")
        if message["role"] != "assistant":
            parts[-1].append(message)
        elif parts[-1]:
            parts.append([])
    return [tuple(part) for part in parts if part]
