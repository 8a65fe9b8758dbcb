"""How fast the CUDA kernels are on the device at hand, in a few seconds: the numbers of a report, not a benchmark."""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable
from typing import Any

from eyas_native import cuda
from eyas_native.driver import Driver
from eyas_native.selftest_arrays import bf16

_MIB = 1 << 20


def run(driver: Driver) -> list[dict[str, Any]]:
    """Medians with a cold L2 cache, bf16: [{"case", "us", "gbps" (bytes that must be moved, per time)}].

    Cases are written as in benchmarks/verify_attention.py: gqa<heads>/<KV heads>-d<width>-B<batch>-L<keys>-T<nodes>.
    """
    rows = [_copy(driver)]
    for keys, nodes in ((8192, 16), (32768, 16), (32768, 64)):
        rows.append(_attention(driver, keys, nodes, 64, 8, 128))
    for heads in (8, 64):
        rows.append(_attention(driver, 8192, 16, heads, 1, 576))
    return [*rows, _gather(driver, 512)]


def _row(driver: Driver, case: str, moved: int, launch: Callable[[], None]) -> dict[str, Any]:
    time = driver.microseconds(launch, driver.empty("uint8", 256 * _MIB))
    driver.release()
    return {"case": case, "us": round(time, 1), "gbps": round(moved / time / 1000)}


def _copy(driver: Driver) -> dict[str, Any]:
    source, target = (driver.empty("uint8", 256 * _MIB) for _ in range(2))
    return _row(driver, "copy-256MiB", 512 * _MIB, lambda: driver.copy(target, source))


def _pattern(seed: int) -> bytes:
    return bf16(random.Random(seed).choices(range(80), k=65521))  # a prime, so that no two keys are alike


def _attention(driver: Driver, keys: int, nodes: int, heads: int, kv_heads: int, width: int) -> dict[str, Any]:
    mla = width == 576
    shape = (keys, kv_heads, width)
    caches = [driver.empty("bfloat16", *shape) for _ in range(1 if mla else 2)]
    out = driver.empty("bfloat16", nodes, heads, 512 if mla else width)
    queries = driver.empty("bfloat16", nodes, heads, width)
    for seed, filled in enumerate((queries, *caches)):
        driver.repeat(filled, _pattern(seed))
    plan = cuda.attention_plan(
        "mla" if mla else "gqa", batch=1, max_tree=nodes, num_q_heads=heads, num_kv_heads=kv_heads, max_seq_len=keys,
        head_dim=width,
    )  # fmt: skip
    prepare: Callable[..., cuda.Prepared] = cuda.prepare_mla if mla else cuda.prepare_gqa
    slots = driver.put("int32", (1, keys), array("i", random.Random(0).sample(range(keys), keys)))
    launch = prepare(
        queries, *caches, out, slots, driver.put("int64", (1,), array("q", [keys])), max_tree=nodes, max_seq_len=keys,
        scale=width**-0.5, workspace=driver.empty("uint8", max(1, plan["workspace_bytes"])),
    )  # fmt: skip
    name = f"mla{heads}" if mla else f"gqa{heads}/{kv_heads}-d{width}"
    moved = 2 * keys * kv_heads * width * len(caches)
    return _row(driver, f"{name}-B1-L{keys}-T{nodes}", moved, lambda: launch(0))


def _gather(driver: Driver, rows: int) -> dict[str, Any]:
    width = 7168
    sources = [driver.empty("bfloat16", 2 * rows, width) for _ in range(3)]
    out, order = driver.empty("bfloat16", rows, 3 * width), random.Random(0).sample(range(2 * rows), rows)
    index = driver.put("int32", (rows,), array("i", order))
    return _row(driver, f"gather-3x{width}-N{rows}", 2 * 2 * rows * 3 * width,
                lambda: cuda.hidden_gather(sources, index, out, stream=0))  # fmt: skip
