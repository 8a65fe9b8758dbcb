"""`eyas-serve probe URL`."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import tyro

from eyas_serve.client import Client
from eyas_serve.probe.session import API_KEY, ProbeReport, probe_client


@dataclass(frozen=True)
class ProbeConfig:
    """Send the golden tokens to a running server and compare what its draft received, computed and proposed.

    The server must have been started by eyas-serve, or with EYAS_GUARD=report (or 1, or off) in its environment.
    """

    url: tyro.conf.Positional[str]
    """The server's address, e.g. http://127.0.0.1:30000. A key for it is read from EYAS_API_KEY."""
    draft: Path | None = None
    """Folder with golden.json; by default the draft's folder as the server names it, if it is on this machine."""


def probe(config: ProbeConfig) -> ProbeReport:
    """Probe a server.

    Raises:
        InvalidInput, CorruptFile: no golden record.
        EngineFailure: no server, one without the probe, or one that recorded nothing.
    """
    client = Client(config.url, api_key=os.environ.get(API_KEY, ""))
    try:
        return probe_client(client, config.draft)
    finally:
        client.close()
