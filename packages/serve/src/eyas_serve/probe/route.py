"""The probe's answers on SGLang's own HTTP server."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from eyas_serve.guard.state import GUARD
from eyas_serve.probe.protocol import ROUTE, VERSION, prepare_folder, record_path


def add_routes() -> None:
    """Add `GET /eyas/probe` (what is there) and `GET /eyas/probe/<id>` (a record, once). Call in SGLang's launcher."""
    from sglang.srt.entrypoints import http_server

    prepare_folder()
    http_server.app.add_api_route(ROUTE, describe, methods=["GET"])
    http_server.app.add_api_route(ROUTE + "/{rid}", fetch, methods=["GET"])


async def describe() -> Any:
    """Says that this server can be probed, and by which protocol."""
    return {"protocol": VERSION, "eyas_serve": version("eyas-serve"), "sglang": version("sglang"), "guard": GUARD.mode}


async def fetch(rid: str) -> Any:
    """One record, removed as it is handed out; 404 where there is none."""
    from fastapi import Response

    path = record_path(rid)
    if path is None or not path.is_file():
        return Response(status_code=404, content=f"no record of {rid[:64]}")
    content = path.read_bytes()
    path.unlink(missing_ok=True)
    return Response(content=content, media_type="application/octet-stream")
