"""What can be known before the engine starts: is the draft whole and for this target, is the port free?"""

from __future__ import annotations

import os

from eyas_contract import EngineFailure, InvalidInput
from eyas_contract.contract import FILE_NAME
from eyas_contract.engines import ServerFlags, check, render, verdict
from eyas_contract.ports import free_port, try_port
from eyas_serve.config import ServeConfig
from eyas_serve.flags import engine_arguments


def check_draft(config: ServeConfig, version: str) -> list[str]:
    """Check the draft against the target for this SGLang and these flags; returns remarks for the user.

    Raises:
        InvalidInput: it cannot work; every finding with its consequence and remedy.
    """
    if config.draft is None or not config.preflight:
        return []
    flags = ServerFlags.from_argv(engine_arguments(config, 1))
    findings = [finding for finding in check(config.draft, config.target, "sglang", version, flags=flags)
                if finding.severity != "note"]
    if verdict(findings) == "fail":
        raise InvalidInput(str(config.draft), f"it will not work with {config.target}:\n{render(findings)}\n",
                           f"a draft that SGLang {version} reads whole and for this target", "Correct the above, or "
                           "see what the engine itself says with --no-preflight; its guard stays on.")
    remarks = [render(findings)] if findings else []
    if not (config.draft / FILE_NAME).is_file():
        remarks.append(f"warning: {config.draft} has no {FILE_NAME}: whether it was trained on this target, and on "
                       "these layers, cannot be checked; names, shapes and vocabulary were")
    return remarks


def network_remarks(config: ServeConfig, key: str) -> list[str]:
    """A warning where others than this machine's users can reach the server without a key."""
    if key or config.host in ("localhost", "::1") or config.host.startswith("127."):
        return []
    return [f"warning: listens on {config.host} without an API key: whoever reaches this port may use the server; see "
            "--api-key-file"]


def choose_port(host: str, port: int) -> int:
    """The port, if nothing listens there; for 0 a free one.

    Raises:
        EngineFailure: none is free, or it is taken, perhaps by a server left over that would be measured in place of
            the new one.
    """
    if not port:
        return free_port(host)
    try:
        return try_port(host, port)
    except OSError as error:
        raise EngineFailure(f"{host}:{port}", f"cannot be listened on ({error.strerror})",
                            "a free port, by eyas-serve launch",
                            "Stop what runs there (a server left over?) or choose another --port.") from error


def cores() -> list[int]:
    """The processor cores that this process may use."""
    return sorted(os.sched_getaffinity(0))
