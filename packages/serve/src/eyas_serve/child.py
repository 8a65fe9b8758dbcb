"""A child process tree: started in its own session, ended whole, and never outliving its parent."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None, use_errno=True)


def _die_with_parent() -> None:
    """Between fork and exec: the kernel kills this process when the thread that started it ends."""
    _LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class Child:
    """A running command whose output goes to a file.

    The kernel ties its life to the thread that creates it: create it in a thread that lives as long as the server.
    SGLang's ranks in turn end with the command itself.

    Args:
        command: words.
        environment: its whole environment.
        log: file that takes its output, whole.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        with log.open("wb") as sink:
            self.process = subprocess.Popen(
                list(command), env=dict(environment), stdin=subprocess.DEVNULL, stdout=sink, stderr=subprocess.STDOUT,
                start_new_session=True, preexec_fn=_die_with_parent)
        self.pid = self.process.pid

    def exit_code(self) -> int | None:
        """Exit code, negative for a signal, or None while it runs."""
        return self.process.poll()

    def members(self) -> list[psutil.Process]:
        """Every living process of the child's session and every descendant, orphans included."""
        found: dict[int, psutil.Process] = {}
        for process in psutil.process_iter():
            try:
                if os.getsid(process.pid) == self.pid and process.status() != psutil.STATUS_ZOMBIE:
                    found[process.pid] = process
            except (ProcessLookupError, PermissionError, psutil.Error):
                continue
        try:
            for process in psutil.Process(self.pid).children(recursive=True):
                found[process.pid] = process
        except psutil.Error:
            pass
        return list(found.values())

    def stop(self, grace: float = 5.0) -> None:
        """End the whole tree: SIGTERM, up to `grace` seconds, then SIGKILL until nothing is left."""
        members = self.members()
        if grace > 0 and self.exit_code() is None:
            _signal([process for process in members if process.pid == self.pid] or members, signal.SIGTERM)
            deadline = time.monotonic() + grace
            while time.monotonic() < deadline and (self.exit_code() is None or self.members()):
                time.sleep(0.05)
        for _ in range(50):
            left = {process.pid: process for process in [*members, *self.members()] if process.is_running()}
            left = {pid: process for pid, process in left.items() if _alive(process)}
            if not left and self.exit_code() is not None:
                return
            _signal(list(left.values()), signal.SIGKILL)
            self.exit_code()
            time.sleep(0.1)


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _signal(processes: Sequence[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        try:
            process.send_signal(number)
        except psutil.Error:
            continue
