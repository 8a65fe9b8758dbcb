"""The reader: both formats, every fault a reject with line and reason, and no hostile line ends it."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eyas_contract import CorruptFile, InvalidInput
from eyas_contract.canonical import dumps
from eyas_extract.conversations import DEEPEST, Conversation, Reject, read_conversations, read_rejects

Write = Callable[[list[Any]], Path]
USER, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}


def read(path: Path) -> list[Conversation | Reject]:
    return list(read_conversations(path))


def test_both_formats_give_the_same_messages(write: Write) -> None:
    rows = read(write([{"id": "a", "messages": [USER, ANSWER]},
                       {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Ho"}]},
                       {"id": 7, "conversations": [{"role": "user", "content": [{"type": "text", "text": "Hi"}]}]}]))
    assert all(isinstance(row, Conversation) for row in rows)
    assert rows[0].messages == rows[1].messages == (USER, ANSWER)  # type: ignore[union-attr]
    assert [row.id for row in rows] == ["a", "line-2", "7"]
    assert rows[2].messages == (USER,)  # type: ignore[union-attr]


@pytest.mark.parametrize(("row", "reason"), [
    (b'{"messages": [', "not JSON"), (b"\xff\xfe", "not UTF-8"), (b"", "empty line"), ([1], "not an object"),
    (b'{"messages": NaN}', "NaN is not JSON"), (b"[" * 100_000, "nested more than"),
    (b'{"messages": [{"role": "user", "content": "\\ud800"}]}', "surrogate"),
    ({"id": 1}, "neither messages nor conversations"), ({"messages": [], "conversations": []}, "both"),
    ({"messages": {}}, "not a list"), ({"messages": []}, "empty conversation"), ({"messages": ["Hi"]}, "not an object"),
    ({"messages": [{"role": "wizard", "content": "Hi"}]}, "unknown role 'wizard'"),
    ({"messages": [{"content": "Hi"}]}, "unknown role None"),
    ({"messages": [{"role": "user", "content": 3}]}, "content of type int"),
    ({"messages": [{"role": "user", "content": None}]}, "content of type NoneType"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "non-text content ('image_url')"),
    ({"id": [1], "messages": [USER]}, "id is list"), ({"id": "", "messages": [USER]}, "id is str"),
    ({"messages": [USER], "tools": "["}, "tools: text that is not JSON"),
    ({"messages": [USER, {**ANSWER, "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
     "arguments of 'f': text that is not JSON"),
])
def test_faults_are_rejected_with_line_and_reason(write: Write, row: Any, reason: str) -> None:
    good = {"messages": [USER, ANSWER]}
    first, bad, last = read(write([good, row, good]))
    assert isinstance(first, Conversation)
    assert isinstance(last, Conversation)
    assert isinstance(bad, Reject)
    assert bad.line == 2
    assert reason in bad.reason


def test_rows_nested_too_deeply_are_rejected_by_name(write: Write) -> None:
    def tools(depth: int) -> Any:
        value: Any = 1
        for _ in range(depth):
            value = [value]
        return value

    as_text = "[" * 950 + "]" * 950
    rows = read(write([{"id": str(n), "messages": [USER, ANSWER], "tools": each}
                       for n, each in enumerate((tools(DEEPEST - 1), tools(DEEPEST + 1), tools(900), as_text))]))
    assert isinstance(rows[0], Conversation)
    assert pickle.loads(pickle.dumps(rows[0])) == rows[0]  # as for another process
    reason = f"lists and objects nested more than {DEEPEST} deep"
    assert rows[1:] == [Reject(n + 1, str(n), reason) for n in (1, 2, 3)]


def test_line_separators_inside_text_end_no_line(write: Write, tmp_path: Path) -> None:
    text = "a\u2028b\u0085c\x0cd"
    raw = json.dumps({"messages": [{**USER, "content": text}]}, ensure_ascii=False).encode()
    rows = read(write([raw + b"\r", raw]))
    assert [row.line for row in rows] == [1, 2]
    assert all(isinstance(row, Conversation) and row.messages[0]["content"] == text for row in rows)
    path = tmp_path / "rejects.jsonl"
    assert read_rejects(path) == []
    rejects = [Reject(1, text, text), Reject(2, "", "b")]
    path.write_bytes("\r\n".join([json.dumps(vars(rejects[0]), ensure_ascii=False), dumps(rejects[1])]).encode())
    assert read_rejects(path) == rejects
    path.write_text('{"line": 1}\n')
    with pytest.raises(CorruptFile, match=r"rejects\.jsonl"):
        read_rejects(path)


@pytest.mark.parametrize(("roles", "fault"), [
    ("us", "a system message that is not the first"), ("s", "no turn but"), ("au", "the first turn is assistant"),
    ("uaa", "an assistant turn follows"), ("ut", "a tool turn follows a user turn"), ("suaua", ""), ("uat", ""),
    ("uua", ""),
])
def test_wrong_order_is_named(write: Write, roles: str, fault: str) -> None:
    names = {"u": "user", "a": "assistant", "s": "system", "t": "tool"}
    [row] = read(write([{"messages": [{"role": names[r], "content": "x"} for r in roles]}]))
    assert isinstance(row, Conversation)
    assert fault in row.order_fault
    assert bool(fault) == bool(row.order_fault)


def test_duplicate_ids_name_the_first(write: Write) -> None:
    row = {"id": "a", "messages": [USER]}
    assert read(write([row, row, {"id": "line-4", "messages": [USER]}, {"messages": [USER]}]))[1::2] == [
        Reject(2, "a", "id already used on line 1"), Reject(4, "line-4", "id already used on line 3")]


@pytest.mark.parametrize("ids", [("a", "a#turn-1"), ("a#turn-1", "a")])
def test_an_id_that_another_rows_sample_would_have_is_a_duplicate(write: Write, ids: tuple[str, str]) -> None:
    """Two samples of one id in a store are damage, and nothing could repair it."""
    turns = [{"role": "user", "content": "x"}]
    path = write([{"id": row_id, "messages": turns} for row_id in (*ids, "a#turn-x", "b#turn-1", "b#turn-3")])
    assert [(row.id, getattr(row, "reason", "")) for row in read_conversations(path)] == [
        (ids[0], ""), (ids[1], "id that cannot be told from those of line 1's samples"), ("a#turn-x", ""),
        ("b#turn-1", ""), ("b#turn-3", "")]
    [later] = [row for row in read_conversations(path, 2) if isinstance(row, Reject)]
    assert later.line == 2


@pytest.mark.parametrize("bad", [b'"\\ud83d"', b'"\\uD83D"', b'"x", "more": ' + b"[" * 500 + b"]" * 500],
                         ids=["lower", "upper", "deep"])
def test_rows_are_judged_alike_wherever_the_reading_begins(write: Write, bad: bytes) -> None:
    """A row that is left out claims no id; a run that goes on behind it must know."""
    good = {"id": "a", "messages": [USER]}
    path = write([b'{"id": "a", "messages": [{"role": "user", "content": ' + bad + b"}]}", good, good])
    rows = read(path)
    assert [type(row) for row in rows] == [Reject, Conversation, Reject]
    assert list(read_conversations(path, 2)) == rows[1:]
    assert list(read_conversations(path, 3)) == rows[2:]


def test_tool_calls_come_out_in_one_form(write: Write) -> None:
    call = {"id": "c", "function": {"name": "f", "arguments": {"town": "Oslo"}}}
    as_text = {"id": "c", "function": {"name": "f", "arguments": '{"town": "Oslo"}'}}
    rows = read(write([{"tools": [{"a": 1}], "messages": [USER, {**ANSWER, "tool_calls": [call]}]},
                       {"tools": '[{"a": 1}]', "messages": [USER, {**ANSWER, "tool_calls": [as_text]}]},
                       {"tools": [{"a": 1}], "messages": [USER, {**ANSWER, "tool_calls": json.dumps([call])}]}]))
    assert [row.messages[1]["tool_calls"] for row in rows] == [[call]] * 3  # type: ignore[union-attr]
    assert [row.tools for row in rows] == [({"a": 1},)] * 3  # type: ignore[union-attr]


def test_absent_file(tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="No such file"):
        read(tmp_path / "absent.jsonl")


JSON = st.recursive(st.none() | st.booleans() | st.integers() | st.text(max_size=8),
                    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3))
TURN = st.fixed_dictionaries({}, optional={
    "role": st.sampled_from(["user", "assistant", "gpt", 3]) | JSON, "content": JSON, "from": JSON, "value": JSON,
    "tool_calls": JSON, "reasoning_content": JSON})
ROW = st.fixed_dictionaries({}, optional={"id": JSON, "messages": st.lists(TURN | JSON, max_size=3) | JSON,
                                          "conversations": st.lists(TURN, max_size=3), "tools": JSON})


@given(lines=st.lists((ROW | JSON).map(lambda row: json.dumps(row).encode()) | st.binary(max_size=30), max_size=8))
def test_every_line_becomes_one_row(tmp_path_factory: pytest.TempPathFactory, lines: list[bytes]) -> None:
    path = tmp_path_factory.mktemp("hostile") / "rows.jsonl"
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    rows = read(path)
    assert [row.line for row in rows] == list(range(1, path.read_bytes().count(b"\n") + 1))
    for row in rows:
        if isinstance(row, Reject):
            assert row.reason
        else:
            assert row.messages
            assert all(isinstance(m["role"], str) and isinstance(m["content"], str) for m in row.messages)
    kept = [row.id for row in rows if isinstance(row, Conversation)]
    assert len(kept) == len(set(kept))
