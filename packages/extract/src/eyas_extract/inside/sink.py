"""Rows into shard files, by offset; and one line a sample into the report beside each."""

from __future__ import annotations

import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from eyas_contract import CorruptFile
from eyas_contract.safetensors_header import read_header
from eyas_extract.protocol import Mark, RowsDone, rows_file

OPEN_FILES = 256  # of shards given up by whoever asked; one that is whole is closed at once
LOST = -1  # rows covered of a sample of which some never came


class Piece(NamedTuple):
    """`rows` rows of one request: from row `source` of the batch, at positions `position` and on of the sample."""

    mark: Mark
    position: int
    source: int
    rows: int


class Part(NamedTuple):
    """Rows of one request in a buffer: `rows` from its row `at`, at positions `position` and on of the sample.

    `turn` counts how often the request began: SGLang puts a request back when memory is short.
    """

    mark: Mark
    turn: int
    position: int
    at: int
    rows: int


@dataclass
class Shard:
    """An open shard file.

    Attributes:
        path: its own.
        number: of the files that were opened.
        data, report: descriptors.
        tensors: where each tensor begins and how wide its rows are (bytes).
        rows: of all its samples.
        covered: rows that came, of each sample; `LOST` where some never did.
        written, bad: rows written, and what is wrong with them.
        turn: how often each request began.
        done: first row of each sample that is whole, and its rows.
        pending: writes that were announced and are not done.
    """

    path: str
    number: int
    data: int
    report: int
    tensors: dict[str, tuple[int, int]]
    rows: int
    covered: dict[Mark, int] = field(default_factory=dict)
    bad: dict[Mark, set[str]] = field(default_factory=dict)
    written: dict[Mark, int] = field(default_factory=dict)
    turn: dict[Mark, int] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)
    pending: int = 0


class Sink:
    """All shard files of a writer process. One thread expects, several write; a file's rows are always the same one's.

    Args:
        root: nothing outside this folder is written.
    """

    def __init__(self, root: Path) -> None:
        self.root, self.opened = root.resolve(), 0
        self.shards: OrderedDict[str, Shard] = OrderedDict()
        self.lock = threading.Lock()

    def expect(self, piece: Piece, captor: bytes) -> tuple[Shard, int] | None:
        """Note, in the order of computing, that rows come: their file and the request's turn; None for useless ones.

        Rows that do not follow on the request's last ones are reported as its fault.

        Args:
            piece: the rows.
            captor: who captures, as the first line of a report.
        """
        with self.lock:
            shard = self._open(piece.mark.path, captor)
            if shard is None:
                return None
            mark = piece.mark
            if piece.position == 0:
                shard.turn[mark] = shard.turn.get(mark, 0) + 1
                shard.covered[mark] = shard.written[mark] = 0
                shard.bad.pop(mark, None)
            covered = shard.covered.get(mark, 0)
            if covered != piece.position:
                if covered == LOST:
                    return None
                missing = piece.position - covered
                self._report(shard, [RowsDone(mark.first, mark.rows, f"{missing} rows missing at the front: prefix "
                                              "cache on? Start SGLang with --disable-radix-cache")])
                shard.covered[mark] = LOST
                return None
            shard.covered[mark] = covered + piece.rows
            shard.pending += 1
            return shard, shard.turn[mark]

    def write(self, shard: Shard, parts: Sequence[Part], rows: dict[str, Any], bad: dict[int, set[str]]) -> None:
        """Write a buffer's rows of one file, and with each sample's last ones its line.

        Args:
            shard: the file.
            parts: its rows in the buffer, each announced before.
            rows: tensor name -> uint8 [rows, width] of the buffer, C-contiguous.
            bad: number of each part whose values cannot be used, and why.
        """
        try:
            for first, at, count in runs((p.mark.first + p.position, p.at, p.rows) for p in parts):
                for name, buffer in rows.items():
                    begin, width = shard.tensors[name]
                    _pwrite(shard.data, buffer[at:at + count], begin + first * width)
            fault = ""
        except OSError as error:
            fault = f"cannot be written ({error.strerror})"
        with self.lock:
            shard.pending -= len(parts)
            if fault:
                self._report(shard, [RowsDone(*mark[1:3], fault) for mark in dict.fromkeys(p.mark for p in parts)])
            else:
                self._note(shard, parts, bad)
            if sum(shard.done.values()) == shard.rows and not shard.pending:
                self._close(shard)

    def _note(self, shard: Shard, parts: Sequence[Part], bad: dict[int, set[str]]) -> None:
        """Count written parts, and report the samples that are whole now."""
        whole = []
        for i, (mark, turn, _, _, count) in enumerate(parts):
            if turn != shard.turn[mark]:
                continue  # begun again since
            if i in bad:
                shard.bad.setdefault(mark, set()).update(bad[i])
            shard.written[mark] += count
            if shard.written[mark] == mark.rows:
                shard.done[mark.first] = mark.rows
                whole.append(RowsDone(*mark[1:3], bad="; ".join(sorted(shard.bad.pop(mark, ())))))
        self._report(shard, whole)

    def _report(self, shard: Shard, lines: Sequence[RowsDone]) -> None:
        if lines:
            os.write(shard.report, b"".join(line.line() for line in lines))

    def _open(self, name: str, captor: bytes) -> Shard | None:
        if name in self.shards:
            self.shards.move_to_end(name)
            return self.shards[name]
        path = Path(name)
        if self.root not in path.resolve().parents or not path.is_file():
            return None  # nothing laid out there: whoever asked, asked for it elsewhere, or has given up
        try:
            found = read_header(path).tensors
        except (CorruptFile, FileNotFoundError):  # given up in this very moment, or no shard at all
            return None
        tensors = {t.name: (t.start, (t.end - t.start) // t.shape[0]) for t in found.values() if t.shape[0] > 0}
        rows = found["last_hidden_state"].shape[0]
        shard = Shard(name, self.opened, os.open(path, os.O_WRONLY),
                      os.open(rows_file(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), tensors, rows)
        self.opened += 1
        os.write(shard.report, captor)
        self.shards[name] = shard
        idle = [each for each in self.shards.values() if not each.pending and each is not shard]
        for old in idle[:max(len(self.shards) - OPEN_FILES, 0)]:
            self._close(old)
        return shard

    def _close(self, shard: Shard) -> None:
        del self.shards[shard.path]
        os.close(shard.data)
        os.close(shard.report)


def runs(pieces: Iterable[tuple[int, int, int]]) -> list[list[int]]:
    """Pieces (first here, first there, length) with neighbours on both sides put together."""
    found: list[list[int]] = []
    for here, there, length in pieces:
        if found and found[-1][0] + found[-1][2] == here and found[-1][1] + found[-1][2] == there:
            found[-1][2] += length
        else:
            found.append([here, there, length])
    return found


def _pwrite(file: int, rows: Any, offset: int) -> None:
    block = memoryview(rows.reshape(-1))
    while block:
        done = os.pwrite(file, block, offset)
        block, offset = block[done:], offset + done
