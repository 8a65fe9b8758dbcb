"""Reads conversations: JSONL, one a line, as OpenAI `messages` or ShareGPT `conversations`.

Every line becomes a Conversation or a Reject with its number and reason; no line ends the run and none vanishes.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas_contract import CorruptFile, EyasError, InvalidInput

ROLES = {"system": "system", "user": "user", "assistant": "assistant", "tool": "tool",
         "human": "user", "gpt": "assistant"}
TURN = re.compile(r"#turn-\d+$")  # what is added to a row's id where it becomes several samples
DEEPEST = 400  # lists and objects within one another: well within any stack, so that no two processes differ
TOO_DEEP = f"lists and objects nested more than {DEEPEST} deep"


@dataclass(frozen=True)
class Conversation:
    """One well-formed row.

    Attributes:
        line: 1-based line number.
        id: the row's own id, or `line-<number>`.
        messages: `role` and `content` (text), further keys as given; `tool_calls` as objects with object arguments.
        tools: the row's tool descriptions.
        order_fault: why the order of turns makes no conversation; empty where it does. Kept apart from rejection
            because a template that refuses the row has the better reason.
    """

    line: int
    id: str
    messages: tuple[dict[str, Any], ...]
    tools: tuple[Any, ...] | None = None
    order_fault: str = ""


@dataclass(frozen=True)
class Reject:
    """A row left out: its line, its id where known, and why."""

    line: int
    id: str
    reason: str


class RowFault(Exception):  # noqa: N818 - a reason, turned into a Reject by whoever knows the line
    """Why a row cannot be used."""


def read_conversations(path: Path, first: int = 1) -> Iterator[Conversation | Reject]:
    """The rows of a file from line `first` on, in order; of those before, only the ids are looked at.

    Raises:
        InvalidInput: the file cannot be opened.
    """
    seen: dict[str, int] = {}
    split: dict[str, int] = {}  # ids of which one with TURN was seen: a row's samples must not be named as another's
    try:
        source = path.open("rb")
    except OSError as error:
        raise InvalidInput(str(path), error.strerror or str(error), "a JSONL file of conversations",
                           "Check the path.") from error
    with source:
        for line, raw in enumerate(source, 1):
            row_id = ""
            try:
                row = _object(raw)
                row_id = _row_id(row, line)
                _require_writable(row, raw, whole=line >= first)
                if row_id in seen:
                    raise RowFault(f"id already used on line {seen[row_id]}")
                whole = TURN.sub("", row_id)
                if (other := (split if whole == row_id else seen).get(whole)) is not None:
                    raise RowFault(f"id that cannot be told from those of line {other}'s samples")
                seen[row_id] = line
                if whole != row_id:
                    split.setdefault(whole, line)
                if line >= first:
                    yield _conversation(row, row_id, line)
            except RowFault as fault:
                if line >= first:
                    yield Reject(line, row_id, str(fault))


def file_sha256(path: Path) -> str:
    """SHA-256 of a file's bytes. Raises InvalidInput where it cannot be read."""
    try:
        with path.open("rb") as source:
            return hashlib.file_digest(source, "sha256").hexdigest()
    except OSError as error:
        raise InvalidInput(str(path), error.strerror or str(error), "a JSONL file of conversations",
                           "Check the path.") from error


def count_lines(path: Path) -> int:
    """Number of lines of a file."""
    with path.open("rb") as source:
        return sum(1 for _ in source)


def order_fault(roles: list[str]) -> str:
    """Why turns of these roles are no conversation; empty where they are."""
    turns = [role for role in roles if role != "system"]
    if "system" in roles[1:]:
        return "a system message that is not the first"
    if not turns:
        return "no turn but the system message"
    if turns[0] != "user":
        return f"the first turn is {turns[0]}, not user"
    for before, after in itertools.pairwise(turns):
        if before == after == "assistant":
            return "an assistant turn follows an assistant turn"
        if after == "tool" and before == "user":
            return "a tool turn follows a user turn"
    return ""


def read_rejects(path: Path) -> list[Reject]:
    """The rejects of a file that we wrote, none where there is no file. Raises CorruptFile where it is another's."""
    if not path.is_file():
        return []
    with path.open("rb") as source:
        try:
            return [Reject(**json.loads(line)) for line in source]
        except (ValueError, TypeError) as error:
            raise CorruptFile(str(path), f"no list of rejects ({error})", "one reject a line, by eyas-extract",
                              "Restore the file, or remove it: its reasons are lost, and nothing else.") from error


def by_reason(rejects: Sequence[Reject]) -> Counter[str]:
    """Why rows were left out, numbers as N, and how often."""
    return Counter(re.sub(r"\d+", "N", reject.reason)[:160] for reject in rejects)


def none_left(data: Path, verb: str, rejects: Sequence[Reject], wanted: str, remedy: str) -> EyasError:
    """The error of a file of which every row was left out."""
    listed = "; ".join(f"{count} x {reason}" for reason, count in by_reason(rejects).most_common(5)) or "an empty file"
    return EyasError(str(data), f"0 of {len(rejects)} rows can be {verb}: {listed}", f"{wanted}, by eyas-extract",
                     remedy)


def _object(raw: bytes) -> dict[str, Any]:
    if not raw.strip():
        raise RowFault("empty line")
    try:
        row = json.loads(raw.decode("utf-8"), parse_constant=_no_constant)
    except UnicodeDecodeError as error:
        raise RowFault(f"not UTF-8 (byte {error.start})") from error
    except RecursionError as error:
        raise RowFault(TOO_DEEP) from error
    except ValueError as error:
        raise RowFault(f"not JSON ({error})") from error
    if not isinstance(row, dict):
        raise RowFault(f"a JSON {type(row).__name__}, not an object")
    return row


def _require_writable(row: dict[str, Any], raw: bytes, *, whole: bool) -> None:
    """The row can be handed on and written again; half a surrogate pair cannot, nor what is nested too deeply.

    Args:
        whole: whether more of the row than its id will be used.
    """
    if raw.count(b"[") + raw.count(b"{") > DEEPEST:
        _require_shallow(row)
    if not whole and b"\\ud" not in raw.lower():
        return
    try:
        json.dumps(row, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise RowFault("text with half a surrogate pair") from error


def _require_shallow(value: Any) -> None:
    level, depth = [value], 0
    while level:
        if depth > DEEPEST:
            raise RowFault(TOO_DEEP)
        level = [inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer)
                 if isinstance(inner, dict | list)]
        depth += 1


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is not JSON")


def _row_id(row: dict[str, Any], line: int) -> str:
    value = row.get("id")
    if value is None:
        return f"line-{line}"
    if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
        raise RowFault(f"id is {type(value).__name__} {value!r:.40}, not text or a whole number")
    return str(value)


def _conversation(row: dict[str, Any], row_id: str, line: int) -> Conversation:
    keys = [key for key in ("messages", "conversations") if key in row]
    if len(keys) != 1:
        raise RowFault("both messages and conversations" if keys else "neither messages nor conversations")
    turns = row[keys[0]]
    if not isinstance(turns, list):
        raise RowFault(f"{keys[0]} is {type(turns).__name__}, not a list")
    if not turns:
        raise RowFault("empty conversation")
    messages = tuple(_message(turn, f"{keys[0]}[{i}]") for i, turn in enumerate(turns))
    tools = _parsed(row.get("tools"), "tools")
    if tools is not None and not isinstance(tools, list):
        raise RowFault(f"tools is {type(tools).__name__}, not a list")
    return Conversation(line, row_id, messages, tuple(tools) if tools else None,
                        order_fault([m["role"] for m in messages]))


def _message(turn: Any, where: str) -> dict[str, Any]:
    if not isinstance(turn, dict):
        raise RowFault(f"{where} is {type(turn).__name__}, not an object")
    message = dict(turn)
    role = message.pop("role", None) if "role" in turn else message.pop("from", None)
    content = message.pop("content", None) if "content" in turn else message.pop("value", None)
    if not isinstance(role, str) or role not in ROLES:
        raise RowFault(f"{where} has unknown role {role!r:.60}")
    calls = _tool_calls(message.pop("tool_calls", None), where)
    if calls:
        message["tool_calls"] = calls
    return {"role": ROLES[role], "content": _text(content, where, optional=bool(calls)), **message}


def _text(content: Any, where: str, *, optional: bool) -> str:
    """The content's text; a list is accepted where all its parts are text."""
    if isinstance(content, str):
        return content
    if content is None and optional:
        return ""
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") != "text" or not isinstance(part.get("text"), str):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise RowFault(f"{where} holds non-text content ({kind!r:.40})")
        return "".join(part["text"] for part in content)
    raise RowFault(f"{where} has content of type {type(content).__name__}, not text")


def _tool_calls(value: Any, where: str) -> list[dict[str, Any]]:
    """Tool calls in one form, whatever the row's: a list of objects whose arguments are objects."""
    calls = _parsed(value, f"{where}.tool_calls")
    if calls is None:
        return []
    if not isinstance(calls, list) or not all(isinstance(c, dict) for c in calls):
        raise RowFault(f"{where}.tool_calls is not a list of objects")
    result = []
    for call in calls:
        function = call.get("function", call)
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise RowFault(f"{where}.tool_calls holds a call without a function name")
        arguments = _parsed(function.get("arguments", {}), f"{where}: arguments of {function['name']!r:.40}")
        if not isinstance(arguments, dict):
            raise RowFault(f"{where}: arguments of {function['name']!r:.40} are not an object")
        function = {**function, "arguments": arguments}
        result.append({**call, "function": function} if "function" in call else function)
    return result


def _parsed(value: Any, what: str) -> Any:
    """A value that some writers store as JSON text."""
    if not isinstance(value, str):
        return value
    try:
        parsed = json.loads(value)
    except RecursionError as error:
        raise RowFault(TOO_DEEP) from error
    except ValueError as error:
        raise RowFault(f"{what}: text that is not JSON") from error
    _require_shallow([parsed])
    return parsed
