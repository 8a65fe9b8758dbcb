"""The probe's client against servers that are none of ours, and its marks on requests."""

from __future__ import annotations

import http.server
import json
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from eyas_contract import EngineFailure, InvalidInput
from eyas_serve.client import Client
from eyas_serve.handshake import STATUS_DIR
from eyas_serve.probe import protocol
from eyas_serve.probe.session import probe_client

ANSWERS: dict[str, tuple[int, bytes]] = {}


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        status, content = ANSWERS.get(self.path, (404, b"not here"))
        self.send_response(status)
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        return


@pytest.fixture
def client() -> Iterator[Client]:
    ANSWERS.clear()
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    client = Client(f"http://127.0.0.1:{server.server_port}")
    yield client
    client.close()
    server.shutdown()
    server.server_close()
    thread.join()


@pytest.mark.parametrize(("answer", "words"), [
    ((404, b""), "eyas-serve launch"), ((200, b"<html>"), "EYAS_GUARD=report"), ((200, b"[1]"), "protocol 1"),
    ((200, b'{"protocol": 99}'), "protocol 1"), ((401, b""), "EYAS_API_KEY")])
def test_a_server_without_the_probe_is_told_what_to_do(client: Client, answer: tuple[int, bytes], words: str) -> None:
    ANSWERS[protocol.ROUTE] = answer
    with pytest.raises(EngineFailure, match=words):
        probe_client(client, None)


def test_a_draft_on_another_machine_must_be_named(client: Client) -> None:
    ANSWERS[protocol.ROUTE] = (200, b'{"protocol": 1}')
    ANSWERS["/server_info"] = (200, json.dumps({"speculative_draft_model_path": "/far/away"}).encode())
    with pytest.raises(InvalidInput, match=r"/far/away.*--draft"):
        probe_client(client, None)


def test_a_draft_without_a_record_says_how_to_make_one(client: Client, tmp_path: Path) -> None:
    ANSWERS[protocol.ROUTE] = (200, b'{"protocol": 1}')
    with pytest.raises(InvalidInput, match="eyas-draft golden"):
        probe_client(client, tmp_path)


def test_only_ids_that_are_safe_file_names_mark_a_request(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(protocol.PROBE_DIR, str(tmp_path))
    good = protocol.new_id()
    assert protocol.record_path(good) == tmp_path / f"{good}.safetensors"
    paths = ("", "abc", "eyas-probe-", "eyas-probe-../../etc/passwd", f"{good}/x")
    for bad in (*paths, good.upper(), f"{good}0", None, 3):
        assert not protocol.is_probe(bad)
        assert protocol.record_path(str(bad)) is None


def test_records_lie_in_a_folder_of_their_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "probe").mkdir()
    stale = tmp_path / "probe" / f"{protocol.new_id()}.safetensors"
    stale.write_text("old")
    monkeypatch.setenv(STATUS_DIR, str(tmp_path / "ranks"))
    monkeypatch.setenv(protocol.PROBE_DIR, "")
    monkeypatch.delenv(protocol.PROBE_DIR)
    assert protocol.prepare_folder() == tmp_path / "probe"
    assert not stale.exists()
    assert os.environ[protocol.PROBE_DIR] == str(tmp_path / "probe")
