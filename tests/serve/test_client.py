"""What the client takes for an answer, against a scripted server."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from eyas_contract import EngineFailure, InvalidInput
from eyas_serve.client import Client

EVENTS: list[Any] = []
PAGE = [b""]


class Handler(BaseHTTPRequestHandler):
    """Streams EVENTS, or gives the last one whole; PAGE for whatever is looked at."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        data = b"".join(b"data: " + json.dumps(event).encode() + b"\n\n" for event in EVENTS) + b"data: [DONE]\n\n"
        self.answer(data if body.get("stream") else json.dumps(EVENTS[-1]).encode())

    def do_GET(self) -> None:
        self.answer(PAGE[0])

    def answer(self, data: bytes) -> None:
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def client() -> Iterator[Client]:
    """Of such a server."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    with closing(Client(f"http://127.0.0.1:{server.server_port}")) as client:
        yield client
    server.shutdown()
    server.server_close()


def event(ids: list[int], counted: int, finish: dict[str, str] | None) -> dict[str, Any]:
    return {"output_ids": ids, "meta_info": {"finish_reason": finish, "completion_tokens": counted,
                                             "spec_accept_histogram": [1, 1]}}


def test_a_whole_answer(client: Client) -> None:
    EVENTS[:] = [event([1], 1, None), event([1, 2, 3], 3, {"type": "stop"})]
    for answer in (client.stream([5], 8), client.generate([5], 8)):
        assert (answer.output_ids, answer.histogram, answer.finish) == ((1, 2, 3), (1, 1), "stop")


@pytest.mark.parametrize("ids", [[], [0]])
def test_an_aborted_request_is_no_answer(client: Client, ids: list[int]) -> None:
    EVENTS[:] = [event(ids, len(ids), {"type": "abort", "message": "Input length (316 tokens) exceeds"})]
    for ask in (client.stream, client.generate):
        with pytest.raises(EngineFailure, match=r"ended by abort: Input length \(316 tokens\) exceeds"):
            ask([5], 8)


def test_a_stream_of_increments_is_refused(client: Client) -> None:
    EVENTS[:] = [event([1, 2], 2, None), event([3], 3, {"type": "length"})]
    with pytest.raises(EngineFailure, match=r"1 of an answer's 3 tokens.*--incremental-streaming-output"):
        client.stream([5], 8)


@pytest.mark.parametrize("page", [b"<html>Welcome</html>", b"[1]", b"\xff"])
def test_another_kind_of_server_is_named(client: Client, page: bytes) -> None:
    PAGE[0], EVENTS[:] = page, [[1]]
    with pytest.raises(EngineFailure, match="no JSON object for /server_info"):
        client.info()
    assert client.room is None
    with pytest.raises(EngineFailure, match="no JSON object for /generate"):
        client.generate([5], 8)


def test_no_url_is_refused() -> None:
    with pytest.raises(InvalidInput, match="http://localhost:3000x"):
        Client("http://localhost:3000x")


def test_a_key_is_never_shown() -> None:
    assert Client("http://x", api_key="secretword\n")._http.headers["authorization"] == "Bearer secretword"
    for key in ("secret word", "secretw\u00f6rd"):
        with pytest.raises(InvalidInput, match="API key") as caught:
            Client("http://x", api_key=key)
        assert "secret" not in str(caught.value)
