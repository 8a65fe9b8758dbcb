"""The tokenizer's chat template, and nothing else: messages -> text and token ids, refusals as reasons."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2
from transformers import AutoTokenizer

from eyas_contract import InvalidInput
from eyas_contract.fingerprint import chat_template
from eyas_extract.conversations import RowFault

# What a template's expressions raise on values it did not expect, beside jinja's own errors.
TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError)


class ChatTemplate:
    """One target's tokenizer and template.

    Args:
        folder: the target's Hugging Face folder.
        stop_ids: tokens that end an answer (of `generation_config.json`); the tokenizer's own is added.

    Raises:
        InvalidInput: no tokenizer or no chat template in the folder.
    """

    def __init__(self, folder: Path, stop_ids: Sequence[int] = ()) -> None:
        wanted = "a tokenizer with a chat template, by eyas-extract"
        try:
            self.tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        except (OSError, ValueError) as error:
            raise InvalidInput(str(folder), f"no usable tokenizer ({error})", wanted,
                               "Put the target's tokenizer files into the folder.") from error
        text = self.tokenizer.chat_template or chat_template(folder)
        if not isinstance(text, str) or not text:
            raise InvalidInput(str(folder), "no chat template", wanted,
                               "Put the target's chat_template.jinja into the folder.")
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
                add_generation_prompt=prompt))
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
                return_assistant_tokens_mask=True)
        except (*TEMPLATE_ERRORS, NotImplementedError) as error:
            raise RowFault(f"the chat template refuses the row: {error}") from error
        return list(result["input_ids"]), list(result["assistant_masks"])

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text; the template has already put in what begins a sequence."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    def decode(self, ids: Sequence[int]) -> str:
        """Text of tokens, special ones included."""
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False))


def _shown(message: dict[str, Any]) -> dict[str, Any]:
    """What the template sees of a message: not our own record of how it was made."""
    return {key: value for key, value in message.items() if key not in ("output_ids", "finish_reason")}
