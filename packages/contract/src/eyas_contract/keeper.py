"""Ends an engine whose launcher was killed: `python -m eyas_contract.keeper`, started by the launcher beside it.

It reads the engine's session id from its standard input and then waits there for the end of the launcher, which closes
the pipe however it dies. Then every process of that session is killed. Standard library only, to be up at once.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path


def session_members(session: int) -> list[int]:
    """Process ids of a session, zombies excluded."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[3]) == session and fields[0] not in "ZX":
            found.append(int(entry.name))
    return found


def kill_session(session: int) -> None:
    """SIGKILL every member until none is left, for up to ten seconds."""
    for _ in range(100):
        members = session_members(session)
        if not members:
            return
        for pid in members:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.1)


def main() -> None:
    """Wait for the launcher's end."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    line = sys.stdin.readline()
    sys.stdin.read()
    if line.strip():
        kill_session(int(line))


if __name__ == "__main__":
    main()
