"""The tokenizer's chat template, and nothing else: messages -> text and token ids, refusals as reasons."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from datetime import date, datetime
from pathlib import Path
from typing import Any

import jinja2
from transformers import AutoTokenizer

from eyas_contract import InvalidInput
from eyas_contract.contract import read_json
from eyas_contract.fingerprint import chat_template
from eyas_extract.conversations import RowFault

# What a template's expressions raise on values it did not expect, beside jinja's own errors.
TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError, RecursionError)
DAY, SETTINGS = "template_date", ".config.json"  # where a date is kept: its key, and the file beside answers
CLOCK = "strftime_now"  # the function by which a template prints the date; transformers offers no other


class ChatTemplate:
    """One target's tokenizer and template.

    Args:
        folder: the target's Hugging Face folder.
        stop_ids: tokens that end an answer (of `generation_config.json`); the tokenizer's own is added.

    Raises:
        InvalidInput: no tokenizer or no chat template in the folder.

    Attributes:
        day: the date (ISO) that the template prints where it prints one; empty for that of each rendering.
    """

    def __init__(self, folder: Path, stop_ids: Sequence[int] = ()) -> None:
        wanted = "a tokenizer with a chat template, by eyas-extract"
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        except Exception as error:  # tokenizers raises nothing more definite
            raise InvalidInput(str(folder), f"no usable tokenizer ({error})", wanted,
                               "Put the target's tokenizer files into the folder.") from error
        text = self.tokenizer.chat_template or chat_template(folder)
        if not isinstance(text, str) or not text:
            raise InvalidInput(str(folder), "no chat template", wanted,
                               "Put the target's chat_template.jinja into the folder.")
        self.day = ""
        own = self.tokenizer.eos_token_id
        self.stop_ids = frozenset([*stop_ids, *([own] if own is not None else [])])

    @property
    def marks_generation(self) -> bool:
        """Whether the template marks the assistant's text itself, by `{% generation %}` blocks."""
        return re.search(r"\{%-?\s*generation\s*-?%\}", self.tokenizer.chat_template) is not None

    def render(self, messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None, *,
               prompt: bool = False) -> str:
        """Text of the messages; with `prompt`, up to where the target starts to answer.

        Raises:
            RowFault: the template refuses the messages, with its own message.
        """
        try:
            return str(self.tokenizer.apply_chat_template(
                [_shown(m) for m in messages], tools=list(tools) if tools else None, tokenize=False,
                add_generation_prompt=prompt, **self._clock()))
        except TEMPLATE_ERRORS as error:
            raise RowFault(f"the chat template refuses the row: {error}") from error

    def marked(self, messages: Sequence[dict[str, Any]], tools: Sequence[Any] | None) -> tuple[list[int], list[int]]:
        """Token ids and the mask that the template's `{% generation %}` blocks give.

        Raises:
            RowFault: the template refuses the messages, or the tokenizer cannot map its blocks to tokens.
        """
        try:
            result = self.tokenizer.apply_chat_template(
                [_shown(m) for m in messages], tools=list(tools) if tools else None, return_dict=True,
                return_assistant_tokens_mask=True, **self._clock())
        except (*TEMPLATE_ERRORS, NotImplementedError) as error:
            raise RowFault(f"the chat template refuses the row: {error}") from error
        return list(result["input_ids"]), list(result["assistant_masks"])

    def _clock(self) -> dict[str, Any]:
        return {CLOCK: datetime.fromisoformat(self.day).strftime} if self.day else {}

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text; the template has already put in what begins a sequence."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens, special ones included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def first_day(folder: Path, data: Path | None = None) -> str:
    """The date (ISO) that a target's template is to print from now on; empty where it prints none.

    Args:
        folder: the target's.
        data: answers; those by `regenerate` keep the date that their prompts had.
    """
    if CLOCK not in chat_template(folder):
        return ""
    handed_on = ""
    if data is not None:
        settings = data.with_name(data.name + SETTINGS)
        with contextlib.suppress(InvalidInput, AttributeError):
            handed_on = read_json(settings, "the settings of regenerate").get(DAY, "")
    with contextlib.suppress(TypeError, ValueError):
        return date.fromisoformat(handed_on).isoformat()
    return date.today().isoformat()


def _shown(message: dict[str, Any]) -> dict[str, Any]:
    """What the template sees of a message: not our own record of how it was made."""
    return {key: value for key, value in message.items() if key not in ("output_ids", "finish_reason")}
