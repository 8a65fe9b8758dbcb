"""What is settled before the engine is started: the draft's verdict, a free port, the cores at hand."""

from __future__ import annotations

import os
import socket

from eyas_contract import EngineFailure, InvalidInput
from eyas_contract.engines import ServerFlags, check, render, verdict
from eyas_serve.config import ServeConfig
from eyas_serve.flags import engine_arguments


def check_draft(config: ServeConfig, sglang: str) -> list[str]:
    """Run the preflight for the flags that will be given; returns its remarks, one line each.

    Raises:
        InvalidInput: the draft cannot work with this target in this SGLang; every finding is in the text.
    """
    if config.draft is None or not config.preflight:
        return []
    flags = ServerFlags.from_argv(engine_arguments(config, config.port))
    findings = check(config.draft, config.target, "sglang", sglang, flags=flags, tp=config.tp)
    if verdict(findings) == "fail":
        raise InvalidInput(str(config.draft), f"a draft that cannot work:\n{render(findings)}\n",
                           f"a draft that SGLang {sglang} serves for {config.target}",
                           "Mend what the findings name, or start with --no-preflight to see it fail.")
    return [f"{f.severity} {f.code}: {f.where}: {f.found}; wanted: {f.wanted}" for f in findings
            if f.severity == "warning"]


def choose_port(host: str, port: int) -> int:
    """The port itself where it is free, or a free one for 0.

    Raises:
        EngineFailure: the port is taken.
    """
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise EngineFailure(f"{host}:{port}", f"cannot be bound ({error.strerror})", "a free port, by the server",
                                "Stop what listens there, or give --port 0.") from error
        return int(probe.getsockname()[1])


def cores() -> list[int]:
    """The CPU cores that this process may use."""
    return sorted(os.sched_getaffinity(0))
