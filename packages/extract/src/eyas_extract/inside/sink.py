"""Rows into shard files, by offset; and one line a sample into the report beside each."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from eyas_contract.canonical import dumps
from eyas_contract.safetensors_header import read_header
from eyas_extract.protocol import Mark, RowsDone, rows_file

if TYPE_CHECKING:
    from eyas_extract.inside.captor import CaptureRank

OPEN_FILES = 256  # far more than are in flight, so that none is closed that still gets rows
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
    """An open shard file: descriptors, where each tensor begins and how wide its rows are (bytes), what is done."""

    data: int
    report: int
    tensors: dict[str, tuple[int, int]]
    covered: dict[Mark, int] = field(default_factory=dict)
    bad: dict[Mark, set[str]] = field(default_factory=dict)
    written: dict[Mark, int] = field(default_factory=dict)
    turn: dict[Mark, int] = field(default_factory=dict)
    lock: threading.Lock = field(default_factory=threading.Lock)


class Sink:
    """All shard files that this engine writes to. Safe to use from several threads.

    Args:
        rank: whose captor opens each report.
        root: nothing outside this folder is written.
    """

    def __init__(self, rank: CaptureRank, root: Path) -> None:
        self.rank, self.root = rank, root.resolve()
        self.shards: OrderedDict[str, Shard] = OrderedDict()
        self.lock = threading.Lock()

    def expect(self, piece: Piece) -> int | None:
        """Note, in the order of computing, that these rows come: the request's turn; None where they are of no use.

        Rows that do not follow on the request's last ones are reported as its fault.
        """
        shard = self._open(piece.mark.path)
        if shard is None:
            return None
        mark = piece.mark
        with shard.lock:
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
            return shard.turn[mark]

    def write(self, parts: Sequence[Part], rows: dict[str, Any], bad: dict[int, set[str]]) -> None:
        """Write a buffer's rows, and with each sample's last ones its line.

        Args:
            parts: what the buffer holds.
            rows: tensor name -> uint8 [rows, width], C-contiguous.
            bad: number of each part whose values cannot be used, and why.
        """
        start = 0
        for end in range(1, len(parts) + 1):
            if end < len(parts) and parts[end].mark.path == parts[start].mark.path:
                continue
            shard = self._open(parts[start].mark.path)
            if shard is not None:
                self._write(shard, parts[start:end], rows, {i - start: bad[i] for i in bad if start <= i < end})
            start = end

    def _write(self, shard: Shard, parts: Sequence[Part], rows: dict[str, Any], bad: dict[int, set[str]]) -> None:
        """Rows of one shard: neighbours in one call, and one line of the report each."""
        try:
            for first, at, count in runs((p.mark.first + p.position, p.at, p.rows) for p in parts):
                for name, buffer in rows.items():
                    begin, width = shard.tensors[name]
                    _pwrite(shard.data, buffer[at:at + count], begin + first * width)
        except OSError as error:
            fault = f"cannot be written ({error.strerror})"
            self._report(shard, [RowsDone(mark.first, mark.rows, fault) for mark in {p.mark: 0 for p in parts}])
            return
        done = []
        with shard.lock:
            for i, (mark, turn, _, _, count) in enumerate(parts):
                if turn != shard.turn[mark]:
                    continue
                if i in bad:
                    shard.bad.setdefault(mark, set()).update(bad[i])
                shard.written[mark] += count
                if shard.written[mark] == mark.rows:
                    done.append(RowsDone(*mark[1:3], bad="; ".join(sorted(shard.bad.pop(mark, ())))))
            self._report(shard, done)

    def _report(self, shard: Shard, lines: Sequence[RowsDone]) -> None:
        if lines:
            os.write(shard.report, b"".join(line.line() for line in lines))

    def _open(self, name: str) -> Shard | None:
        with self.lock:
            if name in self.shards:
                self.shards.move_to_end(name)
                return self.shards[name]
            path = Path(name)
            if self.root not in path.resolve().parents or not path.is_file():
                return None  # nothing laid out there: whoever asked, asked for it elsewhere, or has given up
            header = read_header(path)
            tensors = {t.name: (t.start, (t.end - t.start) // t.shape[0]) for t in header.tensors.values()
                       if t.shape[0] > 0}
            shard = Shard(os.open(path, os.O_WRONLY),
                          os.open(rows_file(path), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644), tensors)
            captor = dataclasses.replace(self.rank.captor, proof=self.rank.tap.proof)
            os.write(shard.report, dumps(captor).encode("ascii") + b"\n")
            self.shards[name] = shard
            while len(self.shards) > OPEN_FILES:
                _, old = self.shards.popitem(last=False)
                os.close(old.data)
                os.close(old.report)
            return shard


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
