"""eyas-serve: launches, guards and measures SGLang with an EAGLE-3 draft.

    from eyas_serve import ServeConfig, Server

    with Server(ServeConfig(target=Path("target"), draft=Path("draft"), device="cpu")) as server:
        print(server.client.generate([1, 2, 3], max_new_tokens=16).output_ids)

Names are imported on first use: SGLang's processes load the guard from here and need none of the launcher's packages.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from eyas_serve.bench import run_bench
    from eyas_serve.client import Client, Generation
    from eyas_serve.config import BenchConfig, ServeConfig
    from eyas_serve.server import Server

__version__ = "0.1.0"

__all__ = ["BenchConfig", "Client", "Generation", "ServeConfig", "Server", "run_bench"]

_HOMES = {"run_bench": "bench", "Client": "client", "Generation": "client", "BenchConfig": "config",
          "ServeConfig": "config", "Server": "server"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        message = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(message)
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)
