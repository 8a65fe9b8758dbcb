"""What a launch has to say, for people and for machines: events with a text and with facts."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Event:
    """Something that happened.

    Attributes:
        kind: `start`, `progress`, `remark`, `stall`, `ready`, `verdict`, `failed` or `stopped`.
        text: for people; empty where there is nothing new to read.
        facts: for machines, plain JSON values.
        fleeting: only for a live view, neither printed nor kept.
        time: seconds since 1970.
    """

    kind: str
    text: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    fleeting: bool = False
    time: float = field(default_factory=time.time)

    def json(self) -> str:
        """One line."""
        return json.dumps({"event": self.kind, "time": round(self.time, 3), "text": self.text, **self.facts})


Listener = Callable[[Event], None]


def as_lines(say: Callable[[str], None]) -> Listener:
    """A listener that says each event's text."""
    def listen(event: Event) -> None:
        if event.text and not event.fleeting:
            say(event.text)

    return listen


def as_json(say: Callable[[str], None]) -> Listener:
    """A listener that says each event as a line of JSON."""
    def listen(event: Event) -> None:
        if not event.fleeting:
            say(event.json())

    return listen


def into_file(path: Path) -> Listener:
    """A listener that appends to a file of JSON lines. A full disk, perhaps of the engine's logs, loses them: it must
    not end a server, nor hide why one ended."""
    def write(line: str) -> None:
        with suppress(OSError), path.open("a", encoding="utf-8") as sink:
            sink.write(line + "\n")

    return as_json(write)
