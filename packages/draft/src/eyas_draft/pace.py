"""How well a run uses its device: share of the peak in operations that training needs (MFU), and waits for data."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Any

from eyas_contract import DraftSpec
from eyas_draft.flops import peak_flops, step_flops
from eyas_draft.store import Store

WINDOW = 50  # steps that a note speaks of


def flops_per_token(spec: DraftSpec, store: Store, trained: Sequence[int], ttt_steps: int) -> float:
    """Of forward and backward passes over the samples `trained`, prompts included."""
    lengths = [store.length(i) for i in trained]
    return step_flops(spec, lengths, sum(store.trained(i) for i in trained), ttt_steps) / sum(lengths)


class Pace:
    """Sums up the latest steps.

    Args:
        per_token: operations of one packed token, see `flops_per_token`.
        device_name: whose peak counts; none is known of a CPU.
        devices: that share the run.
    """

    def __init__(self, per_token: float, device_name: str, devices: int) -> None:
        peak = peak_flops(device_name)
        self.per_token, self.peak = per_token, peak * devices if peak else None
        self._steps: deque[tuple[int, float, float]] = deque(maxlen=WINDOW)

    def add(self, record: dict[str, Any]) -> dict[str, Any]:
        """Count a step's record; returns it, with `mfu` where the device's peak is known."""
        self._steps.append((record["tokens"], record["seconds"], record["wait"]))
        if self.peak is None or not record["seconds"]:
            return record
        return record | {"mfu": round(record["tokens"] * self.per_token / record["seconds"] / self.peak, 4)}

    def note(self) -> str:
        """`MFU 41 %  data wait 2 %` of the latest steps; operations a second where the peak is not known."""
        tokens, seconds, wait = (sum(part) for part in zip(*self._steps, strict=True)) if self._steps else (0, 0.0, 0.0)
        if not seconds:
            return ""
        rate = tokens * self.per_token / seconds
        used = f"MFU {100 * rate / self.peak:.0f} %" if self.peak else f"{rate / 1e12:.3f} T operations/s"
        return f"  {used}  data wait {100 * wait / seconds:.0f} %"
