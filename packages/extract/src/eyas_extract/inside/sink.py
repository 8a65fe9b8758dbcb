"""Rows into shard files, by offset; and one line a sample into the report beside each."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections import OrderedDict
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas_contract.canonical import dumps
from eyas_contract.safetensors_header import read_header
from eyas_extract.protocol import Mark, RowsDone, rows_file

if TYPE_CHECKING:
    from eyas_extract.inside.captor import CaptureRank

OPEN_FILES = 64
LOST = -1  # rows covered of a sample of which some never came


@dataclass(frozen=True)
class Piece:
    """`rows` rows of one request: from row `source` of the batch, at positions `position` and on of the sample.

    `turn` counts how often the request began: SGLang puts a request back when memory is short.
    """

    mark: Mark
    position: int
    source: int
    rows: int
    turn: int = 0


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
                self._report(shard, RowsDone(mark.first, mark.rows, f"{missing} rows missing at the front: prefix "
                                             "cache on? Start SGLang with --disable-radix-cache"))
                shard.covered[mark] = LOST
                return None
            shard.covered[mark] = covered + piece.rows
            return shard.turn[mark]

    def write(self, piece: Piece, rows: dict[str, Any], bad: set[str]) -> None:
        """Write rows and, with the sample's last one, its line.

        Args:
            rows: tensor name -> buffer of `piece.rows` rows.
            bad: what is wrong with these rows' values.
        """
        shard, mark = self._open(piece.mark.path), piece.mark
        if shard is None:
            return
        for name, buffer in rows.items():
            start, width = shard.tensors[name]
            _pwrite(shard.data, buffer, start + (mark.first + piece.position) * width)
        with shard.lock:
            if piece.turn != shard.turn[mark]:
                return
            shard.bad.setdefault(mark, set()).update(bad)
            shard.written[mark] += piece.rows
            if shard.written[mark] == mark.rows:
                self._report(shard, RowsDone(mark.first, mark.rows, bad="; ".join(sorted(shard.bad.pop(mark)))))

    def fault(self, piece: Piece, error: OSError) -> None:
        """Report that rows could not be written."""
        shard = self._open(piece.mark.path)
        if shard is None:
            return
        with shard.lock:
            self._report(shard, RowsDone(piece.mark.first, piece.mark.rows, f"cannot be written ({error.strerror})"))

    def _report(self, shard: Shard, line: RowsDone) -> None:
        os.write(shard.report, dumps(line).encode("ascii") + b"\n")

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


def _pwrite(file: int, buffer: Any, offset: int) -> None:
    block = memoryview(buffer)
    while block:
        done = os.pwrite(file, block, offset)
        block, offset = block[done:], offset + done
