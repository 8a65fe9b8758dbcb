"""The CUDA kernels, through ctypes over the C ABI of `libeyas_cuda.so` (`include/eyas/cuda_api.h`).

Takes torch CUDA tensors by address; torch is not imported. Every call checks its arguments, reports all faults at once with
the arguments' names, queues its work on `stream` (default: the caller's current torch stream) and allocates nothing, so it may
be captured in a CUDA graph. The library is looked for beside this file, or where `EYAS_CUDA_LIBRARY` points.

Shape letters: B requests, N queries of all requests together, T nodes of the largest tree, W = ceil(T / 32), H query heads,
G KV heads, D head width, S token slots, P pages.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from . import cuda_abi as abi

Tensor = Any  # a torch tensor, taken by what it offers: data_ptr, shape, stride, dtype, device


class CudaArgumentError(ValueError):
    """Arguments a kernel cannot take; the text names each of them."""


class CudaLaunchError(RuntimeError):
    """The library or the driver refused a launch."""


def library_path() -> Path:
    """Where the library is looked for."""
    return Path(os.environ.get("EYAS_CUDA_LIBRARY") or Path(__file__).with_name("libeyas_cuda.so"))


@cache
def _library() -> ctypes.CDLL:
    return abi.load(library_path())


def status() -> str:
    """`available`, or the reason why the kernels cannot be used in this process."""
    try:
        _library()
    except OSError as error:
        return str(error)
    torch = sys.modules.get("torch")
    if torch is not None and not torch.cuda.is_available():
        return "no CUDA device"
    return "available"


@dataclass(frozen=True)
class TileConfig:
    """Tile configuration of an attention launch; 0 lets the library choose for the device.

    Args:
        row_tile: packed rows per block (GQA: 32, 64, 128; width above 128: 16, 64. MLA: 64, 32).
        groups: groups of warps per block that walk the keys independently (GQA).
        stages: key tiles in flight per group.
        num_splits: parts the keys are cut into.
        overlap: let the combining kernel start before the attention kernel has ended (compute capability 9.0 and above).
        sm_count, smem_bytes: plan as if for a device with these; 101376 forces the shared memory of SM120.
    """

    row_tile: int = 0
    groups: int = 0
    stages: int = 0
    num_splits: int = 0
    overlap: bool = False
    sm_count: int = 0
    smem_bytes: int = 0


class Faults:
    """Collects what is wrong with a call's arguments."""

    def __init__(self, call: str) -> None:
        self.call, self.texts = call, list[str]()

    def need(self, true: object, text: str) -> bool:
        if not true:
            self.texts.append(text)
        return bool(true)

    def tensor(self, name: str, t: Tensor, dtypes: Sequence[str], dims: Sequence[int | None] | None = None) -> bool:
        """Checks device, dtype, shape (None: any size), packed last axis and 16-byte alignment of what is not an index."""
        if t is None:
            return self.need(False, f"{name} is missing")
        if not self.need(hasattr(t, "data_ptr"), f"{name} is a {type(t).__name__}, wanted a torch tensor"):
            return False
        good = self.need(t.device.type == "cuda", f"{name} is on {t.device}, wanted a CUDA device")
        kind = dtype_name(t)
        good &= self.need(kind in dtypes, f"{name} is {kind}, wanted {' or '.join(dtypes)}")
        shape = tuple(t.shape)
        if dims is not None:
            fits = len(shape) == len(dims) and all(d is None or s == d for s, d in zip(shape, dims, strict=True))
            wanted = ", ".join("any" if d is None else str(d) for d in dims)
            good &= self.need(fits, f"{name} has shape {list(shape)}, wanted [{wanted}]")
        packed = not shape or shape[-1] <= 1 or t.stride(-1) == 1
        good &= self.need(packed, f"{name} has stride {t.stride(-1) if shape else 0} in its last axis, wanted 1")
        return good

    def check(self) -> None:
        if self.texts:
            raise CudaArgumentError(f"{self.call}: " + "; ".join(self.texts))


def dtype_name(t: Tensor) -> str:
    return str(t.dtype).rsplit(".", 1)[-1]


def _pointer(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def _stream(stream: int | None) -> int:
    if stream is not None:
        return stream
    torch = sys.modules["torch"]  # the caller's tensors come from it
    return int(torch.cuda.current_stream().cuda_stream)


def _run(name: str, *args: Any) -> None:
    code = getattr(_library(), name)(*args)
    if code == 0:
        return
    text = f"{name}: {_library().eyas_cuda_error_text(code).decode()}"
    raise CudaArgumentError(text) if code >= 1000 else CudaLaunchError(f"{text} (cudaError {code})")


_MATH = ("bfloat16", "float16")
_DTYPE = {"bfloat16": abi.BF16, "float16": abi.FP16, "float8_e4m3fn": abi.E4M3}


def _attention(
    call: str,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    out: Tensor,
    kv_index: Tensor,
    seq_lens: Tensor,
    widths: tuple[int, int],
    *,
    max_tree: int,
    max_seq_len: int,
    scale: float,
    mask: Tensor | None,
    lse: Tensor | None,
    index_rows: Tensor | None,
    index_start: Tensor | None,
    q_start: Tensor | None,
    positions: Tensor | None,
    seq_lens_are_prefix: bool,
    window: int,
    k_scale: float,
    v_scale: float,
    config: TileConfig,
) -> abi.Attention:
    f = Faults(call)
    dk, dv = widths
    batch = seq_lens.shape[0] if hasattr(seq_lens, "shape") and len(seq_lens.shape) else 0
    if f.tensor("q", q, _MATH, (None, None, dk)):
        tokens, heads = q.shape[0], q.shape[1]
        f.tensor("out", out, (dtype_name(q),), (tokens, heads, dv))
        f.tensor("k", k, (dtype_name(q), "float8_e4m3fn"))
        if lse is not None:
            f.tensor("lse", lse, ("float32",), (tokens, heads))
        f.need(
            q_start is not None or tokens == batch * max_tree,
            f"q has {tokens} rows, wanted batch * max_tree = {batch * max_tree} (or q_start)",
        )
    f.check()
    f.need(
        len(k.shape) in (3, 4) and k.shape[-1] == dk,
        f"k has shape {list(k.shape)}, wanted [S, G, {dk}] or [P, page_size, G, {dk}]",
    )
    if v is not None and f.tensor("v", v, (dtype_name(k),), tuple(k.shape)):
        f.need(
            tuple(v.stride()) == tuple(k.stride()),
            f"v has strides {tuple(v.stride())}, wanted those of k, {tuple(k.stride())}",
        )
    f.need(1 <= max_tree <= 256, f"max_tree is {max_tree}, wanted 1 to 256 nodes")
    f.tensor("seq_lens", seq_lens, ("int64",), (None,))
    f.tensor("kv_index", kv_index, ("int32",), (None,) if index_start is not None else (None, None))
    for name, t, kind, size in (
        ("index_rows", index_rows, "int64", batch),
        ("index_start", index_start, "int32", None),
        ("q_start", q_start, "int32", batch + 1),
        ("positions", positions, "int64", q.shape[0]),
    ):
        if t is not None:
            f.tensor(name, t, (kind,), (size,))
    if mask is not None and f.tensor("mask", mask, ("int32", "uint32"), (batch, None, None)):
        f.need(
            mask.shape[1] >= max_tree and mask.shape[2] >= (max_tree + 31) // 32 and mask.stride(1) == mask.shape[2],
            f"mask has shape {list(mask.shape)}, wanted packed rows [{batch}, {max_tree}, {(max_tree + 31) // 32}]",
        )
        f.need(mask.shape[1] == max_tree or mask.stride(0) >= max_tree * mask.shape[2], "mask: requests overlap")
    f.need(
        window == 0 or (window > 0 and positions is not None),
        f"window is {window}: not negative, and positions are needed with one",
    )
    f.need(scale > 0, f"scale is {scale}, wanted a positive number")
    f.check()
    paged = len(k.shape) == 4
    a = abi.Attention(
        q_dtype=_DTYPE[dtype_name(q)],
        kv_dtype=_DTYPE[dtype_name(k)],
        head_dim=dk,
        q=_pointer(q),
        out=_pointer(out),
        lse=_pointer(lse),
        k=_pointer(k),
        v=_pointer(v),
        q_stride_token=q.stride(0),
        q_stride_head=q.stride(1),
        out_stride_token=out.stride(0),
        out_stride_head=out.stride(1),
        kv_stride_page=k.stride(0) if paged else 0,
        kv_stride_token=k.stride(1 if paged else 0),
        kv_stride_head=k.stride(-2),
        kv_index=_pointer(kv_index),
        index_rows=_pointer(index_rows),
        index_start=_pointer(index_start),
        index_stride=kv_index.stride(0) if len(kv_index.shape) == 2 else 0,
        q_start=_pointer(q_start),
        seq_lens=_pointer(seq_lens),
        mask=_pointer(mask),
        positions=_pointer(positions),
        mask_stride_batch=0 if mask is None else mask.stride(0),
        mask_words=0 if mask is None else mask.shape[2],
        page_size=k.shape[1] if paged else 1,
        batch=batch,
        max_tree=max_tree,
        num_q_heads=q.shape[1],
        num_kv_heads=k.shape[-2],
        seq_lens_are_prefix=int(seq_lens_are_prefix),
        window=window,
        max_seq_len=max_seq_len,
        scale=scale,
        k_scale=k_scale,
        v_scale=v_scale,
        num_splits=config.num_splits,
        groups=config.groups,
        stages=config.stages,
        row_tile=config.row_tile,
        flags=int(config.overlap),
    )
    a.struct_size = ctypes.sizeof(abi.Attention)
    return a


def _launch(kernel: str, a: abi.Attention, workspace: Tensor | None, config: TileConfig, stream: int | None) -> None:
    if config.sm_count or config.smem_bytes:
        _run(f"{kernel}_plan", ctypes.byref(a), config.sm_count, config.smem_bytes)
    if workspace is not None:
        f = Faults(kernel)
        f.tensor("workspace", workspace, ("uint8",), (None,))
        f.check()
        a.workspace, a.workspace_bytes = workspace.data_ptr(), workspace.shape[0]
    else:
        a.workspace, a.workspace_bytes = None, 0
    a.stream = _stream(stream)
    _run(kernel, ctypes.byref(a))


def attention_plan(
    kind: str,
    *,
    batch: int,
    max_tree: int,
    num_q_heads: int,
    num_kv_heads: int,
    max_seq_len: int,
    head_dim: int = 576,
    dtype: str = "bfloat16",
    kv_dtype: str | None = None,
    window: int = 0,
    config: TileConfig | None = None,
) -> dict[str, int]:
    """What a launch would use: num_splits, groups, stages, row_tile and workspace_bytes.

    Args:
        kind: "gqa" or "mla".
        dtype, kv_dtype: torch's dtype names; the cache's defaults to the queries'.

    Raises:
        CudaArgumentError: sizes no kernel serves, or a configuration that does not fit.
    """
    c = config or TileConfig()
    a = abi.Attention(
        struct_size=ctypes.sizeof(abi.Attention),
        q_dtype=_DTYPE[dtype],
        kv_dtype=_DTYPE[kv_dtype or dtype],
        head_dim=head_dim,
        batch=batch,
        max_tree=max_tree,
        num_q_heads=num_q_heads,
        num_kv_heads=num_kv_heads,
        window=window,
        max_seq_len=max_seq_len,
        num_splits=c.num_splits,
        groups=c.groups,
        stages=c.stages,
        row_tile=c.row_tile,
    )
    _run(f"eyas_tree_attn_{kind}_plan", ctypes.byref(a), c.sm_count, c.smem_bytes)
    return {name: getattr(a, name) for name in ("num_splits", "groups", "stages", "row_tile", "workspace_bytes")}


def tree_attn_gqa(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    kv_index: Tensor,
    seq_lens: Tensor,
    *,
    max_tree: int,
    max_seq_len: int,
    scale: float,
    mask: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
    index_rows: Tensor | None = None,
    index_start: Tensor | None = None,
    q_start: Tensor | None = None,
    positions: Tensor | None = None,
    seq_lens_are_prefix: bool = False,
    window: int = 0,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    config: TileConfig | None = None,
    stream: int | None = None,
) -> None:
    """Grouped-query attention of draft trees over a paged cache that already holds the trees' own keys and values.

    Args:
        q: bf16 or fp16 [N, H, D], D of 64, 96, 128, 192, 256. out: the same shape and dtype, written.
        k, v: caches of q's dtype or e4m3, [S, G, D] (kv_index holds token slots) or [P, page_size, G, D] (it holds pages).
        kv_index: i32 [rows, columns], row `index_rows[b]` (default b) for request b; or flat with `index_start` i32 [B].
        seq_lens: i64 [B] KV lengths, tree included unless `seq_lens_are_prefix`; read on the device.
        mask: 32-bit words [B, T, W], bit j of row i set: node i sees node j. None: a chain (causal).
        lse: f32 [N, H], written: natural log of the softmax denominators.
        workspace: u8 tensor of at least `attention_plan(...)["workspace_bytes"]`; may be None when that is 0.
        q_start: i32 [B + 1] first query of each request; None: every request has max_tree.
        positions: i64 [N] positions of the queries, needed with `window` (keys at distance >= window are hidden).
        max_seq_len: upper bound of the KV lengths, tree included; sets only the number of splits.
        k_scale, v_scale: what an e4m3 cache was divided by.

    Raises:
        CudaArgumentError: every argument that does not fit, by name.
        CudaLaunchError: the driver refused the launch.
    """
    c = config or TileConfig()
    a = _attention(
        "tree_attn_gqa",
        q,
        k,
        v,
        out,
        kv_index,
        seq_lens,
        (q.shape[-1], q.shape[-1]),
        max_tree=max_tree,
        max_seq_len=max_seq_len,
        scale=scale,
        mask=mask,
        lse=lse,
        index_rows=index_rows,
        index_start=index_start,
        q_start=q_start,
        positions=positions,
        seq_lens_are_prefix=seq_lens_are_prefix,
        window=window,
        k_scale=k_scale,
        v_scale=v_scale,
        config=c,
    )
    _launch("eyas_tree_attn_gqa", a, workspace, c, stream)


def tree_attn_mla(
    q: Tensor,
    cache: Tensor,
    out: Tensor,
    kv_index: Tensor,
    seq_lens: Tensor,
    *,
    max_tree: int,
    max_seq_len: int,
    scale: float,
    mask: Tensor | None = None,
    lse: Tensor | None = None,
    workspace: Tensor | None = None,
    index_rows: Tensor | None = None,
    index_start: Tensor | None = None,
    q_start: Tensor | None = None,
    positions: Tensor | None = None,
    seq_lens_are_prefix: bool = False,
    window: int = 0,
    k_scale: float = 1.0,
    config: TileConfig | None = None,
    stream: int | None = None,
) -> None:
    """Attention of draft trees over an absorbed MLA cache; arguments as in `tree_attn_gqa`, but:

    Args:
        q: bf16 or fp16 [N, H, 576], H up to 128: 512 absorbed components, then 64 rotary ones. out: [N, H, 512].
        cache: [S, 1, 576] or [P, page_size, 1, 576] of q's dtype or e4m3; its first 512 components are the values.
        k_scale: what an e4m3 cache was divided by.
    """
    c = config or TileConfig()
    a = _attention(
        "tree_attn_mla",
        q,
        cache,
        None,
        out,
        kv_index,
        seq_lens,
        (576, 512),
        max_tree=max_tree,
        max_seq_len=max_seq_len,
        scale=scale,
        mask=mask,
        lse=lse,
        index_rows=index_rows,
        index_start=index_start,
        q_start=q_start,
        positions=positions,
        seq_lens_are_prefix=seq_lens_are_prefix,
        window=window,
        k_scale=k_scale,
        v_scale=1.0,
        config=c,
    )
    _launch("eyas_tree_attn_mla", a, workspace, c, stream)


def lse_combine(
    outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor | None = None, *, stream: int | None = None
) -> None:
    """Merges attention over disjoint keys: outs bf16/fp16 [n, ..., D], lses f32 [n, ...] (natural log) -> out [..., D], lse [...]."""
    f = Faults("lse_combine")
    if f.tensor("outs", outs, _MATH):
        f.tensor("lses", lses, ("float32",), tuple(outs.shape[:-1]))
        f.tensor("out", out, (dtype_name(outs),), tuple(outs.shape[1:]))
        if lse is not None:
            f.tensor("lse", lse, ("float32",), tuple(outs.shape[1:-1]))
    f.check()
    for name, t in (("outs", outs), ("lses", lses), ("out", out)):
        f.need(t.is_contiguous(), f"{name} is not contiguous")
    f.check()
    n, dim = outs.shape[0], outs.shape[-1]
    rows = outs.numel() // max(1, n * dim)
    _run(
        "eyas_lse_combine",
        _pointer(outs),
        _pointer(lses),
        _pointer(out),
        _pointer(lse),
        n,
        rows,
        dim,
        _DTYPE[dtype_name(outs)],
        _stream(stream),
    )
