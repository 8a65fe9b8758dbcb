"""Entry point of the SGLang plug-in (group `sglang.srt.plugins`): turns the guard on in processes that eyas started.

SGLang calls `activate` in its launcher and in every rank, and only logs what goes wrong in it. So the guard proves
itself by its handshake files, and a version it does not know ends the process instead of being logged away.
"""

from __future__ import annotations

import multiprocessing
import os

from eyas_serve.handshake import STATUS_DIR

ATTENTION_SWITCH = "EYAS_ATTENTION"  # 1: the engine was started with eyas as an attention backend
SWITCH = "EYAS_GUARD"  # 1 or enforce, report, off; with any of them the probe works


def activate() -> None:
    """Install the hooks where eyas-serve launched this engine, or the environment has EYAS_GUARD."""
    if os.environ.get(ATTENTION_SWITCH) == "1" and multiprocessing.parent_process() is not None:
        from eyas_serve.engine.attention import register

        register()
    if not os.environ.get(STATUS_DIR) and os.environ.get(SWITCH, "0") in ("", "0"):
        return
    from eyas_contract import EyasError
    from eyas_serve.guard.install import install

    try:
        install()
    except EyasError as error:  # an Exception would be logged and forgotten by the caller
        raise SystemExit(f"eyas guard: {error}") from error
