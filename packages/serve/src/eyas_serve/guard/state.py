"""This process's rank, as the guard knows it, and its way to the launcher."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas_contract import EyasError
from eyas_serve.handshake import STATUS_DIR, RankStatus
from eyas_serve.plugin import SWITCH

INTERVAL = 0.5  # seconds between writes while bytes are counted
MODES = {"report": "report", "off": "off"}  # anything else enforces


@dataclass
class Guard:
    """The guard of one process. `status` is that of its rank once the scheduler starts.

    Attributes:
        mode: `enforce` ends an engine that cannot work, `report` says so and goes on, `off` checks nothing.
        target, draft: the folders being served; None without a draft of a class that is guarded.
        worker: SGLang's draft worker, once the draft is ready.
    """

    status: RankStatus = field(default_factory=lambda: RankStatus(f"process-{os.getpid()}", os.getpid()))
    written: float = 0.0
    mode: str = field(default_factory=lambda: MODES.get(os.environ.get(SWITCH, ""), "enforce"))
    target: Path = Path()
    draft: Path | None = None
    worker: Any = None

    def enter(self, phase: str, total: int = 0) -> None:
        """Begin a phase."""
        self.status.phase, self.status.done, self.status.total = phase, 0, total
        self.publish()

    def advance(self, count: int) -> None:
        """Count bytes; the launcher hears of it now and then."""
        self.status.done += count
        if time.monotonic() - self.written > INTERVAL:
            self.publish()

    def verified(self, check: str) -> None:
        """Note a check that passed."""
        if check not in self.status.checks:
            self.status.checks.append(check)
        self.publish()

    def refuse(self, error: EyasError) -> None:
        """Tell the launcher; raises the error, which ends the engine, unless the guard only reports."""
        if self.mode == "report":
            if str(error) not in self.status.remarks:
                self.status.remarks.append(str(error))
                logging.getLogger("eyas").error("guard, report only: %s", error)
                self.publish()
            return
        raise self.told(error)

    def told(self, error: EyasError) -> EyasError:
        """Tell the launcher of an error that ends the engine in every mode; returns it for the caller to raise."""
        self.status.error = str(error)
        self.publish()
        return error

    def publish(self) -> None:
        """Write the handshake file, where a launcher asked for one."""
        folder = os.environ.get(STATUS_DIR)
        if folder:
            self.status.write(Path(folder))
        self.written = time.monotonic()


GUARD = Guard()
