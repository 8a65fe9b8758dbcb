"""From the device to the files: a ring of buffers, one copy stream, a few writer threads.

The forward stream only gathers into a slot's staging buffer; the copy to pinned memory runs beside it, and the writers
write straight from there. With no slot free, the engine waits: memory stays flat, whatever the disk does.
"""

from __future__ import annotations

import dataclasses
import math
import queue
import threading
from collections.abc import Sequence
from typing import Any

import torch

from eyas_contract.capture import store_tensors
from eyas_extract.dtypes import STORE_DTYPES
from eyas_extract.inside.gather import largest, pick_gather
from eyas_extract.inside.sink import Piece, Sink
from eyas_extract.protocol import Captor, CaptureSettings


class Slot:
    """Buffers of `rows` rows. `device` is where states are gathered, `host` what is written; one and the same on a CPU.

    Attributes:
        pieces: (piece, first row in the slot).
        used: rows in use.
        done: event after the copy to the host, or None.
    """

    def __init__(self, rows: int, layers: int, hidden: int, dtype: torch.dtype, device: str) -> None:
        def buffers(where: str, pinned: bool) -> dict[str, torch.Tensor]:
            made = {"aux_hidden_states": torch.empty(rows, layers * hidden, dtype=dtype, device=where,
                                                     pin_memory=pinned),
                    "last_hidden_state": torch.empty(rows, hidden, dtype=dtype, device=where, pin_memory=pinned),
                    "largest": torch.empty(layers + 1, rows, dtype=torch.float32, device=where, pin_memory=pinned)}
            if dtype == torch.float8_e4m3fn:
                made["scales"] = torch.empty(layers + 1, rows, dtype=torch.float32, device=where, pin_memory=pinned)
            return made

        cuda = device != "cpu"
        self.rows, self.layers = rows, layers
        self.host = buffers("cpu", cuda)
        self.device = buffers(device, False) if cuda else self.host
        self.done: Any = torch.cuda.Event() if cuda else None  # type: ignore[no-untyped-call]
        self.clear()

    def clear(self) -> None:
        """Make it empty."""
        self.pieces: list[tuple[Piece, int]] = []
        self.used = 0


class Ring:
    """The slots of one rank.

    Args:
        settings: sizes and dtypes.
        captor: who captures.
        device: of the states.
        sink: where rows go.

    Attributes:
        captor: completed with what gathers.
    """

    def __init__(self, settings: CaptureSettings, captor: Captor, device: str, sink: Sink) -> None:
        self.layers, self.hidden, self.sink = len(captor.aux_layer_ids), captor.hidden_size, sink
        stored, model = STORE_DTYPES[captor.store_dtype], STORE_DTYPES[captor.model_dtype]
        kind = torch.device(device).type
        name, self.gather = pick_gather(kind, model, stored, self.hidden)
        self.captor = dataclasses.replace(captor, gather=name)
        width = (self.layers + 1) * self.hidden * stored.itemsize
        rows = min(max(settings.slot_mib * 2**20 // width, 64), 16384)
        self.names = {spec.name for spec in store_tensors(captor.store_dtype)}
        self.free: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        for _ in range(settings.slots):
            self.free.put(Slot(rows, self.layers, self.hidden, stored, "cpu" if kind == "cpu" else device))
        self.full: queue.SimpleQueue[Slot] = queue.SimpleQueue()
        self.copies: Any = torch.cuda.Stream(device) if kind != "cpu" else None  # type: ignore[no-untyped-call]
        self.error: BaseException | None = None
        for number in range(settings.threads):
            threading.Thread(target=self._write_all, name=f"eyas-writer-{number}", daemon=True).start()

    def take(self, states: Sequence[torch.Tensor], pieces: Sequence[Piece]) -> None:
        """Queue the pieces' rows of K + 1 states [N, H] for writing; waits while no slot is free.

        Raises:
            BaseException: whatever ended a writer.
        """
        if self.error is not None:
            raise self.error
        slot: Slot | None = None
        for piece in pieces:
            turn = self.sink.expect(piece)
            if turn is None:
                continue
            done = 0
            while done < piece.rows:
                if slot is None:
                    slot = self.free.get()
                rows = min(piece.rows - done, slot.rows - slot.used)
                slot.pieces.append((dataclasses.replace(piece, position=piece.position + done,
                                                        source=piece.source + done, rows=rows, turn=turn), slot.used))
                slot.used, done = slot.used + rows, done + rows
                if slot.used == slot.rows:
                    self._send(slot, states)
                    slot = None
        if slot is not None:
            self._send(slot, states)

    def _send(self, slot: Slot, states: Sequence[torch.Tensor]) -> None:
        """Gather a slot's pieces, neighbours in one launch, and start the copy to the host."""
        runs: list[list[int]] = []
        for piece, at in slot.pieces:
            if runs and runs[-1][0] + runs[-1][2] == piece.source:
                runs[-1][2] += piece.rows
            else:
                runs.append([piece.source, at, piece.rows])
        into = slot.device
        for source, at, rows in runs:
            taken = [state[source:source + rows] for state in states]
            scales = into["scales"][:, at:at + rows] if "scales" in into else None
            self.gather(taken[:-1], into["aux_hidden_states"][at:at + rows], None if scales is None else scales[:-1])
            self.gather(taken[-1:], into["last_hidden_state"][at:at + rows], None if scales is None else scales[-1:])
            for k, state in enumerate(taken):
                into["largest"][k, at:at + rows] = largest(state)
        if self.copies is not None:
            self.copies.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(self.copies):
                for name, buffer in into.items():
                    if name in self.names:
                        slot.host[name][:slot.used].copy_(buffer[:slot.used], non_blocking=True)
                    else:
                        slot.host[name].copy_(buffer, non_blocking=True)
                slot.done.record(self.copies)
        self.full.put(slot)

    def _write_all(self) -> None:
        while True:
            slot = self.full.get()
            try:
                if slot.done is not None:
                    slot.done.synchronize()
                self._write(slot)
            except BaseException as error:
                self.error = error  # raised by the next batch, which ends the engine with it
            slot.clear()
            self.free.put(slot)

    def _write(self, slot: Slot) -> None:
        for piece, at in slot.pieces:
            rows = slice(at, at + piece.rows)
            buffers = {name: _bytes(slot.host[name][rows]) for name in ("aux_hidden_states", "last_hidden_state")}
            if "scales" in slot.host:
                buffers["aux_scales"] = _bytes(slot.host["scales"][:-1, rows].T.contiguous())
                buffers["last_scale"] = _bytes(slot.host["scales"][-1:, rows].T.contiguous())
            try:
                self.sink.write(piece, buffers, self._bad(slot.host["largest"][:, rows]))
            except OSError as error:
                self.sink.fault(piece, error)

    def _bad(self, found: torch.Tensor) -> set[str]:
        """What is wrong with rows, by the largest magnitude of each layer's [K + 1, rows]."""
        names = [*(f"layer {k}" for k in self.captor.aux_layer_ids), "the last layer"]
        result = set()
        for name, value in zip(names, found.amax(-1).tolist(), strict=True):
            if not math.isfinite(value):
                result.add(f"non-finite values in the states of {name}")
            elif value == 0:
                result.add(f"all-zero states of {name}")
        return result


def _bytes(tensor: torch.Tensor) -> Any:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
