"""Prompt files: what ends a line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eyas_contract import InvalidInput
from eyas_draft.prompts import read_prompts


class Letters:
    """A tokenizer: a token for every letter of the last turn."""

    def apply_chat_template(self, messages: list[dict[str, str]], **_: Any) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in messages[-1]["content"]]}


def row(text: str) -> str:
    return json.dumps({"messages": [{"role": "user", "content": text}]}, ensure_ascii=False)


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_lines_end_at_newlines_alone(tmp_path: Path, end: str) -> None:
    path = tmp_path / "prompts.jsonl"
    texts = ["one\u2028two", "three\u0085four\u2029", "plain"]
    path.write_bytes("".join(row(text) + end for text in texts).encode())
    assert read_prompts(path, Letters()) == [[ord(letter) for letter in text] for text in texts]
    path.write_bytes((row(texts[0]) + end + end + "no JSON" + end).encode())
    with pytest.raises(InvalidInput, match="line 3: not JSON"):
        read_prompts(path, Letters())


def test_another_encoding_is_told(tmp_path: Path) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes((row("one") + "\n" + row("caf\u00e9") + "\n").encode("latin-1"))
    with pytest.raises(InvalidInput, match=r"prompts\.jsonl: not UTF-8"):
        read_prompts(path, Letters())
