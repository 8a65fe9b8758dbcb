"""A child process tree: started in its own session, ended whole, and never outliving its parent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from eyas_contract.keeper import session_members
from eyas_serve import log_writer


class Child:
    """A running command whose output goes to a file. A keeper process ends it should this process be killed.

    Args:
        command: words.
        environment: its whole environment.
        log: file that takes its output, whole (`log_writer`).
        rotate: bytes at which the file is put aside under a number.
        hide: words that must not stand in the log.
    """

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path, rotate: int = 1 << 28,
                 hide: Sequence[str] = ()) -> None:
        self.keeper = subprocess.Popen([sys.executable, "-m", "eyas_contract.keeper"], stdin=subprocess.PIPE,
                                       stdout=subprocess.DEVNULL, start_new_session=True)
        assert self.keeper.stdin is not None
        try:
            self.writer = subprocess.Popen([sys.executable, "-m", log_writer.__name__, str(log), str(rotate)],
                                           stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True,
                                           env={**os.environ, log_writer.HIDE: "\n".join(hide)})
            assert self.writer.stdin is not None
            with self.writer.stdin as sink:
                self.process = subprocess.Popen(list(command), env=dict(environment), stdin=subprocess.DEVNULL,
                                                stdout=sink, stderr=subprocess.STDOUT, start_new_session=True)
            self.keeper.stdin.write(f"{self.process.pid}\n".encode())
            self.keeper.stdin.flush()
        except BaseException:
            self.keeper.stdin.close()
            self.keeper.wait()
            if hasattr(self, "process"):  # begun, while the keeper knows nothing of it: no one else would end it
                self.process.kill()
                self.process.wait()
            raise
        self.pid = self.process.pid

    def exit_code(self) -> int | None:
        """Exit code, negative for a signal, or None while it runs."""
        return self.process.poll()

    def members(self) -> list[psutil.Process]:
        """Every living process of the child's session, orphans included, and every descendant that left it."""
        found: dict[int, psutil.Process] = {}
        for pid in session_members(self.pid):
            try:
                found[pid] = psutil.Process(pid)
                found |= {process.pid: process for process in found[pid].children(recursive=True)}
            except psutil.Error:
                continue
        return [process for process in found.values() if _alive(process)]

    def strangers(self, port: int) -> list[int]:
        """Processes that listen on a port, where none of these is ours; empty where that cannot be seen."""
        try:
            seen = psutil.net_connections("tcp")
        except (psutil.Error, OSError):
            return []
        holders = {connection.pid for connection in seen
                   if connection.status == psutil.CONN_LISTEN and connection.laddr.port == port}
        ours = {process.pid for process in self.members()}
        return [] if None in holders or holders & ours else sorted(holders)

    def stop(self, grace: float = 5.0) -> None:
        """End the whole tree: SIGTERM, up to `grace` seconds, then SIGKILL until nothing is left."""
        known = {process.pid: process for process in self.members()}
        if grace > 0 and self.exit_code() is None:
            self.process.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + grace
            while time.monotonic() < deadline and (self.exit_code() is None or self.members()):
                time.sleep(0.05)
        for _ in range(50):
            known |= {process.pid: process for process in self.members()}
            left = [process for process in known.values() if _alive(process)]
            if not left and self.exit_code() is not None:
                break
            for process in left:
                _kill(process)
            time.sleep(0.1)
        assert self.keeper.stdin is not None
        self.keeper.stdin.close()
        self.keeper.wait()
        self.drain()

    def drain(self, seconds: float = 10.0) -> None:
        """Wait until the log holds all that the ended engine wrote; a process that kept the pipe is not waited for."""
        try:
            self.writer.wait(seconds)
        except subprocess.TimeoutExpired:
            self.writer.kill()
            self.writer.wait()


def _alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return False


def _kill(process: psutil.Process) -> None:
    try:
        process.kill()
    except psutil.Error:
        return
