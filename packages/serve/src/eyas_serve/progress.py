"""What the ranks are doing, as lines for a person, and whether anything moves at all."""

from __future__ import annotations

import time
from collections import defaultdict
from pathlib import Path

from eyas_contract.commands import duration
from eyas_serve.handshake import READY, RankStatus, read_all
from eyas_serve.log import LogReader


class Progress:
    """Polled by the launcher while the engine starts.

    Args:
        status_dir: where the ranks write.
        log: the engine's output.
        every: seconds between two lines of one and the same phase.
    """

    def __init__(self, status_dir: Path, log: Path, every: float = 5.0) -> None:
        self.status_dir, self.log, self.every = status_dir, LogReader(log), every
        self.start = self.moved = self.spoke = time.monotonic()
        self.ranks: dict[str, RankStatus] = {}
        self._said: tuple[str, ...] = ()

    def poll(self) -> list[str]:
        """Look again; returns the lines worth saying now."""
        ranks, now = read_all(self.status_dir), time.monotonic()
        if self.log.poll() or ranks != self.ranks:
            self.moved = now
        self.ranks = ranks
        phases = tuple(self._phases())
        if phases == self._said and (now - self.spoke < self.every or not self._loading()):
            return []
        self._said, self.spoke = phases, now
        return [f"[{duration(now - self.start)}] {line}" for line in self.describe()]

    def still_for(self) -> float:
        """Seconds since anything was written, by a rank or to the log."""
        return time.monotonic() - self.moved

    def error(self) -> str:
        """The first rank's complaint, or nothing."""
        return next((status.error for status in self.ranks.values() if status.error), "")

    def remarks(self) -> list[str]:
        """What a guard that only reports has found, each once."""
        return list(dict.fromkeys(remark for status in self.ranks.values() for remark in status.remarks))

    def all_ready(self) -> bool:
        """Whether as many ranks as the engine has are ready."""
        ready = [status for status in self.ranks.values() if status.phase == READY]
        return bool(ready) and len(ready) >= ready[0].expected

    def describe(self) -> list[str]:
        """One line per phase that ranks are in; before any has reported, what the log says."""
        groups: dict[str, list[RankStatus]] = defaultdict(list)
        for status in self.ranks.values():
            groups[status.phase].append(status)
        if not groups:
            return [self.log.phase or "engine starting"]
        return [f"{_names(group)}: {phase}{_share(group)}" for phase, group in groups.items()]

    def _phases(self) -> list[str]:
        return sorted({status.phase for status in self.ranks.values()}) or [self.log.phase]

    def _loading(self) -> bool:
        return any(status.total for status in self.ranks.values())


def _names(group: list[RankStatus]) -> str:
    if len(group) <= 2:
        return ", ".join(status.rank for status in group)
    return f"{len(group)} ranks"


def _share(group: list[RankStatus]) -> str:
    shares = [min(100 * status.done // status.total, 100) for status in group if status.total]
    if not shares:
        return ""
    total = max(status.total for status in group) / 2**20
    span = f"{min(shares)}" if min(shares) == max(shares) else f"{min(shares)} to {max(shares)}"
    return f" {span} % of {total:,.0f} MiB"
