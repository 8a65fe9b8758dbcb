"""Buffers that an engine's rank and its writer process share: one block of memory, cut into slots of equal layout.

Shapes: R rows of a slot, K aux layers, H hidden.
"""

from __future__ import annotations

import os
from dataclasses import dataclass

PAGE = 4096


@dataclass(frozen=True)
class Layout:
    """What a slot holds.

    Attributes:
        rows, layers, hidden: R, K, H.
        itemsize: bytes of a stored value.
        scaled: whether e4m3 values have scales beside them.
        slots: how many.
    """

    rows: int
    layers: int
    hidden: int
    itemsize: int
    scaled: bool
    slots: int

    def fields(self) -> dict[str, tuple[int, int, tuple[int, int]]]:
        """Name -> (byte in the slot, bytes a value, shape).

        `aux_hidden_states` [R, K*H] and `last_hidden_state` [R, H] as stored; `largest` float32 [R, K+1], the largest
        magnitude of each row and layer; `scales` float32 [K+1, R].
        """
        shapes = {"aux_hidden_states": (self.itemsize, (self.rows, self.layers * self.hidden)),
                  "last_hidden_state": (self.itemsize, (self.rows, self.hidden)),
                  "largest": (4, (self.rows, self.layers + 1))}
        if self.scaled:
            shapes["scales"] = (4, (self.layers + 1, self.rows))
        found, offset = {}, 0
        for name, (size, shape) in shapes.items():
            found[name] = (offset, size, shape)
            offset += -(-size * shape[0] * shape[1] // PAGE) * PAGE
        return found

    @property
    def slot_bytes(self) -> int:
        """Of one slot, whole pages."""
        offset, size, shape = list(self.fields().values())[-1]
        return offset + -(-size * shape[0] * shape[1] // PAGE) * PAGE

    def create(self) -> int:
        """Descriptor of fresh memory for all slots, which goes with its last user. Raises OSError without room."""
        handle = os.memfd_create("eyas-capture")
        try:
            os.posix_fallocate(handle, 0, self.slots * self.slot_bytes)
        except OSError:
            os.close(handle)
            raise
        return handle
