"""Prompt files -> token ids, with the target's own tokenizer and chat template (tokenizers + jinja2)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer  # type: ignore[import-untyped]

from eyas_contract import InvalidInput

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
        except jinja2.TemplateError as error:
            raise InvalidInput(f"conversation {self.id}", f"the chat template says: {error}",
                               "a conversation that it renders, by --turns live",
                               "Remove it, or ask only last turns.") from error
        return Prompt(self.ids[1], rendered, self.data_set, self.later[1:], messages, self.renderer)


def load_prompts(path: Path, target: Path, limit: int | None = None, turns: Turns = "last") -> list[Prompt]:
    """Render every conversation up to its last user turn; `live` up to its first, the others to follow.

    Raises:
        InvalidInput: unreadable file or tokenizer, or rows that cannot be asked (all named with their line).
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(str(path), f"unreadable ({error})", "JSONL with one conversation a line",
                           "Check the path.") from error
    renderer, prompts, faults = Renderer(target), list[Prompt](), list[str]()
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
        except (ValueError, jinja2.TemplateError) as error:
            faults.append(f"line {number}: {error}")
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


class Renderer:
    """A model folder's chat template and tokenizer.

    Raises:
        InvalidInput: the folder lacks either.
    """

    def __init__(self, target: Path) -> None:
        wanted = "a target folder with tokenizer.json and a chat template"
        tokenizer, settings = target / "tokenizer.json", _read_settings(target / "tokenizer_config.json")
        if not tokenizer.is_file():
            raise InvalidInput(str(tokenizer), "no such file", wanted, "Save the tokenizer beside the model.")
        self.tokenizer = Tokenizer.from_file(str(tokenizer))
        file = target / "chat_template.jinja"
        source = file.read_text(encoding="utf-8") if file.is_file() else settings.get("chat_template")
        if not isinstance(source, str):
            raise InvalidInput(str(target), "no chat template", wanted, "Save the tokenizer with its template.")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                    extensions=["jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = lambda value, **options: json.dumps(value, ensure_ascii=False, **options)
        environment.globals["raise_exception"] = _raise_exception
        self.template = environment.from_string(source)
        self.special = {name: _text(settings.get(name)) for name in ("bos_token", "eos_token")}

    def encode(self, messages: list[dict[str, str]]) -> tuple[int, ...]:
        """Token ids of a conversation with the assistant's turn opened."""
        text = self.template.render(messages=messages, add_generation_prompt=True, **self.special)
        return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """An answer's text, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


def _read_settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        settings = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidInput(str(path), f"not JSON ({error})", "a tokenizer's settings", "Restore the file.") from error
    return settings if isinstance(settings, dict) else {}


def _text(token: Any) -> str:
    return str(token.get("content", "")) if isinstance(token, dict) else str(token or "")


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)
