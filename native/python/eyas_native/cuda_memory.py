"""hidden_gather and kv_move on CUDA: checked calls; callers use `eyas_native.cuda`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from eyas_native import cuda_abi as abi
from eyas_native.cuda_core import DTYPE, MATH, Faults, Tensor, current_stream, dtype_name, pointer, run
from eyas_native.memory import NORMS


def kv_move(
    buffers: Tensor, slot_bytes: Tensor, tgt_loc: Tensor, src_loc: Tensor, *, stream: int | None = None
) -> None:
    """Copies slots within every buffer, e.g. all layers' K and V, in one launch; in place for accept_commit's lists.

    Args:
        buffers: i64/u64 [L] device addresses; slot_bytes: i64 [L], multiples of 16; both on the device.
        tgt_loc, src_loc: i64 [B, k], contiguous, rows independent of each other; negative entries are skipped.
    """
    f = Faults("kv_move")
    f.tensor("buffers", buffers, ("int64", "uint64"), (None,))
    f.tensor("slot_bytes", slot_bytes, ("int64",), (None,))
    f.tensor("tgt_loc", tgt_loc, ("int64",), (None, None))
    f.check()
    f.tensor("src_loc", src_loc, ("int64",), tuple(tgt_loc.shape))
    f.need(
        buffers.shape == slot_bytes.shape,
        f"slot_bytes has shape {list(slot_bytes.shape)}, wanted {list(buffers.shape)}",
    )
    f.check()
    f.contiguous(tgt_loc=tgt_loc, src_loc=src_loc)
    f.check()
    run(
        "eyas_kv_move",
        pointer(buffers),
        pointer(slot_bytes),
        buffers.shape[0],
        pointer(tgt_loc),
        pointer(src_loc),
        tgt_loc.shape[0],
        tgt_loc.shape[1],
        current_stream(stream),
    )


def hidden_gather(
    sources: Sequence[Tensor],
    index: Tensor | None,
    out: Tensor,
    *,
    residuals: Sequence[Tensor | None] | None = None,
    norm: str = "none",
    weight: Tensor | None = None,
    eps: float = 1e-6,
    out_scale: float = 1.0,
    row_scale: Tensor | None = None,
    stream: int | None = None,
) -> None:
    """Rows `index` of up to 8 sources side by side, in one launch.

    Args:
        sources: bf16 or fp16 [N, width] each; residuals: added to them first, rounded as an engine's own addition is.
        index: i32 or i64 [T], or None: rows 0..T-1, which every source has. out: [T, K * width] of bf16, fp16 or e4m3.
        norm: "none", "per_source" (RMSNorm of every source's part, as `fc_norm`) or "whole" (one RMSNorm over the row).
        weight: [K * width] of the sources' dtype, needed with a norm.
        out_scale: an e4m3 result is divided by it and saturated. row_scale: f32 [T], written instead: a scale per row.

    Raises:
        ArgumentError: every argument that does not fit, by name.
    """
    f, count = Faults("hidden_gather"), len(sources)
    f.need(1 <= count <= 8, f"sources are {count}, wanted 1 to 8")
    f.need(norm in NORMS, f"norm is {norm!r}, wanted one of {', '.join(NORMS)}")
    f.check()
    added = list(residuals or [None] * count)
    f.need(len(added) == count, f"residuals are {len(added)}, wanted {count}")
    f.tensor("sources[0]", sources[0], MATH, (None, None))
    f.check()
    kind, width = dtype_name(sources[0]), sources[0].shape[1]
    for i, (source, residual) in enumerate(zip(sources, added, strict=True)):
        f.tensor(f"sources[{i}]", source, (kind,), (None, width))
        if residual is not None and f.tensor(f"residuals[{i}]", residual, (kind,), tuple(source.shape)):
            f.need(
                residual.stride(0) == source.stride(0),
                f"residuals[{i}] has row stride {residual.stride(0)}, wanted {source.stride(0)}",
            )
    if index is not None and not f.tensor("index", index, ("int32", "int64"), (None,)):
        f.check()  # out's rows follow from it
    rows = out.shape[0] if index is None and hasattr(out, "shape") else index.shape[0] if index is not None else 0
    f.tensor("out", out, (*MATH, "float8_e4m3fn"), (rows, count * width))
    f.need(width % 8 == 0, f"width is {width}, wanted a multiple of 8")
    if norm != "none":
        f.tensor("weight", weight, (kind,), (count * width,))
    if row_scale is not None:
        f.tensor("row_scale", row_scale, ("float32",), (rows,))
    f.check()
    if index is None:
        for i, source in enumerate(sources):
            if source.shape[0] < rows:
                f.need(False, f"sources[{i}] has {source.shape[0]} rows, wanted out's {rows}, or an index")
        f.check()
    g = abi.Gather(
        struct_size=ctypes.sizeof(abi.Gather),
        num_sources=count,
        index=pointer(index),
        index_is_i64=int(index is not None and dtype_name(index) == "int64"),
        width=width,
        rows=rows,
        norm=NORMS[norm],
        weight=pointer(weight),
        out=pointer(out),
        out_stride=out.stride(0),
        in_dtype=DTYPE[kind],
        out_dtype=DTYPE[dtype_name(out)],
        eps=eps,
        out_scale=out_scale,
        row_scale=pointer(row_scale),
        stream=current_stream(stream),
    )
    for i in range(count):
        g.source[i], g.residual[i], g.source_stride[i] = pointer(sources[i]), pointer(added[i]), sources[i].stride(0)
    run("eyas_hidden_gather", ctypes.byref(g))
