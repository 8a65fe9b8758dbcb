"""Entry point of the SGLang plug-in (group `sglang.srt.plugins`): turns the guard on in processes that eyas started.

SGLang calls `activate` in its launcher and in every rank, and only logs what goes wrong in it. So the guard proves
itself by its handshake files, and a version it does not know ends the process instead of being logged away.
"""

from __future__ import annotations

import os

from eyas_serve.handshake import STATUS_DIR

SWITCH = "EYAS_GUARD"  # 1 or enforce, report, off; with any of them the probe works


def activate() -> None:
    """Install the hooks where eyas-serve launched this engine, or the environment has EYAS_GUARD."""
    if not os.environ.get(STATUS_DIR) and os.environ.get(SWITCH, "0") in ("", "0"):
        return
    from eyas_contract import EyasError
    from eyas_serve.guard.install import install

    try:
        install()
    except EyasError as error:  # an Exception would be logged and forgotten by the caller
        raise SystemExit(f"eyas guard: {error}") from error
