"""The live table of a launch, on a terminal: a line a rank, redrawn; everything else scrolls above it."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from eyas_contract.commands import duration
from eyas_serve.events import Event

STILL = 10.0  # seconds after which a rank's silence is shown


class LiveView:
    """A listener that draws. `close` ends it, and leaves the last table standing."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self.live: Live | None = None

    def __call__(self, event: Event) -> None:
        """Draw an event."""
        if event.kind == "progress":
            if event.facts.get("ranks"):
                if self.live is None:
                    self.live = Live(console=self.console, auto_refresh=False)
                    self.live.start()
                self.live.update(table(event.facts), refresh=True)
            return
        if event.kind in ("ready", "failed", "stopped"):
            self.close()
        if event.text:
            self.console.print(Text(event.text))

    def close(self) -> None:
        """Stop redrawing."""
        if self.live is not None:
            self.live.stop()
            self.live = None


def table(facts: dict[str, Any]) -> Table:
    """The ranks of a progress event."""
    drawn = Table(title=f"{facts['phase']}, {duration(facts['seconds'])}", title_justify="left")
    for name in ("rank", "phase"):
        drawn.add_column(name, no_wrap=True)
    for name in ("weights", "shards", "rate", "ETA", "in phase"):
        drawn.add_column(name, justify="right", no_wrap=True)
    drawn.add_column("")
    for row in facts["ranks"]:
        total, rate, eta = row["total"], row["rate"], row["eta"]
        note = row["note"] or (f"still for {duration(row['still'])}" if row["still"] > STILL else "")
        drawn.add_row(row["rank"], row["phase"],
                      _amount(row["done"], total) if total else "",
                      f"{row['shards_done']}/{row['shards']}" if row["shards"] else "",
                      f"{rate / 2**20:,.0f} MiB/s" if rate is not None else "",
                      duration(eta) if eta is not None else "", duration(row["phase_seconds"]), note)
    return drawn


def _amount(done: int, total: int) -> str:
    return f"{done / 2**30:.1f}/{total / 2**30:.1f} GiB {100 * done // total:3} %"
