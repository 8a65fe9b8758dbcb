"""What a call of tree attention on CUDA may be given, and every fault of it. See `cuda_attention` for the letters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Required, TypedDict

from eyas_native import cuda_abi as abi
from eyas_native.cuda_core import MATH, Faults, Tensor, dtype_name


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


def _check_cache(f: Faults, k: Tensor, v: Tensor | None, width: int) -> None:
    paged = len(k.shape) in (3, 4) and k.shape[-1] == width
    f.need(paged, f"k has shape {list(k.shape)}, wanted [S, G, {width}] or [P, page_size, G, {width}]")
    if v is not None and f.tensor("v", v, (dtype_name(k),), tuple(k.shape)):
        f.need(
            tuple(v.stride()) == tuple(k.stride()), f"v has strides {tuple(v.stride())}, wanted k's {tuple(k.stride())}"
        )


def _check_index(f: Faults, index: Tensor, o: Options, batch: int) -> None:
    start, rows = o.get("index_start"), o.get("index_rows")
    good = f.tensor("kv_index", index, ("int32",), (None, None) if start is None else (None,))
    if start is not None and f.tensor("index_start", start, ("int32",), (None,)):
        f.need(start.shape[0] >= batch, f"index_start has {start.shape[0]} entries, wanted {batch} as seq_lens")
    if rows is not None:
        f.tensor("index_rows", rows, ("int64",), (batch,))
    elif good and start is None:
        f.need(index.shape[0] >= batch, f"kv_index has {index.shape[0]} rows, wanted {batch} as seq_lens, or index_rows")


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


def check_attention(
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
    _check_index(f, index, o, batch)
    if (q_start := o.get("q_start")) is not None:
        f.tensor("q_start", q_start, ("int32",), (batch + 1,))
    if (positions := o.get("positions")) is not None:
        f.tensor("positions", positions, ("int64",), (tokens,))
    if (lse := o.get("lse")) is not None and f.tensor("lse", lse, ("float32",), (tokens, heads)):
        f.contiguous(lse=lse)
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
