"""What every rank is doing, how fast and how much longer, and whether anything moves at all."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eyas_contract.commands import duration
from eyas_serve.failures import is_consequence
from eyas_serve.handshake import READY, RankStatus, read_all
from eyas_serve.log import LogReader, RankException
from eyas_serve.processes import running

SERVING = "serving"
WINDOW = 30.0  # seconds over which a rate is taken


@dataclass(frozen=True)
class Row:
    """One rank, for a view.

    Attributes:
        phase_seconds, still: in this phase, and since it last moved.
        done, total: bytes; `shards_done`, `shards`: files, by their sizes. All 0 outside of loading.
        rate: bytes/s; `eta`: seconds. None where not known.
        note: what the log says of the phase.
    """

    rank: str
    phase: str
    phase_seconds: float
    still: float
    done: int = 0
    total: int = 0
    shards_done: int = 0
    shards: int = 0
    rate: float | None = None
    eta: float | None = None
    note: str = ""

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {name: round(value, 2) if isinstance(value, float) else value for name, value in asdict(self).items()}


class Rank:
    """A rank over time."""

    def __init__(self, status: RankStatus, now: float) -> None:
        self.status, self.since, self.moved = status, now, now
        self.points = deque([(now, status.done)], maxlen=256)

    def update(self, status: RankStatus, now: float) -> None:
        """Take its newest status."""
        if status.phase != self.status.phase:
            self.since = now
            self.points.clear()
        if status != self.status or not self.points:
            self.moved = now
            self.points.append((now, status.done))
        self.status = status

    def rate(self, now: float) -> float | None:
        """Bytes/s over the last half minute."""
        recent = [point for point in self.points if now - point[0] <= WINDOW] or [self.points[-1]]
        if now - recent[0][0] < 0.5 or not self.status.total:
            return None
        return (self.status.done - recent[0][1]) / (now - recent[0][0])


class Progress:
    """Polled by the launcher while the engine starts.

    Args:
        status_dir: where the ranks write.
        log: the engine's output.
        every: seconds between two lines of one and the same phase.
        shards: `target` and `draft` -> sizes of the files of weights, in the order in which they are read.
    """

    def __init__(self, status_dir: Path, log: Path, every: float = 5.0,
                 shards: Mapping[str, Sequence[int]] | None = None) -> None:
        self.status_dir, self.log, self.every = status_dir, LogReader(log), every
        self.ends = {model: list(itertools.accumulate(sizes)) for model, sizes in (shards or {}).items()}
        self.start = self.moved = self.spoke = time.monotonic()
        self.ranks: dict[str, RankStatus] = {}
        self.histories: dict[str, Rank] = {}
        self.gone: list[str] = []
        self.earlier: int | None = None
        self._errors: dict[str, float] = {}
        self._said: tuple[str, ...] = ()

    def poll(self) -> list[str]:
        """Look again; returns the lines worth saying now."""
        ranks, now = read_all(self.status_dir), time.monotonic()
        if self.log.poll() or ranks != self.ranks:
            self.moved = now
        self.ranks = ranks
        for name, status in ranks.items():
            self.histories.setdefault(name, Rank(status, now)).update(status, now)
            if status.error and name not in self._errors:
                self._errors[name] = (self.status_dir / f"{name}.json").stat().st_mtime
            if name not in self.gone and not running(status.pid):
                self.gone.append(name)
        phases = tuple(self._phases())
        if phases == self._said and (now - self.spoke < self.every or not self._loading()):
            return []
        self._said, self.spoke = phases, now
        return [f"[{duration(now - self.start)}] {line}" for line in self.describe()]

    def still_for(self) -> float:
        """Seconds since a rank or the log last showed progress."""
        return time.monotonic() - self.moved

    def serves(self) -> None:
        """Proven: from now on the engine serves, and what its log complained of before did not matter."""
        while self.log.poll():
            pass
        self.earlier = len(self.log.exceptions)

    def exceptions(self) -> list[RankException]:
        """Those of the log that may have ended the engine. Once it serves, and has lost a rank, only a rank's own do:
        a request's failure is logged with its trace, too."""
        if self.earlier is None:
            return self.log.exceptions
        later = self.log.exceptions[self.earlier:]
        return [exception for exception in later if exception.ends] if self.gone else later

    def victim(self) -> str:
        """The rank that went first, or nothing: one that is gone without a word, as the others follow with one."""
        told = {exception.rank for exception in self.exceptions()}
        return next((name for name in self.gone if name not in told), self.gone[0] if self.gone else "")

    def error(self) -> str:
        """The first complaint of a rank that is not only about a lost peer, else the first of all, or nothing."""
        order = sorted(self._errors, key=lambda name: self._errors[name])
        texts = [self.ranks[name].error for name in order if name in self.ranks]
        return next((text for text in texts if not is_consequence(text)), texts[0] if texts else "")

    def remarks(self) -> list[str]:
        """What a guard that only reports has found, each once."""
        return list(dict.fromkeys(remark for status in self.ranks.values() for remark in status.remarks))

    def all_ready(self) -> bool:
        """Whether as many ranks as the engine has are ready."""
        ready = [status for status in self.ranks.values() if status.phase == READY]
        return bool(ready) and len(ready) >= ready[0].expected

    def phase(self) -> str:
        """Of the rank that is furthest behind: the one that moved last into its phase counts least."""
        if self.earlier is not None:
            return SERVING
        if not self.histories:
            return self.log.phase or "engine starting"
        behind = [rank for rank in self.histories.values() if rank.status.phase != READY]
        return min(behind, key=lambda rank: rank.since).status.phase if behind else "warm-up"

    def rows(self) -> list[Row]:
        """Every rank, in order."""
        now = time.monotonic()
        return [self._row(name, rank, now) for name, rank in sorted(self.histories.items())]

    def describe(self) -> list[str]:
        """One line per phase that ranks are in; before any has reported, what the log says."""
        if not self.histories:
            bar = self.log.bars.get("Loading")
            return [(self.log.phase or "engine starting") + (f", {bar[0]} of {bar[1]} shards" if bar else "")]
        groups: dict[str, list[Row]] = defaultdict(list)
        for row in self.rows():
            groups[row.phase].append(row)
        return [f"{_names(group)}: {phase}{_share(group)}" for phase, group in groups.items()]

    def _row(self, name: str, rank: Rank, now: float) -> Row:
        status, rate = rank.status, rank.rate(now)
        ends = self.ends.get("draft" if "draft" in status.phase else "target", []) if status.total else []
        left = status.total - status.done
        return Row(name, status.phase, now - rank.since, now - rank.moved, status.done, status.total,
                   sum(end <= status.done for end in ends), len(ends), rate,
                   left / rate if rate and left > 0 else None, self._note(status.phase))

    def _note(self, phase: str) -> str:
        if "graph" in phase and "Capturing" in self.log.bars:
            return "graph {} of {}".format(*self.log.bars["Capturing"])
        return self.log.cache if "KV" in phase else ""

    def _phases(self) -> list[str]:
        return sorted({status.phase for status in self.ranks.values()}) or [self.log.phase]

    def _loading(self) -> bool:
        return any(status.total for status in self.ranks.values())


def _names(group: list[Row]) -> str:
    return ", ".join(row.rank for row in group) if len(group) <= 2 else f"{len(group)} ranks"


def _share(group: list[Row]) -> str:
    rows = [row for row in group if row.total]
    if not rows:
        note = next((row.note for row in group if row.note), "")
        return f" ({note})" if note else ""
    shares = [min(100 * row.done // row.total, 100) for row in rows]
    span = f"{min(shares)}" if min(shares) == max(shares) else f"{min(shares)} to {max(shares)}"
    text = f" {span} % of {max(row.total for row in rows) / 2**20:,.0f} MiB"
    slowest = min(rows, key=lambda row: row.done)
    text += f", {slowest.shards_done} of {slowest.shards} shards" if slowest.shards else ""
    text += f", {slowest.rate / 2**20:,.0f} MiB/s a rank" if slowest.rate is not None else ""
    return text + (f", ETA {duration(slowest.eta)}" if slowest.eta is not None else "")
