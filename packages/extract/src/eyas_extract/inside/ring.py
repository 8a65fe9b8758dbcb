"""From the device to the writer process: a ring of slots in memory that both share, and one copy stream.

The forward stream only gathers into a slot's staging buffer; the copy to the shared, pinned memory runs beside it, and
the writer process (`writer.py`) writes straight from there. The engine's own interpreter does nothing more than launch
this and send a few words a batch: threads that write would fight its scheduler, which is busy all the time, for the
interpreter's lock. With no slot free the engine waits: memory stays flat, whatever the disk does.
"""

from __future__ import annotations

import dataclasses
import json
import marshal
import mmap
import os
import queue
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any

import torch

from eyas_contract import EngineFailure
from eyas_contract.canonical import dumps
from eyas_extract.dtypes import STORE_DTYPES
from eyas_extract.inside.gather import largest, pick_gather
from eyas_extract.inside.sink import Piece, runs
from eyas_extract.inside.slots import Layout
from eyas_extract.protocol import Captor, CaptureSettings

PORTABLE = 1  # of cudaHostRegister: memory that others allocated is locked for every device of this process


class Slot:
    """One slot. `device` is where states are gathered, `host` the shared memory; one and the same on a CPU.

    Attributes:
        pieces: what is in it, in order: mark, position, first row here, rows.
        sources: row of the batch, row here, rows.
        used: rows in use.
        done: event after the copy to the host, or None.
    """

    def __init__(self, number: int, layout: Layout, memory: mmap.mmap, stored: torch.dtype, device: str) -> None:
        self.number, self.rows = number, layout.rows
        self.host, self.device = {}, {}
        for name, (offset, _, shape) in layout.fields().items():
            dtype = torch.float32 if name in ("largest", "scales") else stored
            flat = torch.frombuffer(memory, dtype=dtype, count=shape[0] * shape[1],
                                    offset=number * layout.slot_bytes + offset)
            self.host[name] = flat.view(shape)
            self.device[name] = torch.empty(shape, dtype=dtype, device=device) if device != "cpu" else self.host[name]
        # Blocking: else the thread that waits keeps a core busy for as long as the device runs behind.
        self.done: Any = torch.cuda.Event(blocking=True) if device != "cpu" else None  # type: ignore[no-untyped-call]
        self.clear()

    def clear(self) -> None:
        """Make it empty."""
        self.pieces: list[tuple[Any, ...]] = []
        self.sources: list[tuple[int, int, int]] = []
        self.used = 0


class Ring:
    """The slots of one rank, and its writer process.

    Args:
        settings: sizes and dtypes.
        captor: who captures.
        device: of the states.
        proof: what the check of the layers has found so far.

    Attributes:
        captor: completed with what gathers.

    Raises:
        EngineFailure: no memory for the slots.
    """

    def __init__(self, settings: CaptureSettings, captor: Captor, device: str, proof: Callable[[], str]) -> None:
        self.layers, self.hidden, self.proof = len(captor.aux_layer_ids), captor.hidden_size, proof
        stored, model = STORE_DTYPES[captor.store_dtype], STORE_DTYPES[captor.model_dtype]
        kind = torch.device(device).type
        name, self.gather = pick_gather(kind, model, stored, self.hidden)
        self.captor, self.line = dataclasses.replace(captor, gather=name), b""
        width = (self.layers + 1) * self.hidden * stored.itemsize
        rows = min(max(settings.slot_mib * 2**20 // width, 64), 16384)
        layout = Layout(rows, self.layers, self.hidden, stored.itemsize, stored == torch.float8_e4m3fn, settings.slots)
        try:
            handle = layout.create()
        except OSError as error:
            size = layout.slots * layout.slot_bytes
            raise EngineFailure("the capture's buffers", f"no room for {size >> 20} MiB ({error.strerror})",
                                f"{layout.slots} slots of shared memory, by extraction",
                                "Give the engine's machine or container more memory.") from error
        self.memory = mmap.mmap(handle, layout.slots * layout.slot_bytes)
        self.slots = [Slot(number, layout, self.memory, stored, device if kind != "cpu" else "cpu")
                      for number in range(layout.slots)]
        self.free = [*self.slots]
        self.copies: Any = None
        self.full: queue.SimpleQueue[Slot | None] = queue.SimpleQueue()
        self._start(layout, handle, settings)
        os.close(handle)
        if kind != "cpu":
            self.copies = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
            _cuda("cudaHostRegister", self._address(), len(self.memory), PORTABLE)
            self.sender = threading.Thread(target=self._send_all, name="eyas-sender", daemon=True)
            self.sender.start()

    def _start(self, layout: Layout, handle: int, settings: CaptureSettings) -> None:
        """The writer process; it ends with this one, whose end of the socket closes then."""
        ours, theirs = socket.socketpair()
        with theirs:
            told = {"layout": dataclasses.asdict(layout), "memory": handle, "socket": theirs.fileno(),
                    "root": settings.root, "aux_layer_ids": self.captor.aux_layer_ids, "threads": settings.threads}
            self.writer = subprocess.Popen(
                [sys.executable, "-m", "eyas_extract.inside.writer", json.dumps(told)], stdin=subprocess.DEVNULL,
                pass_fds=(handle, theirs.fileno()))
        self.socket = Connection(ours.detach())

    def _address(self) -> int:
        return self.slots[0].host["aux_hidden_states"].data_ptr()

    def close(self) -> None:
        """End the writer, its work done."""
        if self.copies is not None:
            self.full.put(None)
            self.sender.join()
            # Unmapped while it is locked, its addresses could never be locked again.
            _cuda("cudaHostUnregister", self._address())
        self.socket.close()
        self.writer.wait()

    def take(self, states: Sequence[torch.Tensor], pieces: Sequence[Piece]) -> None:
        """Queue the pieces' rows of K + 1 states [N, H] for writing; waits while no slot is free.

        Raises:
            EngineFailure: the writer process ended.
        """
        slot: Slot | None = None
        for mark, position, source, left in pieces:
            while left:
                if slot is None:
                    slot = self._free_slot()
                rows = min(left, slot.rows - slot.used)
                slot.pieces.append((tuple(mark), position, slot.used, rows))
                slot.sources.append((source, slot.used, rows))
                slot.used, position, source, left = slot.used + rows, position + rows, source + rows, left - rows
                if slot.used == slot.rows:
                    self._fill(slot, states)
                    slot = None
        if slot is not None:
            self._fill(slot, states)

    def _free_slot(self) -> Slot:
        """A slot that is written, as the writer says."""
        try:
            while not self.free:
                slot = self.slots[int.from_bytes(self.socket.recv_bytes(), "little")]
                slot.clear()
                self.free.append(slot)
        except (EOFError, OSError) as error:
            raise self._lost() from error
        return self.free.pop()

    def _lost(self) -> EngineFailure:
        return EngineFailure("the capture's writer", f"ended with exit code {self.writer.poll()}",
                             "a process that writes the states, by extraction", "The engine's log says why it ended.")

    def _fill(self, slot: Slot, states: Sequence[torch.Tensor]) -> None:
        """Gather a slot's rows, neighbours in one launch, and start the copy to the host."""
        into = slot.device
        for source, at, rows in runs(slot.sources):
            taken = [state[source:source + rows] for state in states]
            scales = into["scales"][:, at:at + rows] if "scales" in into else None
            self.gather(taken[:-1], into["aux_hidden_states"][at:at + rows], None if scales is None else scales[:-1])
            self.gather(taken[-1:], into["last_hidden_state"][at:at + rows], None if scales is None else scales[-1:])
            if scales is not None:  # e4m3 has no infinity to be found in it
                for k, state in enumerate(taken):
                    largest(state, into["largest"][at:at + rows, k])
        if "scales" not in into:
            self._largest(into, slot.used)
        if self.copies is None:
            self._send(slot)
            return
        self.copies.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.copies):
            for name, buffer in into.items():
                used = None if name == "scales" else slot.used  # of which it would be no single block
                slot.host[name][:used].copy_(buffer[:used], non_blocking=True)
            slot.done.record(self.copies)
        self.full.put(slot)

    def _largest(self, into: dict[str, torch.Tensor], used: int) -> None:
        """Largest magnitude of each row and layer, of what was gathered: two launches for all layers."""
        aux = into["aux_hidden_states"][:used].view(used, self.layers, self.hidden)
        largest(aux, into["largest"][:used, :-1])
        largest(into["last_hidden_state"][:used], into["largest"][:used, -1])

    def _send_all(self) -> None:
        """Tell the writer of each slot whose copy is done; where it is gone, the next batch finds that out."""
        while (slot := self.full.get()) is not None:
            slot.done.synchronize()
            try:
                self._send(slot)
            except EngineFailure:
                return

    def _send(self, slot: Slot) -> None:
        proof = self.proof()
        if proof != self.captor.proof or not self.line:
            self.captor = dataclasses.replace(self.captor, proof=proof)
            self.line = dumps(self.captor).encode("ascii") + b"\n"
        try:
            self.socket.send_bytes(marshal.dumps((slot.number, slot.used, self.line, slot.pieces)))
        except OSError as error:
            raise self._lost() from error


def _cuda(function: str, *arguments: int) -> None:
    """A call of CUDA's runtime. Raises torch.cuda.CudaError."""
    torch.cuda.check_error(getattr(torch.cuda.cudart(), function)(*arguments))  # type: ignore[no-untyped-call]
