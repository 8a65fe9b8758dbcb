"""`metrics.jsonl`: one line per optimiser step and one per measurement, none lost or doubled by a resume."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from eyas_contract.contract import write_text_atomic
from eyas_draft.trackers import Tracker, numbers

NAME = "metrics.jsonl"


class MetricsLog:
    """Appends lines; on opening, forgets those after the step from which the run continues.

    Args:
        run: run folder.
        step: optimiser steps already in the checkpoint that is continued (0: a new run).
        writes: whether anything is written; one of several processes does.
        trackers: told the same numbers, and closed with the log.
    """

    def __init__(self, run: Path, step: int, writes: bool = True, trackers: Sequence[Tracker] = ()) -> None:
        self._trackers = trackers
        self._sink: TextIO | None = None
        if not writes:
            return
        path = run / NAME
        kept = [line for line in _whole_lines(path) if json.loads(line)["step"] <= step] if step else []
        write_text_atomic(path, "".join(kept))
        self._sink = path.open("a", encoding="utf-8")

    def write(self, **values: Any) -> None:
        """Append one line and hand it to the system."""
        if self._sink:
            self._sink.write(json.dumps(values) + "\n")
            self._sink.flush()
        if self._trackers:
            flat = numbers(values)
            step = int(flat.pop("step"))
            for tracker in self._trackers:
                tracker.log(flat, step)

    def close(self) -> None:
        """Close the file."""
        if self._sink:
            self._sink.close()
        for tracker in self._trackers:
            tracker.close()


def _whole_lines(path: Path) -> list[str]:
    """Lines that end in a newline; a kill may have left half a line."""
    if not path.is_file():
        return []
    return [line for line in path.read_text(encoding="utf-8").splitlines(keepends=True) if line.endswith("\n")]
