"""Checks of the CUDA attention: every head width, dtype and cache dtype, as planned for the device at hand and as for
SM120, where a block has 101,376 bytes of shared memory.
"""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Iterator
from functools import cache, partial

import eyas_native
from eyas_native import cuda
from eyas_native.driver import Driver
from eyas_native.selftest import Memory
from eyas_native.selftest_arrays import CODES, VALUES, floats, mask_of, put, random_tree, relative_error

PLANS = {"as planned here": cuda.TileConfig(), "as on SM120, split": cuda.TileConfig(smem_bytes=101376, num_splits=3)}
_TOLERANCE = {"bfloat16": 6e-3, "float16": 1.5e-3}  # ||out - ref|| / ||ref||; probabilities and result are rounded once
_DTYPES = (("bfloat16", "bfloat16"), ("float16", "float16"), ("bfloat16", "float8_e4m3fn"))
_HEADS, _KEYS, _SLOTS, _MLA = 8, 300, 309, 576
_TREE, _STEP = (16, 0), (4, 20)  # queries and tree_keys: a draft tree; a step of a draft that sees a choice of 20 keys
Case = tuple[Memory, list[Memory], Memory, Memory, Memory, Memory]


def attention_checks() -> Iterator[tuple[str, Callable[[Driver], str]]]:
    """Name and check of each; a check returns what differs from the CPU's float32 result, or an empty text."""
    for width in (64, 96, 128, 192, 256, _MLA):
        kind = "tree_attn_mla" if width == _MLA else f"tree_attn_gqa {width}"
        for dtype, kv_dtype in _DTYPES:
            for plan, config in PLANS.items():
                yield f"{kind} {kv_dtype}, {plan}", partial(_check, width, _TREE, dtype, kv_dtype, config)
        yield f"{kind}, a draft's step", partial(_check, width, _STEP, "bfloat16", "bfloat16", cuda.TileConfig())


@cache
def _case(width: int, size: tuple[int, int]) -> Case:
    """queries, caches, table of slots, mask, result and lse of a request; 576 is MLA, its values are the first 512."""
    rng, mla, (n, tree_keys) = random.Random(width), width == _MLA, size
    kv_heads, out_width = (1, 512) if mla else (2, width)
    q = Memory("f", (n, _HEADS, width), rng.choices(VALUES, k=n * _HEADS * width))
    k = Memory("f", (_SLOTS, kv_heads, width), rng.choices(VALUES, k=_SLOTS * kv_heads * width))
    if mla:
        values = [x for slot in range(_SLOTS) for x in k.values[slot * width : slot * width + out_width]]
    else:
        values = rng.choices(VALUES, k=_SLOTS * kv_heads * width)
    v = Memory("f", (_SLOTS, kv_heads, out_width), values)
    table = Memory("i", (1, _KEYS), rng.sample(range(_SLOTS), _KEYS))
    sees = [rng.randrange(2) for _ in range(n * tree_keys)] if tree_keys else mask_of([random_tree(rng, n)]).values
    mask = Memory("B", (len(sees),), sees)
    out, lse = Memory("f", (n, _HEADS, out_width)), Memory("f", (n, _HEADS))
    eyas_native.tree_attention(
        q, k, v, out, table, Memory("q", (1,)), Memory("q", (1,), [_KEYS]), Memory("q", (1,), [n]),
        Memory("q", (1,)), scale=width**-0.5, tree_mask=mask, tree_keys=tree_keys, lse=lse,
    )  # fmt: skip
    return q, [k] if mla else [k, v], table, mask, out, lse


def _check(
    width: int, size: tuple[int, int], dtype: str, kv_dtype: str, config: cuda.TileConfig, driver: Driver
) -> str:
    q, caches, table, mask, wanted, wanted_lse = _case(width, size)
    n, columns = size[0], size[1] or size[0]
    kind = "mla" if width == _MLA else "gqa"
    prepare: Callable[..., cuda.Prepared] = cuda.prepare_mla if width == _MLA else cuda.prepare_gqa
    plan = cuda.attention_plan(
        kind, batch=1, max_tree=n, num_q_heads=_HEADS, num_kv_heads=caches[0].shape[1], max_seq_len=_KEYS,
        head_dim=width, dtype=dtype, kv_dtype=kv_dtype, config=config,
    )  # fmt: skip
    rows = [mask.values[i : i + columns] for i in range(0, n * columns, columns)]
    words = [sum(bit << j for j, bit in enumerate(row)) for row in rows]
    out, lse = driver.empty(dtype, *wanted.shape), driver.empty("float32", *wanted_lse.shape)
    queries = driver.put(dtype, q.shape, b"".join(map(CODES[dtype].__getitem__, q.values)))
    stored = [driver.put(kv_dtype, x.shape, _stored(x, kv_dtype, table)) for x in caches]
    lens = driver.put("int64", (1,), array("q", [_KEYS]))
    launch = prepare(
        queries, *stored, out, put(driver, table), lens, max_tree=n, max_seq_len=_KEYS, scale=width**-0.5, lse=lse,
        mask=driver.put("int32", (1, n, 1), array("I", words)), tree_keys=size[1], config=config,
        workspace=driver.empty("uint8", max(1, plan["workspace_bytes"])),
    )  # fmt: skip
    launch(0)
    error = relative_error(floats(driver, out), wanted.values)
    off = max(abs(a - b) for a, b in zip(driver.get("f", lse), wanted_lse.values, strict=True))
    return "" if error < _TOLERANCE[dtype] and off < 2e-3 else f"relative error {error:.1e}, lse off by {off:.1e}"


def _stored(memory: Memory, dtype: str, table: Memory) -> bytes:
    """The slots in use as `dtype`, all others NaN."""
    row, used = math.prod(memory.shape[1:]), set(table.values)
    nan = {"bfloat16": b"\xff\x7f", "float16": b"\xff\x7f", "float8_e4m3fn": b"\x7f"}[dtype] * row
    code = CODES[dtype].__getitem__
    rows = (memory.values[i * row : i * row + row] if i in used else None for i in range(memory.shape[0]))
    return b"".join(nan if values is None else b"".join(map(code, values)) for values in rows)
