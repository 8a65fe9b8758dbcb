"""The writer of one capturing rank: a process of its own, so that nothing of its work holds the engine's interpreter.

    python -m eyas_extract.inside.writer '{"layout": {...}, "root": "...", "aux_layer_ids": [...], "threads": 4, ...}'

It shares the slots' memory with the rank (`slots.py`). Over a socket the rank says which slot is full and with what, in
the order of computing, and is told which slot is free again. It ends when the rank does, its work done.
"""

from __future__ import annotations

import contextlib
import json
import marshal
import mmap
import os
import queue
import signal
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from eyas_contract.canonical import from_plain
from eyas_extract.inside.sink import Part, Piece, Shard, Sink
from eyas_extract.inside.slots import Layout
from eyas_extract.protocol import Mark

Bytes = np.ndarray[Any, Any]


@dataclass(frozen=True)
class WriterSettings:
    """What a writer process is told.

    Attributes:
        layout: of the shared memory.
        memory, socket: descriptors.
        root: only files below this folder are written.
        aux_layer_ids: names of the layers, for words about bad values.
        threads: that write; a file is always the same one's, since the system writes to a file one call at a time.
    """

    layout: Layout
    memory: int
    socket: int
    root: str
    aux_layer_ids: tuple[int, ...]
    threads: int


class Slot:
    """One slot: the arrays in it, and how many writers still read them."""

    def __init__(self, memory: mmap.mmap, layout: Layout, number: int) -> None:
        self.number, self.left = number, 0
        self.fields: dict[str, Bytes] = {}
        for name, (offset, size, (rows, width)) in layout.fields().items():
            at = number * layout.slot_bytes + offset
            if name in ("largest", "scales"):
                self.fields[name] = np.ndarray((rows, width), np.float32, memory, at)
            else:
                self.fields[name] = np.ndarray((rows, width * size), np.uint8, memory, at)

    def rows(self, used: int) -> dict[str, Bytes]:
        """The tensors' bytes, uint8 [used, width]."""
        found = {name: self.fields[name][:used] for name in ("aux_hidden_states", "last_hidden_state")}
        if "scales" in self.fields:
            scales = self.fields["scales"][:, :used]
            found["aux_scales"] = _bytes(scales[:-1].T)
            found["last_scale"] = _bytes(scales[-1:].T)
        return found


def _bytes(values: Bytes) -> Bytes:
    """A copy as bytes, rows together."""
    copied = np.empty(values.shape, values.dtype)
    copied[...] = values
    return copied.view(np.uint8)


class Writer:
    """The process's work.

    Args:
        settings: see there.
    """

    def __init__(self, settings: WriterSettings) -> None:
        self.settings, layout = settings, settings.layout
        self.sink = Sink(Path(settings.root))
        self.socket = Connection(settings.socket)
        memory = mmap.mmap(settings.memory, layout.slots * layout.slot_bytes)
        self.slots = [Slot(memory, layout, number) for number in range(layout.slots)]
        self.names = [*(f"layer {k}" for k in settings.aux_layer_ids), "the last layer"]
        self.lock = threading.Lock()
        self.queues: list[queue.SimpleQueue[Any]] = [queue.SimpleQueue() for _ in range(settings.threads)]
        self.threads = [threading.Thread(target=self._write_all, args=(each,)) for each in self.queues]

    def run(self) -> None:
        """Until the rank ends."""
        for thread in self.threads:
            thread.start()
        try:
            while True:
                number, used, captor, pieces = marshal.loads(self.socket.recv_bytes())
                self._dispatch(self.slots[number], used, captor, pieces)
        except (EOFError, ConnectionResetError):
            for each in self.queues:
                each.put(None)
        except BaseException:
            _end()  # else the other threads would keep the process, and the rank waiting for a free slot

    def _dispatch(self, slot: Slot, used: int, captor: bytes, pieces: Sequence[tuple[Any, ...]]) -> None:
        """Note what comes, in order, and hand each file's parts to its thread."""
        groups: dict[int, tuple[Shard, list[Part]]] = {}
        for mark, position, at, rows in pieces:
            found = self.sink.expect(Piece(Mark(*mark), position, at, rows), captor)
            if found is not None:
                shard, turn = found
                groups.setdefault(shard.number, (shard, []))[1].append(Part(Mark(*mark), turn, position, at, rows))
        slot.left = len(groups)
        if not groups:
            self._free(slot)
        for number, (shard, parts) in groups.items():
            self.queues[number % len(self.queues)].put((slot, used, shard, parts))

    def _write_all(self, work: queue.SimpleQueue[Any]) -> None:
        try:
            while (item := work.get()) is not None:
                slot, used, shard, parts = item
                self.sink.write(shard, parts, slot.rows(used), self._bad(slot.fields["largest"], parts))
                with self.lock:
                    slot.left -= 1
                    last = not slot.left
                if last:
                    self._free(slot)
        except BaseException:
            _end()

    def _free(self, slot: Slot) -> None:
        with self.lock, contextlib.suppress(OSError):  # where the rank is gone, what it sent is written all the same
            self.socket.send_bytes(slot.number.to_bytes(4, "little"))

    def _bad(self, found: Bytes, parts: Sequence[Part]) -> dict[int, set[str]]:
        """What is wrong with parts of a slot, by the largest magnitude of each row and layer [R, K + 1]."""
        result: dict[int, set[str]] = {}
        for i, part in enumerate(parts):
            most = found[part.at:part.at + part.rows].max(axis=0)
            if not (np.isfinite(most) & (most > 0)).all():
                result[i] = {f"all-zero states of {name}" if value == 0 else
                             f"non-finite values in the states of {name}"
                             for name, value in zip(self.names, most.tolist(), strict=True)
                             if value == 0 or not np.isfinite(value)}
        return result


def _end() -> NoReturn:
    """End the process with the error that is being handled: the rank finds the socket closed, and ends the engine."""
    sys.excepthook(*sys.exc_info())
    os._exit(1)


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Writer(from_plain(WriterSettings, json.loads(sys.argv[1]), "the writer's settings")).run()
