"""What an engine has left behind: processes that still live although it has ended."""

from __future__ import annotations

import time

import psutil


def engines(marker: str) -> list[psutil.Process]:
    """Living processes whose engine reports into a folder below `marker`."""
    found = []
    for process in psutil.process_iter():
        try:
            folder = process.environ().get("EYAS_STATUS_DIR", "")
            if folder.startswith(marker) and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except psutil.Error:
            continue
    return found


def orphans(marker: str) -> list[psutil.Process]:
    """Those that still live after 10 s; they are ended."""
    deadline = time.monotonic() + 10
    while engines(marker) and time.monotonic() < deadline:
        time.sleep(0.05)
    left = engines(marker)
    for process in left:
        process.kill()
    return left
