"""Tree attention on CUDA: checked calls over `libeyas_cuda.so`; callers use `eyas_native.cuda`.

Shape letters: B requests, N queries of all requests together, T nodes of the largest tree, W = ceil(T / 32) (with
tree_keys: of these), H query heads, G KV heads, D head width, S token slots, P pages.
"""

from __future__ import annotations

import ctypes
from typing import Unpack

from eyas_native import cuda_abi as abi
from eyas_native.cuda_core import (
    DTYPE,
    MATH,
    Faults,
    Tensor,
    current_device,
    current_stream,
    dtype_name,
    pointer,
    run,
)
from eyas_native.cuda_options import Options, TileConfig, check_attention
from eyas_native.errors import ArgumentError


class Prepared:
    """A checked launch that costs one C call: same tensors, contents read anew. Call it with a stream, or none."""

    def __init__(self, kernel: str, arguments: abi.Attention, device: object, kept: object) -> None:
        self._kernel, self._arguments, self._kept = kernel, arguments, kept
        self._device = getattr(device, "index", None)  # None: of an array of driver.py's, which has one device alone

    def __call__(self, stream: int | None = None) -> None:
        if self._device is not None and self._device != (current := current_device()):
            raise ArgumentError(self._kernel, f"prepared for cuda:{self._device}, launched from cuda:{current}",
                                "torch's current device to be that of the tensors")  # fmt: skip
        self._arguments.stream = current_stream(stream)
        run(self._kernel, ctypes.byref(self._arguments))


def _prepare(
    kernel: str,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    out: Tensor,
    index: Tensor,
    lens: Tensor,
    dk: int,
    dv: int,
    o: Options,
) -> Prepared:
    batch = check_attention(kernel, q, k, v, out, index, lens, dk, dv, o)
    c, paged, mask, workspace = o.get("config") or TileConfig(), len(k.shape) == 4, o.get("mask"), o.get("workspace")
    slots = not paged or k.shape[1] == 1  # a page of one token is a slot, however the slots lie
    a = abi.Attention(
        struct_size=ctypes.sizeof(abi.Attention), q_dtype=DTYPE[dtype_name(q)], kv_dtype=DTYPE[dtype_name(k)],
        head_dim=dk,
        q=pointer(q), out=pointer(out), lse=pointer(o.get("lse")), k=pointer(k), v=pointer(v),
        q_stride_token=q.stride(0), q_stride_head=q.stride(1),
        out_stride_token=out.stride(0), out_stride_head=out.stride(1),
        kv_stride_page=k.stride(0) if paged else 0, kv_stride_token=k.stride(0 if slots else 1), kv_stride_head=k.stride(-2),
        kv_index=pointer(index), index_rows=pointer(o.get("index_rows")), index_start=pointer(o.get("index_start")),
        index_stride=index.stride(0) if len(index.shape) == 2 else 0,
        q_start=pointer(o.get("q_start")), seq_lens=pointer(lens), mask=pointer(mask),
        positions=pointer(o.get("positions")),
        mask_stride_batch=0 if mask is None else mask.stride(0), mask_words=0 if mask is None else mask.shape[2],
        page_size=k.shape[1] if paged else 1, batch=batch, max_tree=o["max_tree"], num_q_heads=q.shape[1],
        num_kv_heads=k.shape[-2], tree_keys=o.get("tree_keys", 0),
        seq_lens_are_prefix=int(o.get("seq_lens_are_prefix", False)), window=o.get("window", 0),
        max_seq_len=o["max_seq_len"], scale=o["scale"], k_scale=o.get("k_scale", 1.0), v_scale=o.get("v_scale", 1.0),
        num_splits=c.num_splits, groups=c.groups, stages=c.stages, row_tile=c.row_tile, key_tile=c.key_tile,
        flags=c.flags,
    )  # fmt: skip
    run(f"eyas_{kernel}_plan", ctypes.byref(a), c.sm_count, c.smem_bytes)
    a.workspace, a.workspace_bytes = pointer(workspace), 0 if workspace is None else workspace.shape[0]
    return Prepared(f"eyas_{kernel}", a, q.device, (q, k, v, out, index, lens, o))


def attention_plan(
    kind: str, *, batch: int, max_tree: int, num_q_heads: int, num_kv_heads: int, max_seq_len: int, head_dim: int = 576,
    dtype: str = "bfloat16", kv_dtype: str | None = None, window: int = 0, config: TileConfig | None = None,
) -> dict[str, int]:  # fmt: skip
    """What a launch would use: num_splits, groups, stages, row_tile, key_tile and workspace_bytes.

    Args:
        kind: "gqa" or "mla".
        dtype, kv_dtype: torch's dtype names; the cache's defaults to the queries'.

    Raises:
        ArgumentError: sizes no kernel serves, or a configuration that does not fit.
    """
    c = config or TileConfig()
    a = abi.Attention(
        struct_size=ctypes.sizeof(abi.Attention), q_dtype=DTYPE[dtype], kv_dtype=DTYPE[kv_dtype or dtype],
        head_dim=head_dim,
        batch=batch, max_tree=max_tree, num_q_heads=num_q_heads, num_kv_heads=num_kv_heads, window=window,
        max_seq_len=max_seq_len, num_splits=c.num_splits, groups=c.groups, stages=c.stages, row_tile=c.row_tile,
        key_tile=c.key_tile, flags=c.flags,
    )  # fmt: skip
    run(f"eyas_tree_attn_{kind}_plan", ctypes.byref(a), c.sm_count, c.smem_bytes)
    chosen = ("num_splits", "groups", "stages", "row_tile", "key_tile", "workspace_bytes")
    return {name: getattr(a, name) for name in chosen}


def prepare_gqa(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, kv_index: Tensor, seq_lens: Tensor, **options: Unpack[Options]
) -> Prepared:
    """`tree_attn_gqa`, checked now and launched by calling the result."""
    width = q.shape[-1] if hasattr(q, "shape") and len(q.shape) else 0
    return _prepare("tree_attn_gqa", q, k, v, out, kv_index, seq_lens, width, width, options)


def tree_attn_gqa(
    q: Tensor, k: Tensor, v: Tensor, out: Tensor, kv_index: Tensor, seq_lens: Tensor, **options: Unpack[Options]
) -> None:
    """Grouped-query attention of draft trees over a paged cache that already holds the trees' own keys and values.

    Queues its work on torch's current stream; nothing is allocated, so it may be captured in a CUDA graph.

    Args:
        q: bf16 or fp16 [N, H, D], D of 64, 96, 128, 192, 256. out: the same shape and dtype, written.
        k, v: caches of q's dtype or e4m3, [S, G, D] (kv_index holds slots) or [P, page_size, G, D] (it holds pages).
        kv_index: i32 [rows, columns], or flat with index_start. Entries of keys below seq_lens must be valid.
        seq_lens: i64 [B] KV lengths, tree included unless seq_lens_are_prefix; read on the device.
        options: see Options.

    Raises:
        ArgumentError: every argument that does not fit, by name.
        LaunchError: the driver refused the launch.
    """
    prepare_gqa(q, k, v, out, kv_index, seq_lens, **options)()


def prepare_mla(
    q: Tensor, cache: Tensor, out: Tensor, kv_index: Tensor, seq_lens: Tensor, **options: Unpack[Options]
) -> Prepared:
    """`tree_attn_mla`, checked now and launched by calling the result."""
    return _prepare("tree_attn_mla", q, cache, None, out, kv_index, seq_lens, 576, 512, options)


def tree_attn_mla(
    q: Tensor, cache: Tensor, out: Tensor, kv_index: Tensor, seq_lens: Tensor, **options: Unpack[Options]
) -> None:
    """Attention of draft trees over an absorbed MLA cache; as `tree_attn_gqa`, but:

    Args:
        q: bf16 or fp16 [N, H, 576], H up to 128: 512 absorbed components, then 64 rotary ones. out: [N, H, 512].
        cache: [S, 1, 576] or [P, page_size, 1, 576] of q's dtype or e4m3 (divided by k_scale); its first 512
            components are the values.
    """
    prepare_mla(q, cache, out, kv_index, seq_lens, **options)()


def lse_combine(
    outs: Tensor, lses: Tensor, out: Tensor, lse: Tensor | None = None, *, stream: int | None = None
) -> None:
    """Merges attention over disjoint keys.

    Args:
        outs: bf16 or fp16 [n, ..., D]; lses: f32 [n, ...], natural log. out [..., D] and lse [...] are written.
    """
    f = Faults("lse_combine")
    if f.tensor("outs", outs, MATH):
        f.tensor("lses", lses, ("float32",), tuple(outs.shape[:-1]))
        f.tensor("out", out, (dtype_name(outs),), tuple(outs.shape[1:]))
        if lse is not None:
            f.tensor("lse", lse, ("float32",), tuple(outs.shape[1:-1]))
    f.check()
    f.contiguous(outs=outs, lses=lses, out=out, lse=lse)
    f.check()
    n, dim = outs.shape[0], outs.shape[-1]
    rows = outs.numel() // max(1, n * dim)
    kind = DTYPE[dtype_name(outs)]
    run(
        "eyas_lse_combine",
        pointer(outs),
        pointer(lses),
        pointer(out),
        pointer(lse),
        n,
        rows,
        dim,
        kind,
        current_stream(stream),
    )
