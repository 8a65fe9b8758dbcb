"""Tree attention on CUDA: checked calls over `libeyas_cuda.so`; callers use `eyas_native.cuda`.

Shape letters: B requests, N queries of all requests together, T nodes of the largest tree, W = ceil(T / 32) (with
tree_keys: of these), H query heads, G KV heads, D head width, S token slots, P pages.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Required, TypedDict, Unpack

from eyas_native import cuda_abi as abi
from eyas_native.cuda_core import DTYPE, MATH, Faults, Tensor, current_stream, dtype_name, pointer, run


@dataclass(frozen=True)
class TileConfig:
    """Tile configuration of an attention launch; 0 lets the library choose for the device.

    Args:
        row_tile: packed rows per block (GQA: 32, 64, 128; width above 128: 16, 64. MLA: 64, 32).
        key_tile: keys per tile (GQA of width 128 and 128 rows: 64, 32).
        groups: groups of warps per block that walk the keys independently (GQA).
        stages: key tiles in flight per group, 2 or 3.
        num_splits: parts the keys are cut into.
        overlap: let the combining kernel start before the attention kernel has ended (9.0 and above).
        sm_count, smem_bytes: plan as if for a device with these; 101376 forces the shared memory of SM120.
    """

    row_tile: int = 0
    key_tile: int = 0
    groups: int = 0
    stages: int = 0
    num_splits: int = 0
    overlap: bool = False
    sm_count: int = 0
    smem_bytes: int = 0

    @property
    def flags(self) -> int:
        return abi.OVERLAP * self.overlap


class Options(TypedDict, total=False):
    """Keyword arguments of the attention calls.

    Args:
        max_tree: nodes of the largest tree, 1 to 256.
        max_seq_len: upper bound of the KV lengths, tree included; sets only the number of splits.
        scale: of the scores before the softmax.
        mask: 32-bit words [B, T, W], bit j of row i set: node i sees node j. None: a chain (causal). A batch stride of 0
            (an expanded tensor) is one mask for all.
        tree_keys: how many of a request's last keys the mask covers, 1 to 256, be they the queries' own or not: bit j of
            row i is the j-th of them for query i. With it, T queries of one step of a draft see the prefix and a choice of
            the slots behind it. Needs a mask; a window or positions are refused. 0: as many as the request has queries.
        lse: f32 [N, H], written: natural log of the softmax denominators.
        workspace: u8, at least `attention_plan(...)["workspace_bytes"]`; not needed when that is 0.
        index_rows: i64 [B], row of kv_index for each request; default row b.
        index_start: i32 [B], start of each request in a flat kv_index.
        q_start: i32 [B + 1], first query of each request; default: every request has max_tree.
        positions: i64 [N], positions of the queries; needed with a window.
        seq_lens_are_prefix: seq_lens exclude the trees' own entries (with tree_keys: so many).
        window: keys at this distance or more from the query's position are hidden; 0: none.
        k_scale, v_scale: what an e4m3 cache was divided by.
        config: tile configuration.
    """

    max_tree: Required[int]
    max_seq_len: Required[int]
    scale: Required[float]
    mask: Tensor | None
    tree_keys: int
    lse: Tensor | None
    workspace: Tensor | None
    index_rows: Tensor | None
    index_start: Tensor | None
    q_start: Tensor | None
    positions: Tensor | None
    seq_lens_are_prefix: bool
    window: int
    k_scale: float
    v_scale: float
    config: TileConfig


class Prepared:
    """A checked launch that costs one C call: same tensors, contents read anew. Call it with a stream, or none."""

    def __init__(self, kernel: str, arguments: abi.Attention, kept: object) -> None:
        self._kernel, self._arguments, self._kept = kernel, arguments, kept

    def __call__(self, stream: int | None = None) -> None:
        self._arguments.stream = current_stream(stream)
        run(self._kernel, ctypes.byref(self._arguments))


def _check_cache(f: Faults, k: Tensor, v: Tensor | None, width: int) -> None:
    paged = len(k.shape) in (3, 4) and k.shape[-1] == width
    f.need(paged, f"k has shape {list(k.shape)}, wanted [S, G, {width}] or [P, page_size, G, {width}]")
    if v is not None and f.tensor("v", v, (dtype_name(k),), tuple(k.shape)):
        f.need(
            tuple(v.stride()) == tuple(k.stride()), f"v has strides {tuple(v.stride())}, wanted k's {tuple(k.stride())}"
        )


def _check_mask(f: Faults, mask: Tensor, batch: int, max_tree: int, keys: int) -> None:
    if not f.tensor("mask", mask, ("int32", "uint32"), (batch, None, None)):
        return
    words = (keys + 31) // 32
    packed = mask.shape[1] >= max_tree and mask.shape[2] >= words and mask.stride(1) == mask.shape[2]
    f.need(packed, f"mask has shape {list(mask.shape)}, wanted packed rows [{batch}, {max_tree}, {words}]")


def _check_tree_keys(f: Faults, o: Options) -> None:
    keys = o.get("tree_keys", 0)
    f.need(0 <= keys <= 256, f"tree_keys is {keys}, wanted 1 to 256, or 0 for the queries' own")
    if keys:
        f.need(o.get("mask") is not None, "mask is missing, wanted with tree_keys")
        f.need(not o.get("window"), "window is given, wanted none with tree_keys")
        f.need(o.get("positions") is None, "positions are given, wanted none with tree_keys")


def _check(
    call: str,
    q: Tensor,
    k: Tensor,
    v: Tensor | None,
    out: Tensor,
    index: Tensor,
    lens: Tensor,
    dk: int,
    dv: int,
    o: Options,
) -> int:
    """Checks everything and returns the batch size."""
    f = Faults(call)
    f.tensor("q", q, MATH, (None, None, dk))
    f.tensor("k", k, (*MATH, "float8_e4m3fn"))
    f.tensor("seq_lens", lens, ("int64",), (None,))
    f.check()
    tokens, heads, batch, tree = q.shape[0], q.shape[1], lens.shape[0], o["max_tree"]
    f.tensor("out", out, (dtype_name(q),), (tokens, heads, dv))
    f.need(
        dtype_name(k) in (dtype_name(q), "float8_e4m3fn"), f"k is {dtype_name(k)}, wanted q's {dtype_name(q)} or e4m3"
    )
    _check_cache(f, k, v, dk)
    f.need(1 <= tree <= 256, f"max_tree is {tree}, wanted 1 to 256 nodes")
    flat = o.get("index_start") is not None
    f.tensor("kv_index", index, ("int32",), (None,) if flat else (None, None))
    tensors = {"index_rows": ("int64", batch), "index_start": ("int32", None), "q_start": ("int32", batch + 1),
               "positions": ("int64", tokens)}  # fmt: skip
    for name, (kind, size) in tensors.items():
        if (t := o.get(name)) is not None:
            f.tensor(name, t, (kind,), (size,))
    if (lse := o.get("lse")) is not None:
        f.tensor("lse", lse, ("float32",), (tokens, heads))
    if (mask := o.get("mask")) is not None:
        _check_mask(f, mask, batch, tree, o.get("tree_keys", 0) or tree)
    _check_tree_keys(f, o)
    if (workspace := o.get("workspace")) is not None:
        f.tensor("workspace", workspace, ("uint8",), (None,))
    even = o.get("q_start") is not None or tokens == batch * tree
    f.need(even, f"q has {tokens} rows, wanted batch * max_tree = {batch * tree}, or q_start")
    window = o.get("window", 0)
    f.need(window >= 0, f"window is {window}, wanted 0 or more")
    f.need(window == 0 or o.get("positions") is not None, "positions are missing, wanted with a window")
    f.need(o["scale"] > 0, f"scale is {o['scale']}, wanted a positive number")
    f.check()
    return int(batch)


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
    batch = _check(kernel, q, k, v, out, index, lens, dk, dv, o)
    c, paged, mask, workspace = o.get("config") or TileConfig(), len(k.shape) == 4, o.get("mask"), o.get("workspace")
    a = abi.Attention(
        struct_size=ctypes.sizeof(abi.Attention), q_dtype=DTYPE[dtype_name(q)], kv_dtype=DTYPE[dtype_name(k)],
        head_dim=dk,
        q=pointer(q), out=pointer(out), lse=pointer(o.get("lse")), k=pointer(k), v=pointer(v),
        q_stride_token=q.stride(0), q_stride_head=q.stride(1),
        out_stride_token=out.stride(0), out_stride_head=out.stride(1),
        kv_stride_page=k.stride(0) if paged else 0, kv_stride_token=k.stride(-3), kv_stride_head=k.stride(-2),
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
    return Prepared(f"eyas_{kernel}", a, (q, k, v, out, index, lens, o))


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
