"""Ports for servers that bind them later."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from eyas_contract import EngineFailure, ports


def test_a_port_that_no_outgoing_connection_is_given() -> None:
    first = int(ports.EPHEMERAL.read_text().split()[0])
    found = {ports.free_port() for _ in range(20)}
    assert len(found) > 10
    assert all(ports.LOWEST <= port < first for port in found)


def test_a_taken_port_is_passed_over(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports.free_port()))
        taken.listen()
        drawn = iter([taken.getsockname()[1], free := ports.free_port()])
        monkeypatch.setattr(ports.random.SystemRandom, "randrange", lambda self, low, high: next(drawn))
        assert ports.free_port() == free


def test_the_system_chooses_where_it_keeps_nothing_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ports, "EPHEMERAL", tmp_path / "missing")
    assert ports.free_port() > 1023


def test_an_address_of_another_machine_is_named() -> None:
    with pytest.raises(EngineFailure, match=r"203\.0\.113\.1: no port can be listened on"):
        ports.free_port("203.0.113.1")
