"""Rows into and inside a KV pool, and the gather of several layers' hidden states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from eyas_native import _C
from eyas_native.arrays import View, optional, target, view
from eyas_native.errors import ArgumentError

NORMS = {"none": 0, "per_source": 1, "whole": 2}


def kv_write(k: Any, v: Any, k_buffer: Any, v_buffer: Any, loc: Any) -> None:
    """k_buffer[loc] = k and v_buffer[loc] = v, converted to the buffers' dtype.

    Args:
        k: [N, Hkv, D] and v: [N, Hkv, Dv], float32, bfloat16 or float16, the last axis contiguous.
        k_buffer: [S, Hkv, D] and v_buffer: [S, Hkv, Dv], the last axis contiguous.
        loc: i64 [N], slots.

    Raises:
        ArgumentError: shapes, dtypes, strides, or a slot outside the pool; then nothing has been written.
    """
    _C.kv_write(
        view(k, "k"), view(v, "v"), target(k_buffer, "k_buffer"), target(v_buffer, "v_buffer"), view(loc, "loc")
    )


def kv_move(buffers: Any, tgt_loc: Any, src_loc: Any, *, strides: Any = None) -> None:
    """In every buffer, slot tgt_loc[i] becomes what slot src_loc[i] was before the call. Safe for overlapping slots.

    Args:
        buffers: list of [S, ...] arrays with contiguous rows (the K and V buffers of all layers), or, with strides, the
            addresses of such buffers as u64 [n].
        tgt_loc, src_loc: i64 [N].
        strides: None, or u64 [n]: bytes of one slot of each buffer, all of which are moved. With addresses the pool's
            end is unknown, so only negative slots are refused.

    Raises:
        ArgumentError: shapes, dtypes, or a slot outside the pool; then nothing has been moved.
    """
    if strides is not None:
        widths = [int(width) for width in strides]
        addresses = [int(address) for address in buffers]
        _C.kv_move(addresses, widths, widths, -1, view(tgt_loc, "tgt_loc"), view(src_loc, "src_loc"))
        return
    views = [target(buffer, f"buffers[{i}]") for i, buffer in enumerate(buffers)]
    widths = [_slot_elements(described, f"buffers[{i}]") for i, described in enumerate(views)]
    sizes = [int(buffer.itemsize) for buffer in buffers]
    _C.kv_move(
        [address for address, *_ in views],
        [described[3][0] * size for described, size in zip(views, sizes, strict=True)],
        [width * size for width, size in zip(widths, sizes, strict=True)],
        min((described[2][0] for described in views), default=0),
        view(tgt_loc, "tgt_loc"),
        view(src_loc, "src_loc"),
    )


def _slot_elements(described: View, name: str) -> int:
    """Elements of one slot, which must lie together."""
    _, _, shape, strides = described
    if not shape or strides[0] < 0:
        raise ArgumentError(name, f"shape {list(shape)}, strides {list(strides)}", "[S, ...]", "Pass the whole pool.")
    elements = 1
    for extent, stride in zip(reversed(shape[1:]), reversed(strides[1:]), strict=True):
        if extent > 1 and stride != elements:
            raise ArgumentError(name, "slots with gaps inside", "each slot contiguous", "Pass the pool's own buffer.")
        elements *= extent
    return elements


def hidden_gather(
    sources: Sequence[Any],
    index: Any,
    out: Any,
    *,
    residuals: Sequence[Any] | None = None,
    norm: str = "none",
    weight: Any = None,
    eps: float = 1e-6,
    out_scale: float = 1.0,
    row_scale: Any = None,
) -> None:
    """out[t] = the rows index[t] of all K sources side by side, optionally normalised and scaled to e4m3.

    Args:
        sources: K arrays [N, H] of one dtype, rows contiguous: the aux hidden states of K layers.
        index: i64 or i32 [T], or None for all rows in order (T = N).
        out: [T, K * H], float32, bfloat16, float16 or float8_e4m3fn, rows contiguous.
        residuals: None, or one per source, each [N, H] of the sources' dtype or None: added to its source first, the
            sum rounded to that dtype as an engine's own addition is.
        norm: "none", "per_source" (RMSNorm of each source's row) or "whole" (one RMSNorm over K * H).
        weight: [K * H] of the sources' dtype, with a norm.
        eps: of the norm.
        out_scale: an e4m3 result is divided by it and saturated.
        row_scale: f32 [T], written instead: for e4m3 a scale per row, its largest magnitude over 448.

    Raises:
        ArgumentError: shapes, dtypes, strides, or an index outside the sources; then nothing has been written.
    """
    if norm not in NORMS:
        raise ArgumentError("norm", repr(norm), "one of " + ", ".join(NORMS), "Choose one of them.")
    views = [view(source, f"sources[{i}]") for i, source in enumerate(sources)]
    _C.hidden_gather(
        views,
        [optional(residual, f"residuals[{i}]") for i, residual in enumerate(residuals or ())],
        optional(index, "index"),
        target(out, "out"),
        NORMS[norm],
        optional(weight, "weight"),
        eps,
        out_scale,
        None if row_scale is None else target(row_scale, "row_scale"),
    )
