"""The growing output of `regenerate`: batches appended one after another, then the whole put in the input's order.

`<out>.config.json` says what it is made from. A batch counts once its last line is whole; what a kill left of one
is cut off, so an answer is neither lost after its batch was written nor ever there twice.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from eyas_contract import ContractMismatch, InvalidInput, Mismatch
from eyas_contract.contract import read_json, write_text_atomic
from eyas_contract.outputs import lock
from eyas_extract.disk import make_folder, room_for
from eyas_extract.template import DAY, SETTINGS

Row = dict[str, Any]


class Answers:
    """Output that is continued where it stopped.

    Args:
        out: the final file; `<out>.partial` grows beside it.
        settings: what every byte of it depends on.

    Raises:
        ContractMismatch: the file there was made with other settings (all differences named).
        InvalidInput: the file there is not one of ours, another process writes to it, or nothing can be written there.
    """

    def __init__(self, out: Path, settings: dict[str, Any]) -> None:
        self.out, self.partial = out, out.with_name(out.name + ".partial")
        self.config = out.with_name(out.name + SETTINGS)
        self.settings: dict[str, Any] = json.loads(json.dumps(settings))
        self.batches: list[list[Row]] = []
        if out.is_dir():
            raise InvalidInput(str(out), "a folder", "a JSONL file to write, by eyas-extract", "Give another --out.")
        make_folder(out.parent)
        with room_for(out):
            self.handle = _locked(out.with_name(out.name + ".lock"))
            try:
                self.complete = out.is_file()
                self._begin_or_continue()
            except BaseException:
                self.close()
                raise

    def close(self) -> None:
        """Let other writers in."""
        os.close(self.handle)

    def _begin_or_continue(self) -> None:
        if self.complete or self.partial.is_file():
            self._require_same_settings()
        else:
            write_text_atomic(self.config, json.dumps(self.settings, indent=1, sort_keys=True) + "\n")
        if not self.complete:
            self._read_partial()

    def _require_same_settings(self) -> None:
        if not self.config.is_file():
            raise InvalidInput(str(self.out), f"a file without {self.config.name} beside it",
                               "a new file, or one that regenerate wrote", "Give another --out.")
        old = read_json(self.config, "the settings of a file that regenerate wrote")
        if DAY in old and DAY in self.settings:
            self.settings[DAY] = old[DAY]
        elif DAY not in old:  # begun before dates were kept: goes on as it began
            self.settings.pop(DAY, None)
        differences = tuple(Mismatch(key, str(old.get(key)), str(self.settings.get(key)), str(self.config), "this run")
                            for key in sorted({*old, *self.settings}) if old.get(key) != self.settings.get(key))
        if differences:
            raise ContractMismatch(differences, "continuing would mix answers of two kinds in one file",
                                   "Give another --out, or run with the file's own settings.")

    def _read_partial(self) -> None:
        """Take over whole batches; cut off the rest."""
        if not self.partial.is_file():
            return
        end = 0
        with self.partial.open("rb+") as file:
            for raw in file:
                batch = _whole_batch(raw)
                if batch is None:
                    break
                self.batches.append(batch)
                end += len(raw)
            file.truncate(end)

    def append(self, batch: list[Row]) -> None:
        """Commit one batch: one line, synced."""
        with room_for(self.partial), self.partial.open("ab") as file:
            file.write(json.dumps(batch).encode("ascii") + b"\n")
            file.flush()
            os.fsync(file.fileno())
        self.batches.append(batch)

    def finish(self) -> int:
        """Write the final file, rows in the input's order, and remove the partial one; returns the number of rows."""
        rows = [row for batch in self.batches for row in batch if "reject" not in row]
        rows.sort(key=lambda row: int(row["line"]))
        with room_for(self.out):
            write_text_atomic(self.out, "".join(
                json.dumps({k: v for k, v in row.items() if k != "line"}, ensure_ascii=False) + "\n" for row in rows))
        self.partial.unlink(missing_ok=True)
        self.complete = True
        return len(rows)


def _locked(path: Path) -> int:
    """The handle of a file that is there for its lock alone: one that is replaced would let two writers in."""
    path.touch()
    return lock(path)


def _whole_batch(raw: bytes) -> list[Row] | None:
    if not raw.endswith(b"\n"):
        return None
    try:
        value = json.loads(raw)
    except ValueError:
        return None
    return value if isinstance(value, list) else None
