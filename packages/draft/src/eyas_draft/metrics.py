"""`metrics.jsonl`: one line per optimiser step and one per measurement, none lost or doubled by a resume."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from eyas_contract import CorruptFile
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
        kept = [row for row in read_rows(path) if row["step"] <= step] if step and path.is_file() else []
        write_text_atomic(path, "".join(json.dumps(row) + "\n" for row in kept))
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


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's metrics up to the last whole one: a kill may have left half a line.

    Raises:
        CorruptFile: a line that is no record.
    """
    rows: list[dict[str, Any]] = []
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], start=1):
        try:
            rows.append(_record(line))
        except (ValueError, RecursionError) as error:
            raise CorruptFile(f"{path}, line {number}", f"no record ({error})", "one JSON object a line, by eyas-draft",
                              "Remove the line.") from error
    return rows


def _record(line: bytes) -> dict[str, Any]:
    """One line's; ValueError where it is none."""
    row = json.loads(line.decode("utf-8"))
    if not isinstance(row, dict) or type(row.get("step")) is not int:
        raise ValueError("no step")
    return row
