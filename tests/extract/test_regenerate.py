"""Answers: one turn or many, what is recorded with them, resumes and refusals."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eyas_contract import ContractMismatch, EyasError, InvalidInput
from eyas_contract.outputs import lock
from eyas_extract.answers import Answers
from eyas_extract.cli import main
from eyas_extract.config import RegenerateConfig
from eyas_extract.conversations import Reject
from eyas_extract.regenerate import Regenerated, regenerate
from eyas_extract.template import ChatTemplate

Write = Callable[[list[Any]], Path]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def old(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def make(target: Path, prompts: Path, out: Path, **more: Any) -> Regenerated:
    return regenerate(RegenerateConfig(target, prompts, out, **{"max_new_tokens": 30, "batch_size": 3, **more}))


def test_turns_all_and_last(tiny_target: Path, write: Write, tmp_path: Path) -> None:
    chat = ChatTemplate(tiny_target)
    four = [user("count from one to three"), old("no"), user("copy red blue"), old("no")]
    prompts = write([{"id": "a", "messages": four}, {"id": "b", "messages": [user("count from two to four")]},
                     {"id": "c", "messages": [user("copy blue red"), old("no"), user("count from one to two")]}])
    for turns in ("all", "last"):
        make(tiny_target, prompts, tmp_path / turns, turns=turns)
    both, last = rows(tmp_path / "all"), rows(tmp_path / "last")
    assert [row["id"] for row in both] == ["a", "b", "c"]
    assert [[m["role"] for m in row["messages"]] for row in both] == [["user", "assistant"] * n for n in (2, 1, 2)]
    assert [m["content"] for m in both[0]["messages"][::2]] == ["count from one to three", "copy red blue"]
    for row in (*both, *last):
        for i, message in enumerate(row["messages"]):
            if "output_ids" in message:
                assert message["finish_reason"] in ("stop", "length")
                ended = message["finish_reason"] == "stop"
                assert (message["output_ids"][-1] == chat.tokenizer.eos_token_id) == ended
                assert chat.decode(message["output_ids"][:-1] if ended else message["output_ids"]) == message["content"]
            elif i % 2:
                assert message == old("no")
    assert "output_ids" in both[0]["messages"][1]
    assert "output_ids" not in last[0]["messages"][1]
    assert both[1] == last[1]


def test_a_later_turn_is_answered_on_the_new_history(tiny_target: Path, write: Write, tmp_path: Path) -> None:
    question = user("count from one to three")
    make(tiny_target, write([{"messages": [question, old("no"), user("copy red blue")]}]), tmp_path / "a")
    [first] = rows(tmp_path / "a")
    history = [{k: m[k] for k in ("role", "content")} for m in first["messages"][:3]]
    make(tiny_target, write([{"messages": history}]), tmp_path / "b", turns="last")
    [second] = rows(tmp_path / "b")
    assert second["messages"][3] == first["messages"][3]


def test_rejects_and_limits(tiny_target: Path, write: Write, tmp_path: Path) -> None:
    prompts = write([{"messages": [user("copy red")]}, b"{", {"messages": [old("a"), user("b")]},
                     {"messages": [user("a " * 500)]}, {"messages": [user("a"), {**old(""), "tool_calls": [
                         {"function": {"name": "f"}}]}, {"role": "tool", "content": "x"}]}])
    done = make(tiny_target, prompts, tmp_path / "o")
    assert done.rows == 1
    assert [r.line for r in done.rejects] == [2, 3, 4, 5]
    found = [Reject(**row) for row in rows(tmp_path / "o.rejects.jsonl")]
    assert found == done.rejects
    again = make(tiny_target, prompts, tmp_path / "o")
    assert (again.rows, again.rejects, again.new_tokens) == (1, found, 0)
    for reject, reason in zip(found, ("not JSON", "the first turn is assistant", "do not fit the target's 512",
                                      "tool calls"), strict=True):
        assert reason in reject.reason


def test_json(tiny_target: Path, write: Write, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    prompts = write([{"messages": [user("copy red")]}, b"{"])
    words = ["regenerate", "--target", str(tiny_target), "--prompts", str(prompts), "--out", str(tmp_path / "o"),
             "--max-new-tokens", "30"]
    for more in (["--json"], []):  # it is no setting that the answers depend on
        with pytest.raises(SystemExit) as ended:
            main(words + more)
        assert ended.value.code == 0
        said = capsys.readouterr().out
        if more:
            found = json.loads(said)
            assert (found["rows"], sum(found["rejected"].values())) == (1, 1)
            assert found["new_tokens"] > 0


def test_a_template_that_refuses_the_new_history(tiny_target: Path, write: Write, tmp_path: Path,
                                                 monkeypatch: pytest.MonkeyPatch) -> None:
    plain = ChatTemplate.render

    def render(self: ChatTemplate, messages: Any, tools: Any, *, prompt: bool = False) -> str:
        if any("output_ids" in m for m in messages) and len(messages) > 2:
            self.tokenizer.chat_template = "{{ raise_exception('not after that') }}"
        return plain(self, messages, tools, prompt=prompt)

    monkeypatch.setattr(ChatTemplate, "render", render)
    done = make(tiny_target, write([{"messages": [user("copy red"), old("a"), user("copy red")]},
                                    {"messages": [user("copy red")]}]), tmp_path / "o")
    assert done.rows == 1
    assert "not after that" in done.rejects[0].reason


def test_no_row_to_answer_is_an_error_and_holds_nobody_to_its_settings(tiny_target: Path, write: Write, tmp_path: Path
                                                                       ) -> None:
    prompts = write([{"messages": [user("copy red")]}] * 2)
    with pytest.raises(EyasError, match=r"0 of 2 rows can be answered: 2 x N tokens of prompt .*o\.rejects\.jsonl"):
        make(tiny_target, prompts, tmp_path / "o", max_new_tokens=512)
    assert len(rows(tmp_path / "o.rejects.jsonl")) == 2
    assert make(tiny_target, prompts, tmp_path / "o").rows == 2


def test_a_second_writer_is_refused_before_it_writes(tmp_path: Path) -> None:
    """Both may begin at once, and the second would say in the record that the answers are its own."""
    first = Answers(tmp_path / "o", {"seed": 1})
    with pytest.raises(InvalidInput, match=r"o\.lock: another process of eyas writes to it now"):
        Answers(tmp_path / "o", {"seed": 2})
    assert json.loads((tmp_path / "o.config.json").read_text()) == {"seed": 1}
    first.append([{"line": 1}])
    first.close()
    with pytest.raises(ContractMismatch, match="seed"):
        Answers(tmp_path / "o", {"seed": 2})
    Answers(tmp_path / "o", {"seed": 1}).close()


@pytest.mark.parametrize(("name", "found"), [("folder", "a folder"), ("file/o", "a folder cannot be made here"),
                                             ("closed/o", "a folder that cannot be written")])
def test_places_that_cannot_be_written_are_refused_at_once(tiny_target: Path, write: Write, tmp_path: Path, name: str,
                                                           found: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("")
    monkeypatch.setattr("eyas_extract.disk.os.access", lambda path, mode: path != tmp_path / "closed")
    with pytest.raises(InvalidInput, match=rf"{found}.*Give another "):
        make(tiny_target, write([{"messages": [user("copy red")]}]), tmp_path / name)


def test_two_writers_at_once_are_refused(tiny_target: Path, write: Write, tmp_path: Path) -> None:
    prompts = write([{"messages": [user("copy red")]}])
    make(tiny_target, prompts, tmp_path / "o")
    handle = lock(tmp_path / "o.lock")
    with pytest.raises(InvalidInput, match="another process of eyas"):
        make(tiny_target, prompts, tmp_path / "o")
    os.close(handle)
    make(tiny_target, prompts, tmp_path / "o")


def test_torn_and_foreign_partials(tiny_target: Path, write: Write, tmp_path: Path) -> None:
    prompts = write([{"messages": [user(f"copy red {w}")]} for w in ("blue", "green", "stone", "river", "cloud")])
    out, partial = tmp_path / "o", tmp_path / "o.partial"
    make(tiny_target, prompts, out)
    whole = out.read_bytes()
    assert make(tiny_target, prompts, out).new_tokens == 0
    make(tiny_target, prompts, tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == whole
    for torn in (b"", b"[", b'[{"line": 1}', b"\x00\x00\n"):
        out.unlink()
        partial.write_bytes(torn)
        make(tiny_target, prompts, out)
        assert out.read_bytes() == whole
        assert not partial.exists()


@pytest.mark.parametrize("damage", [b'[{"line": 3', b"\0\0\n" + b'[{"line": 3}]\n'], ids=["torn", "damaged"])
def test_whole_batches_are_taken_over_and_what_follows_is_cut_off(tmp_path: Path, damage: bytes) -> None:
    out, partial, batches = tmp_path / "o", tmp_path / "o.partial", [[{"line": 1}], [{"line": 2}], [{"line": 3}]]

    def begin(expected: int) -> Answers:
        answers = Answers(out, {})
        answers.close()
        assert answers.batches == batches[:expected]
        return answers

    first = begin(0)
    for batch in batches[:2]:
        first.append(batch)
    with partial.open("ab") as file:
        file.write(damage)
    begin(2).append(batches[2])
    begin(3)
    assert len(partial.read_bytes().splitlines()) == 3


def test_a_batch_is_synced_before_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers, synced = Answers(tmp_path / "o", {}), list[int]()

    def fsync(handle: int) -> None:
        synced.append(os.fstat(handle).st_size)
        assert not answers.batches

    monkeypatch.setattr(os, "fsync", fsync)
    answers.append([{"line": 1}])
    answers.close()
    assert synced == [(tmp_path / "o.partial").stat().st_size]


def test_other_settings_or_files_are_refused(tiny_target: Path, write: Write, tmp_path: Path) -> None:
    prompts, out = write([{"messages": [user("copy red")]}]), tmp_path / "o"
    make(tiny_target, prompts, out)
    with pytest.raises(ContractMismatch) as caught:
        make(tiny_target, prompts, out, max_new_tokens=3, temperature=1.0)
    assert [m.field for m in caught.value.mismatches] == ["max_new_tokens", "temperature"]
    (tmp_path / "other").write_text("mine\n")
    with pytest.raises(InvalidInput, match="without other"):
        make(tiny_target, prompts, tmp_path / "other")
    assert (tmp_path / "other").read_text() == "mine\n"
    for bad in ({"max_new_tokens": 0}, {"batch_size": 0}, {"kv_gib": 0.0}, {"top_p": 0.0}, {"device": "cuda"}):
        with pytest.raises(EyasError):
            make(tiny_target, prompts, tmp_path / "new", **bad)
    assert not (tmp_path / "new").exists()
