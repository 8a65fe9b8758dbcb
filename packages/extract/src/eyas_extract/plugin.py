"""Entry point of the capture plug-in of SGLang (group `sglang.srt.plugins`): on where `EYAS_CAPTURE` is set.

SGLang calls `activate` in its launcher and in every rank, and only logs what goes wrong in it. So the capturing rank
proves itself by a status file, and what cannot work ends the process instead of being logged away.
"""

from __future__ import annotations

import multiprocessing
import os

from eyas_extract.protocol import VARIABLE


def activate() -> None:
    """Register the hooks in a rank of an engine that is to capture."""
    if not os.environ.get(VARIABLE) or multiprocessing.parent_process() is None:
        return
    from eyas_contract import EyasError
    from eyas_extract.inside.install import install

    try:
        install()
    except EyasError as error:  # an Exception would be logged and forgotten by the caller
        raise SystemExit(f"eyas capture: {error}") from error
