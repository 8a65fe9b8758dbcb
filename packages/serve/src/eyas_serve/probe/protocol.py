"""What probe client and engine agree on. Standard library only.

The client sends an ordinary `/generate` request whose id is `eyas-probe-` and 32 hex digits, under a radix key of its
own so that no cached prefix hides a row. The rank that prefills it writes `<id>.safetensors` into PROBE_DIR: the stages
of `eyas_contract.golden` at every position, plus what is listed below, and a JSON text in the metadata. The HTTP server
hands the file out once, at ROUTE/<id>, on the port and under the key of the API itself, so that a remote server is
probed as a local one. Requests with other ids cost one comparison of their id.
"""

from __future__ import annotations

import atexit
import os
import re
import secrets
import shutil
import tempfile
from pathlib import Path

from eyas_serve.handshake import STATUS_DIR

VERSION = 1
ROUTE = "/eyas/probe"
PROBE_DIR = "EYAS_PROBE_DIR"
PREFIX = "eyas-probe-"
METADATA = "eyas_probe"
MAX_TOKENS = 4096
KEPT = 8  # records not fetched; older ones are removed

# Beside the stages: INPUT_IDS and POSITIONS as the draft saw them [T]; STATES [T, W] as handed over, where they are not
# as wide as `fc` reads; HANDED_ON [T, H] the state for the next step; MAP [V] target id of each draft id; ROPE [T, D]
# cosines and sines; BEST_IDS (of the draft) and BEST_SCORES [T, n], or [1, n] for the last position alone.
INPUT_IDS, POSITIONS, STATES, HANDED_ON, MAP, ROPE = "input_ids", "positions", "states", "handed_on", "map", "rope"
BEST_IDS, BEST_SCORES = "best_ids", "best_scores"
NUM_BEST = 32


def new_id() -> str:
    """An id that marks a request for recording."""
    return PREFIX + secrets.token_hex(16)


def is_probe(rid: object) -> bool:
    """Whether a request is to be recorded; true only for ids that are safe as file names."""
    return isinstance(rid, str) and rid.startswith(PREFIX) and bool(re.fullmatch(r"[0-9a-f]{32}", rid[len(PREFIX):]))


def record_path(rid: str) -> Path | None:
    """Where the record of a marked request lies; None for other ids, or where no folder is agreed."""
    folder = os.environ.get(PROBE_DIR)
    return Path(folder) / f"{rid}.safetensors" if folder and is_probe(rid) else None


def prepare_folder() -> Path:
    """The folder for records, named in the environment for the processes to be spawned; readable by this user only."""
    if PROBE_DIR not in os.environ:
        status = os.environ.get(STATUS_DIR)
        folder = Path(status).parent / "probe" if status else Path(tempfile.mkdtemp(prefix="eyas-probe-"))
        if not status:
            atexit.register(shutil.rmtree, folder, ignore_errors=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        for old in folder.glob(f"{PREFIX}*"):
            old.unlink()
        os.environ[PROBE_DIR] = str(folder)
    return Path(os.environ[PROBE_DIR])
