"""What each rank of a starting engine says of itself: one small JSON file per rank. Standard library only.

Written by the guard inside SGLang, read by the launcher. The folder is named by the environment variable STATUS_DIR.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path

STATUS_DIR = "EYAS_STATUS_DIR"
READY = "ready"


@dataclass
class RankStatus:
    """One rank.

    Attributes:
        rank: e.g. `tp0-pp0-dp0`.
        pid: process id.
        phase: what it is doing; `ready` at the end.
        done, total: bytes of weights read, and of the checkpoint (0: not known or not loading).
        expected: how many ranks this node's engine has.
        checks: what the guard has verified: `hooks`, `weights`, `vocabulary`.
        error: the guard's message, where it refused.
        remarks: its messages, where it only reports.
    """

    rank: str
    pid: int
    phase: str = "starting"
    done: int = 0
    total: int = 0
    expected: int = 1
    checks: list[str] = field(default_factory=list)
    error: str = ""
    remarks: list[str] = field(default_factory=list)

    def write(self, folder: Path) -> None:
        """Replace this rank's file, atomically."""
        path = folder / f"{self.rank}.json"
        temporary = path.with_suffix(f".{os.getpid()}.tmp")
        temporary.write_text(json.dumps(asdict(self)), encoding="utf-8")
        temporary.replace(path)


def read_all(folder: Path) -> dict[str, RankStatus]:
    """Every rank's last word, by rank; files that are not a rank's status are passed over."""
    result: dict[str, RankStatus] = {}
    for path in sorted(folder.glob("*.json")):
        try:
            status = RankStatus(**json.loads(path.read_text(encoding="utf-8")))
        except (ValueError, TypeError, FileNotFoundError):
            continue
        result[status.rank] = status
    return result
