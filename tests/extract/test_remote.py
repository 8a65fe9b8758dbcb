"""Answers by an endpoint: what is sent and kept, what is asked again, where a broken run goes on."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from eyas_contract import ContractMismatch, EngineFailure, InvalidInput
from eyas_extract.config import RegenerateConfig
from eyas_extract.regenerate import Regenerated, regenerate
from eyas_extract.server import Server

Write = Callable[[list[Any]], Path]
Behaviour = Callable[[dict[str, Any]], tuple[int, Any]]


class Endpoint:
    """Answers chat completions as `behaviour` says; remembers bodies, keys, and how many were asked at a time."""

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.keys: list[str | None] = []
        self.behaviour: Behaviour = echo
        self.now = self.most = 0
        self.lock = threading.Lock()
        self.http = ThreadingHTTPServer(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}/v1"
        threading.Thread(target=self.http.serve_forever, daemon=True).start()


def _handler(endpoint: Endpoint) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            assert self.path in ("/v1/chat/completions", "/generate")
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with endpoint.lock:
                endpoint.bodies.append(body)
                endpoint.keys.append(self.headers.get("Authorization"))
                endpoint.now += 1
                endpoint.most = max(endpoint.most, endpoint.now)
            status, plain = endpoint.behaviour(body)
            with endpoint.lock:
                endpoint.now -= 1
            raw = plain if isinstance(plain, bytes) else json.dumps(plain).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *arguments: Any) -> None:
            pass

    return Handler


def said(text: str, **more: Any) -> tuple[int, Any]:
    return 200, {"choices": [{"message": {"role": "assistant", "content": text, **more}, "finish_reason": "stop"}],
                 "usage": {"completion_tokens": 3}}


def echo(body: dict[str, Any]) -> tuple[int, Any]:
    return said("to " + body["messages"][-1]["content"])


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[Endpoint]:
    monkeypatch.setattr("eyas_extract.remote.PAUSES", (0.01, 0.01))
    made = Endpoint()
    yield made
    made.http.shutdown()
    made.http.server_close()


def make(target: Path, prompts: Path, out: Path, endpoint: Endpoint, **more: Any) -> Regenerated:
    return regenerate(RegenerateConfig(target, prompts, out, engine="endpoint", endpoint=endpoint.url, model="m",
                                       max_new_tokens=20, **more))


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def ask(*texts: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text} for text in texts]}


def test_turns_order_and_settings(endpoint: Endpoint, tiny_target: Path, write: Write, tmp_path: Path,
                                  monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows stand in the input's order however they come back; every setting is sent and recorded."""
    barrier = threading.Barrier(4, timeout=20)

    def together(body: dict[str, Any]) -> tuple[int, Any]:
        if len(body["messages"]) == 1:
            barrier.wait()
        return echo(body)

    monkeypatch.setenv("KEY", "secret")
    endpoint.behaviour = together
    turns = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "old"},
                          {"role": "user", "content": "b"}]}
    prompts = write([turns, ask("c"), ask("d"), ask("e")])
    done = make(tiny_target, prompts, tmp_path / "out.jsonl", endpoint, temperature=0.5, top_p=0.9, top_k=4, seed=3,
                concurrency=4, api_key_variable="KEY")
    found = rows(tmp_path / "out.jsonl")
    assert [row["id"] for row in found] == ["line-1", "line-2", "line-3", "line-4"]
    assert [m["content"] for m in found[0]["messages"]] == ["a", "to a", "b", "to b"]
    assert done.new_tokens == 15
    assert endpoint.most == 4
    assert {key: endpoint.bodies[0][key] for key in ("model", "temperature", "top_p", "top_k", "max_tokens")} == {
        "model": "m", "temperature": 0.5, "top_p": 0.9, "top_k": 4, "max_tokens": 20}
    assert len({body["seed"] for body in endpoint.bodies}) == 5
    assert set(endpoint.keys) == {"Bearer secret"}
    second = next(body for body in endpoint.bodies if len(body["messages"]) == 3)
    assert second["messages"][1] == {"role": "assistant", "content": "to a"}
    config = json.loads((tmp_path / "out.jsonl.config.json").read_text())
    assert (config["engine"], config["model"], config["temperature"]) == ("endpoint", "m", 0.5)
    assert "secret" not in (tmp_path / "out.jsonl.config.json").read_text()


def test_reasoning_and_tool_calls_are_kept(endpoint: Endpoint, tiny_target: Path, write: Write, tmp_path: Path) -> None:
    """A call ends the conversation: nobody knows what the tool would say."""
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": '{"town": "Ulm"}'}}
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    endpoint.behaviour = lambda body: said(None, tool_calls=[call]) if body.get("tools") else said(  # type: ignore[arg-type]
        "six", reasoning_content="three and three")
    prompts = write([{**ask("3+3?")}, {**ask("and there?"), "tools": [tool]}])
    make(tiny_target, prompts, tmp_path / "out.jsonl", endpoint)
    first, second = rows(tmp_path / "out.jsonl")
    assert first["messages"][1] == {"role": "assistant", "content": "six", "finish_reason": "stop",
                                    "reasoning_content": "three and three"}
    assert second["messages"][1]["tool_calls"] == [call]
    assert second["tools"] == [tool]
    assert endpoint.bodies[0].get("tools") or endpoint.bodies[1].get("tools")


def test_busy_is_asked_again_and_refused_is_reported(endpoint: Endpoint, tiny_target: Path, write: Write,
                                                     tmp_path: Path) -> None:
    busy: set[str] = set()

    def behave(body: dict[str, Any]) -> tuple[int, Any]:
        text = body["messages"][-1]["content"]
        if text == "bad":
            return 400, {"error": "too long"}
        if text not in busy:
            busy.add(text)
            return 503, {}
        return echo(body)

    endpoint.behaviour = behave
    done = make(tiny_target, write([ask("a"), ask("bad"), ask("b")]), tmp_path / "out.jsonl", endpoint)
    assert [row["id"] for row in rows(tmp_path / "out.jsonl")] == ["line-1", "line-3"]
    [reject] = done.rejects
    assert reject.line == 2
    assert "the server refuses: HTTP 400" in reject.reason


def test_broken_run_goes_on(endpoint: Endpoint, tiny_target: Path, write: Write, tmp_path: Path) -> None:
    """The endpoint breaks down for good; what was answered is not asked for again."""
    prompts = write([ask(f"q{n}") for n in range(12)])
    endpoint.behaviour = lambda body: echo(body) if len(endpoint.bodies) <= 7 else (500, {})
    with pytest.raises(EngineFailure, match="HTTP 500"):
        make(tiny_target, prompts, tmp_path / "out.jsonl", endpoint, concurrency=1)
    assert not (tmp_path / "out.jsonl").exists()
    with pytest.raises(ContractMismatch, match="temperature"):
        make(tiny_target, prompts, tmp_path / "out.jsonl", endpoint, temperature=1.0)
    endpoint.bodies.clear()
    endpoint.behaviour = echo
    make(tiny_target, prompts, tmp_path / "out.jsonl", endpoint, concurrency=1)
    assert [body["messages"][0]["content"] for body in endpoint.bodies] == [f"q{n}" for n in range(7, 12)]
    assert [row["messages"][1]["content"] for row in rows(tmp_path / "out.jsonl")] == [f"to q{n}" for n in range(12)]


@pytest.mark.parametrize("status", [401, 404])
def test_a_wrong_key_or_place_is_no_rows_fault(endpoint: Endpoint, tiny_target: Path, write: Write, tmp_path: Path,
                                               status: int) -> None:
    """It would refuse every row, and leave a complete file without them."""
    prompts = write([ask(f"q{n}") for n in range(4)])
    endpoint.behaviour = lambda body: echo(body) if len(endpoint.bodies) <= 2 else (status, {"error": "key expired"})
    with pytest.raises(EngineFailure, match=f"HTTP {status}: .*key expired"):
        make(tiny_target, prompts, tmp_path / "out.jsonl", endpoint, concurrency=1)
    endpoint.behaviour = echo
    assert make(tiny_target, prompts, tmp_path / "out.jsonl", endpoint).rows == 4


NO_ANSWERS = [{"error": "upstream"}, {"choices": []}, [], {"choices": [{"text": "a"}]}, b"<html>", {"choices": [
    {"message": {"content": "cut"}, "finish_reason": "abort"}]}]


@pytest.mark.parametrize("nonsense", NO_ANSWERS, ids=map(str, range(len(NO_ANSWERS))))
def test_no_answer_is_asked_for_again(endpoint: Endpoint, tiny_target: Path, write: Write, tmp_path: Path,
                                      nonsense: Any) -> None:
    prompts = write([ask("a")])
    endpoint.behaviour = lambda body: (200, nonsense)
    with pytest.raises(EngineFailure, match=r"no JSON|an aborted answer, or none"):
        make(tiny_target, prompts, tmp_path / "out.jsonl", endpoint)
    endpoint.bodies.clear()
    endpoint.behaviour = lambda body: echo(body) if len(endpoint.bodies) > 1 else (200, nonsense)
    assert make(tiny_target, prompts, tmp_path / "out.jsonl", endpoint).rejects == []
    assert rows(tmp_path / "out.jsonl")[0]["messages"][1]["content"] == "to a"


def test_an_answer_that_sglang_aborted_is_asked_for_again(endpoint: Endpoint, tiny_target: Path, write: Write,
                                                          tmp_path: Path) -> None:
    """It comes with HTTP 200 and the tokens made so far, which are no answer of the target's."""
    endpoint.behaviour = lambda body: (200, {
        "output_ids": [5, 6], "meta_info": {"finish_reason": {"type": "length", "length": 2}}}) if len(
        endpoint.bodies) > 1 else (200, {"output_ids": [5], "meta_info": {"finish_reason": {
            "type": "abort", "message": "Abort in waiting queue"}}})
    regenerate(RegenerateConfig(tiny_target, write([ask("a")]), tmp_path / "out.jsonl", engine="sglang",
                                servers=(endpoint.url.removesuffix("/v1"),), max_new_tokens=2))
    assert rows(tmp_path / "out.jsonl")[0]["messages"][1]["output_ids"] == [5, 6]


def test_nobody_to_ask_is_refused(endpoint: Endpoint, tiny_target: Path, write: Write, tmp_path: Path) -> None:
    """Without one conversation at a time the output would be complete and empty."""
    with pytest.raises(InvalidInput, match="concurrency 0"):
        make(tiny_target, write([ask("a")]), tmp_path / "out.jsonl", endpoint, concurrency=0)


@pytest.mark.parametrize("url", ["http://[", "http://host:99999/v1", "http://host:port", "ftp://host", "host:1"])
def test_what_is_no_url_is_refused(url: str) -> None:
    with pytest.raises(InvalidInput, match="a URL such as"):
        Server(url)


def test_settings_that_do_not_belong_together(endpoint: Endpoint, tiny_target: Path, write: Write, tmp_path: Path
                                              ) -> None:
    with pytest.raises(InvalidInput, match="--endpoint and --model with --engine endpoint"):
        regenerate(RegenerateConfig(tiny_target, write([ask("a")]), tmp_path / "out", endpoint=endpoint.url))
