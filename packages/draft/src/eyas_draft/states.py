"""A target's states as a store holds them, and their way into a batch: e4m3 is made bf16 where the batch is used.

A thread of a CPU needs half a second to make bf16 of 2,048 tokens of Kimi-K2's states, a GPU next to nothing, and half
the bytes travel.

Shape suffixes: T tokens, W layers * hidden, K layers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

E4M3_NAN = 0x7F  # without the sign; e4m3fn has no infinity


@dataclass(frozen=True)
class States:
    """Rows of one or more layers, as stored.

    Attributes:
        values_tw: [T, W]; e4m3 where there are scales.
        scales_tk: float32 [T, K], by which each row of each layer is to be multiplied; None where values are plain.
    """

    values_tw: Tensor
    scales_tk: Tensor | None = None

    @property
    def dtype(self) -> torch.dtype:
        """Of the plain states."""
        return self.values_tw.dtype if self.scales_tk is None else torch.bfloat16

    @property
    def plain(self) -> Tensor:
        """[T, W], bf16 where e4m3 is stored."""
        if self.scales_tk is None:
            return self.values_tw
        parts = self.values_tw.float().view(*self.scales_tk.shape, -1) * self.scales_tk[:, :, None]
        return parts.view(self.values_tw.shape).to(self.dtype)

    @property
    def finite(self) -> bool:
        """Whether none is NaN or infinite: both would show in the least or the greatest, which are found in one pass;
        `isfinite` takes 27 times as long for bf16 on a CPU's thread."""
        if self.scales_tk is None:
            return _finite(self.values_tw)
        bits = self.values_tw.view(torch.uint8) & E4M3_NAN
        return _finite(self.scales_tk) and not (bits.numel() and int(bits.max()) == E4M3_NAN)

    def taken(self, rows_n: Tensor) -> States:
        """Some rows, int64 [N]."""
        return States(self.values_tw[rows_n], None if self.scales_tk is None else self.scales_tk[rows_n])

    def to(self, device: torch.device) -> States:
        """The same on another device; from pinned memory without waiting."""
        scales = None if self.scales_tk is None else self.scales_tk.to(device, non_blocking=True)
        return States(self.values_tw.to(device, non_blocking=True), scales)

    def into(self, out_tw: Tensor) -> None:
        """Write them, plain, into memory on whatever device."""
        if self.scales_tk is None:
            out_tw.copy_(self.values_tw, non_blocking=True)
        else:
            out_tw.copy_(self.to(out_tw.device).plain)


def _finite(values: Tensor) -> bool:
    return not values.numel() or all(math.isfinite(end) for end in torch.aminmax(values))


def joined(parts: Sequence[Tensor], *, pinned: bool, room: int = 0) -> Tensor:
    """Rows of all parts one after another, and zeros up to `room` rows; pinned, a GPU fetches them by itself."""
    used = sum(len(part) for part in parts)
    rows = torch.empty(max(used, room), *parts[0].shape[1:], dtype=parts[0].dtype, pin_memory=pinned)
    torch.cat(list(parts), out=rows[:used])
    rows[used:].zero_()
    return rows


def joined_states(parts: Sequence[States], *, pinned: bool, room: int = 0) -> States:
    """As `joined`; all parts are plain, or all are e4m3."""
    scales = [part.scales_tk for part in parts if part.scales_tk is not None]
    return States(joined([part.values_tw for part in parts], pinned=pinned, room=room),
                  joined(scales, pinned=pinned, room=room) if scales else None)
