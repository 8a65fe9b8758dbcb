"""eyas_native's attention on the CPU against torch's SDPA with a mask, for the same work, side by side.

    python benchmarks/native_cpu.py [--out benchmarks/results/native_cpu.json]

Both start from what an engine has: queries, a pool of keys and values, and the slots of the request. SDPA's keys are
gathered from the pool, as SGLang's torch backend does; its mask is made beforehand. Two variants of SDPA are timed
(enable_gqa, and KV heads expanded), the faster one counts. "in place" is SDPA alone, keys gathered and laid out for it
beforehand: not the same work, shown to tell the kernel from the gather.
Times are the least of several rounds in which both take turns, since other work on the machine only ever adds. With one
thread they are that thread's processor time, which other work on the machine does not enter; with more (--threads, of
both alike: they share one OpenMP) they are wall time, for a machine that does nothing else. The load before the run is
recorded.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Callable
from pathlib import Path

import torch
from host import processor

import eyas_native

Q_HEADS, KV_HEADS, DIM = 9, 3, 64
SECONDS_PER_CASE = 1.5


def tree_mask(nodes: int) -> torch.Tensor:
    rng = random.Random(nodes)
    mask = torch.eye(nodes, dtype=torch.bool)
    for node in range(1, nodes):
        mask[node] |= mask[rng.randrange(node)]
    return mask


def best_times(calls: dict[str, Callable[[], object]], clock: Callable[[], float]) -> dict[str, float]:
    """Least microseconds of each call; the calls take turns."""
    best = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call()
    until = time.perf_counter() + SECONDS_PER_CASE
    while time.perf_counter() < until:
        for name, call in calls.items():
            start = clock()
            call()
            best[name] = min(best[name], (clock() - start) * 1e6)
    return best


def measure(kind: str, prefix: int, queries: int, dtype: torch.dtype) -> dict[str, object]:
    keys = prefix + queries
    k_pool, v_pool = (torch.randn(2 * keys, KV_HEADS, DIM).to(dtype) for _ in range(2))
    slots = torch.randperm(2 * keys)[:keys]
    q = torch.randn(queries, Q_HEADS, DIM).to(dtype)
    out = torch.empty_like(q)
    own = tree_mask(queries) if kind == "tree" else torch.ones(queries, queries, dtype=torch.bool).tril()
    seen = torch.cat([torch.ones(queries, prefix, dtype=torch.bool), own], dim=1)
    table = (slots.to(torch.int32)[None].contiguous(), torch.tensor([0]), torch.tensor([keys]))
    scale = DIM**-0.5

    def ours() -> None:
        if kind == "decode":
            eyas_native.decode_attention(q, k_pool, v_pool, out, *table, scale=scale)
        else:
            mask = own.flatten() if kind == "tree" else None
            extend = (torch.tensor([queries]), torch.tensor([0]))
            eyas_native.tree_attention(q, k_pool, v_pool, out, *table, *extend, scale=scale, tree_mask=mask)

    sdpa, group = torch.nn.functional.scaled_dot_product_attention, Q_HEADS // KV_HEADS
    q_heads_first = q.transpose(0, 1)[None]

    def gathered() -> list[torch.Tensor]:
        return [pool[slots].transpose(0, 1)[None] for pool in (k_pool, v_pool)]

    def expanded() -> torch.Tensor:
        k, v = (x.repeat_interleave(group, 1) for x in gathered())
        return sdpa(q_heads_first, k, v, attn_mask=seen)

    ready = [q_heads_first.contiguous(), *(x.contiguous() for x in gathered())]
    calls: dict[str, Callable[[], object]] = {
        "eyas": ours,
        "sdpa_gqa": lambda: sdpa(q_heads_first, *gathered(), attn_mask=seen, enable_gqa=True),
        "sdpa_expanded": expanded,
        "sdpa_in_place": lambda: sdpa(*ready, attn_mask=seen, enable_gqa=True),
    }
    times = best_times(calls, time.thread_time if torch.get_num_threads() == 1 else time.perf_counter)
    difference = (out.float() - expanded()[0].transpose(0, 1).float()).abs().max().item()
    ratio = min(times["sdpa_gqa"], times["sdpa_expanded"]) / times["eyas"]
    case = f"{kind}-gqa{Q_HEADS}/{KV_HEADS}-d{DIM}-L{prefix}-T{queries}-{str(dtype).removeprefix('torch.')}"
    in_place = times["sdpa_in_place"] / times["eyas"]
    columns = "   ".join(f"{name} {microseconds:6.0f}" for name, microseconds in times.items())
    print(f"{case:40} us: {columns}   {ratio:5.2f} times faster, {in_place:5.2f} in place", flush=True)
    return {"case": case, "us": times, "faster": ratio, "max_difference": difference}


def cases() -> list[tuple[str, int, int]]:
    prefixes = (256, 1024, 4096)
    trees = [("tree", prefix, nodes) for prefix in prefixes for nodes in (6, 16, 64)]
    return [("decode", prefix, 1) for prefix in prefixes] + trees + [("prefill", prefix, 512) for prefix in (0, 1024)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, help="JSON file for the results")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    found = eyas_native.build_info()["threads"]
    if found != options.threads:
        raise SystemExit(f"--threads: eyas_native would use {found} threads, torch {options.threads}. Wanted: one "
                         "OpenMP in the process, by this benchmark. Use a torch that loads the system's libgomp.")
    load = round(os.getloadavg()[0], 2)
    rows = [measure(*case, dtype) for dtype in (torch.float32, torch.bfloat16) for case in cases()]
    machine = {"processor": processor(), "threads": options.threads, "isa": eyas_native.isa(), "load_before": load}
    versions = {"eyas_native": eyas_native.build_info()["version"], "torch": torch.__version__}
    print(f"least ratio {min(float(str(row['faster'])) for row in rows):.2f} on {machine}, {versions}")
    if options.out:
        options.out.write_text(json.dumps({"machine": machine, "versions": versions, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
