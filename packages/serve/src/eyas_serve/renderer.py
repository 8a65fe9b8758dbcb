"""A target's own chat template and tokenizer, without transformers (tokenizers + jinja2)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer  # type: ignore[import-untyped]

from eyas_contract import InvalidInput

WANTED = "a target folder with tokenizer.json and a chat template"


class Renderer:
    """A model folder's chat template and tokenizer, which give what Hugging Face transformers gives.

    Raises:
        InvalidInput: the folder lacks either, or one of them cannot be read.
    """

    def __init__(self, target: Path) -> None:
        tokenizer, settings = target / "tokenizer.json", _read_settings(target / "tokenizer_config.json")
        if not tokenizer.is_file():
            raise InvalidInput(str(tokenizer), "no such file", WANTED, "Save the tokenizer beside the model.")
        try:
            self.tokenizer = Tokenizer.from_file(str(tokenizer))
        except Exception as error:  # tokenizers raises nothing narrower
            raise InvalidInput(str(tokenizer), f"unreadable ({error})", WANTED, "Restore the file.") from error
        # The file may hold limits of somebody's training run, which transformers lifts as well.
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        self.where, source = _template(target, settings)
        with _blamed(self.where):
            self.template = _environment().from_string(source)
        if "added_tokens_decoder" not in settings:  # an older form keeps them in a file of their own
            settings |= _read_settings(target / "special_tokens_map.json")
        self.special = _special_tokens(settings)

    def encode(self, messages: list[dict[str, str]]) -> tuple[int, ...]:
        """Token ids of a conversation with the assistant's turn opened.

        Raises:
            InvalidInput: the chat template refuses it.
        """
        with _blamed(self.where):
            # Without tools and documents as None, `tools is not none` would be true: an undefined name is not none.
            text = self.template.render(messages=messages, tools=None, documents=None, add_generation_prompt=True,
                                        **self.special)
        return tuple(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """An answer's text, without special tokens."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=True))


class Generation(Extension):
    """`{% generation %}`, by which a template marks the assistant's text for training: rendered as it stands."""

    tags = {"generation"}  # noqa: RUF012 - the type is jinja2's

    def parse(self, parser: Parser) -> nodes.Node:
        """A call around the block, as in transformers, so that what is set within stays within."""
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_whole"), [], [], body).set_lineno(line)

    def _whole(self, caller: Callable[[], str]) -> str:
        return caller()


def _environment() -> ImmutableSandboxedEnvironment:
    """What transformers offers a chat template; one that finds less takes another branch in silence."""
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True,
                                                extensions=[Generation, "jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = _to_json
    environment.globals |= {"raise_exception": _raise_exception, "strftime_now": _strftime_now}
    return environment


@contextmanager
def _blamed(where: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # a template is a program that came with the model: whatever it raises is its fault
        says = str(error) if isinstance(error, jinja2.TemplateError) else f"{type(error).__name__}: {error}"
        if isinstance(error, jinja2.TemplateSyntaxError):
            says = f"{error.message} (line {error.lineno})"
        raise InvalidInput(where, f"the chat template says: {says}", "a template and messages that it renders, as "
                           "transformers does", "Correct the template, or leave out the conversation.") from error


def _template(target: Path, settings: dict[str, Any]) -> tuple[str, str]:
    """Where the chat template is, and its text."""
    file = target / "chat_template.jinja"
    if file.is_file():
        return str(file), _read(file)
    source = settings.get("chat_template")
    if isinstance(source, list):  # several by name; the others are for tools
        source = next((row.get("template") for row in source if isinstance(row, dict) and row.get("name") == "default"),
                      None)
    if not isinstance(source, str):
        raise InvalidInput(str(target), "no chat template", WANTED, "Save the tokenizer with its template.")
    return f"{target / 'tokenizer_config.json'}, chat_template", source


def _special_tokens(settings: dict[str, Any]) -> dict[str, str]:
    """`bos_token` and the like. One that is not set stays undefined, which a template can ask."""
    extra = settings.get("extra_special_tokens")
    named = {name: value for name, value in settings.items() if name.endswith("_token")}
    named |= extra if isinstance(extra, dict) else {}
    texts = {name: value.get("content") if isinstance(value, dict) else value for name, value in named.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}


def _read_settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    text = _read(path)
    try:
        settings = json.loads(text)
    except ValueError as error:
        raise InvalidInput(str(path), f"not JSON ({error})", "a tokenizer's settings", "Restore the file.") from error
    return settings if isinstance(settings, dict) else {}


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(str(path), f"unreadable ({error})", WANTED, "Restore the file.") from error


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.now().strftime(format)


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | str | None = None,
             separators: tuple[str, str] | None = None, sort_keys: bool = False) -> str:
    """Without jinja2's own escapes for HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
