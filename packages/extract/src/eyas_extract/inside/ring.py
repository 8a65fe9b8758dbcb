"""From the device to the files: a ring of buffers, one copy stream, a few writer threads.

The forward stream only gathers into a slot's staging buffer; the copy to pinned memory runs beside it, and the writers
write straight from there. With no slot free, the engine waits: memory stays flat, whatever the disk does.
"""

from __future__ import annotations

import dataclasses
import queue
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from eyas_extract.dtypes import STORE_DTYPES
from eyas_extract.inside.gather import largest, pick_gather
from eyas_extract.inside.sink import Part, Piece, Sink, runs
from eyas_extract.protocol import Captor, CaptureSettings


class Slot:
    """Buffers of `rows` rows. `device` is where states are gathered, `host` what is written; one and the same on a CPU.

    Attributes:
        parts: what is in it, in order.
        used: rows in use.
        done: event after the copy to the host, or None.
    """

    def __init__(self, rows: int, layers: int, hidden: int, dtype: torch.dtype, device: str) -> None:
        def buffers(where: str, pinned: bool) -> dict[str, torch.Tensor]:
            made = {"aux_hidden_states": torch.empty(rows, layers * hidden, dtype=dtype, device=where,
                                                     pin_memory=pinned),
                    "last_hidden_state": torch.empty(rows, hidden, dtype=dtype, device=where, pin_memory=pinned),
                    "largest": torch.empty(rows, layers + 1, dtype=torch.float32, device=where, pin_memory=pinned)}
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
        self.parts: list[Part] = []
        self.sources: list[tuple[int, int, int]] = []  # row of the batch, row here, rows
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
            mark, position, source, left = piece
            while left:
                if slot is None:
                    slot = self.free.get()
                rows = min(left, slot.rows - slot.used)
                slot.parts.append(Part(mark, turn, position, slot.used, rows))
                slot.sources.append((source, slot.used, rows))
                slot.used, position, source, left = slot.used + rows, position + rows, source + rows, left - rows
                if slot.used == slot.rows:
                    self._send(slot, states)
                    slot = None
        if slot is not None:
            self._send(slot, states)

    def _send(self, slot: Slot, states: Sequence[torch.Tensor]) -> None:
        """Gather a slot's rows, neighbours in one launch, and start the copy to the host."""
        into = slot.device
        for source, at, rows in runs(slot.sources):
            taken = [state[source:source + rows] for state in states]
            scales = into["scales"][:, at:at + rows] if "scales" in into else None
            self.gather(taken[:-1], into["aux_hidden_states"][at:at + rows], None if scales is None else scales[:-1])
            self.gather(taken[-1:], into["last_hidden_state"][at:at + rows], None if scales is None else scales[-1:])
            if scales is not None:  # e4m3 has no infinity to be found in it
                for k, state in enumerate(taken):
                    into["largest"][at:at + rows, k] = largest(state)
        if "scales" not in into:
            self._largest(into, slot.used)
        if self.copies is not None:
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
        into["largest"][:used, :-1] = largest(aux)
        into["largest"][:used, -1] = largest(into["last_hidden_state"][:used])

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
        """A slot's rows to their files. All numpy: torch's calls cost more, and there are several a sample."""
        rows = {name: _rows(slot.host[name][:slot.used]) for name in ("aux_hidden_states", "last_hidden_state")}
        if "scales" in slot.host:
            scales = slot.host["scales"][:, :slot.used].T
            rows["aux_scales"] = _rows(scales[:, :-1].clone(memory_format=torch.contiguous_format))
            rows["last_scale"] = _rows(scales[:, -1:].clone(memory_format=torch.contiguous_format))
        self.sink.write(slot.parts, rows, self._bad(slot.host["largest"][:slot.used].numpy(), slot.parts))

    def _bad(self, found: np.ndarray[Any, Any], parts: Sequence[Part]) -> dict[int, set[str]]:
        """What is wrong with parts of a slot, by the largest magnitude of each row and layer [rows, K + 1]."""
        most = np.maximum.reduceat(found, [part.at for part in parts], axis=0)
        wrong = ~(np.isfinite(most) & (most > 0))
        names = [*(f"layer {k}" for k in self.captor.aux_layer_ids), "the last layer"]
        result: dict[int, set[str]] = {}
        for part, k in np.argwhere(wrong).tolist():
            kind = "all-zero states of" if most[part, k] == 0 else "non-finite values in the states of"
            result.setdefault(part, set()).add(f"{kind} {names[k]}")
        return result


def _rows(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """As bytes [rows, width]."""
    result: np.ndarray[Any, Any] = tensor.view(torch.uint8).numpy()
    return result
