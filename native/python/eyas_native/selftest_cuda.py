"""Checks of every CUDA operation against the CPU backend, on the device at hand, without torch."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable
from functools import partial
from typing import Any

import eyas_native
from eyas_native import cuda
from eyas_native.cuda_core import LaunchError
from eyas_native.driver import Driver
from eyas_native.errors import ArgumentError
from eyas_native.selftest import Check, Memory
from eyas_native.selftest_arrays import CODES, VALUES, differing, floats, mask_of, put, random_tree, relative_error
from eyas_native.selftest_attention import attention_checks

LINKS = ("positions", "retrive_index", "retrive_next_token", "retrive_next_sibling")
def run(driver: Driver) -> list[Check]:
    """All checks; an operation that raises fails its check with the error as detail."""
    return [_guarded(driver, name, check) for name, check in checks().items()]


def checks() -> dict[str, Callable[[Driver], str]]:
    """What each check is called, and a function that returns what differs, or an empty text."""
    return {
        "tree_build": _build, "tree_from_mask, tree_validate": _from_mask, "verify_greedy, accept_commit": _greedy,
        "verify_target_only, verify_rejection": _sampled, "kv_move": _move, "hidden_gather": _gather,
        "lse_combine": _combine, **dict(attention_checks()),
    }  # fmt: skip


def _guarded(driver: Driver, name: str, check: Callable[[Driver], str]) -> Check:
    try:
        fault = check(driver)
    except (LaunchError, ArgumentError) as error:
        fault = str(error)
    finally:
        driver.release()
    return Check(f"cuda {name}", not fault, fault or "equal to the CPU's")


def _link_arrays(batch: int, n: int) -> dict[str, Memory]:
    return {name: Memory("q", (batch * n,) if name == "positions" else (batch, n)) for name in LINKS}


def _build(driver: Driver) -> str:
    faults = (_build_case(driver, n, mode) for n in (7, 16, 31, 53) for mode in range(4) if mode != 2 or n <= 32)
    return next(filter(None, faults), "")


def _build_case(driver: Driver, n: int, mode: int) -> str:
    rng, topk, batch, word, packed = random.Random(n), 4, 3, (n + 31) // 32, 1 if n <= 8 else 2 if n <= 16 else 4
    tables = [[-1, *range(4), *sorted(rng.sample(range(4, 20), 4)), *sorted(rng.sample(range(20, 36), 4))]
              for _ in range(batch)]  # fmt: skip
    lens = Memory("q", (batch,), [rng.randrange(300) for _ in range(batch)])
    lists = (Memory("q", (batch, 13), [entry for table in tables for entry in table]),
             Memory("q", (batch, n - 1), [entry for table in tables for entry in _select(rng, table, topk, n)]),
             lens)  # fmt: skip
    size = [n * (batch * n + sum(lens.values)), batch * n * n, batch * n * packed, 4 * batch * n * word][mode]
    mask, words = Memory("B", (size,)), Memory("i", (batch, n, word))
    build = partial(eyas_native.tree_build, *lists, topk=topk, depth=4, num_nodes=n)
    links: dict[str, Any] = _link_arrays(batch, n)
    build(mask_mode=mode, tree_mask=mask, **links)
    build(mask_mode=3, tree_mask=words, **links)
    found: dict[str, Any] = {name: driver.empty("int64", *links[name].shape) for name in LINKS}
    found |= {"tree_mask": driver.empty("uint8", size), "words": driver.empty("int32", *words.shape)}
    found["invalid"] = driver.empty("int32", batch)
    on_device = [put(driver, memory) for memory in lists]
    cuda.tree_build(*on_device, topk=topk, depth=4, num_nodes=n, mask_mode=mode, stream=0, **found)
    wanted = {**links, "tree_mask": mask, "words": words, "invalid": Memory("i", (batch,))}
    fault = differing(driver, {name: (found[name], wanted[name]) for name in wanted})
    return f"{fault}: {n} nodes, mask mode {mode}" if fault else ""


def _select(rng: random.Random, table: list[int], topk: int, n: int) -> list[int]:
    """n - 1 entries of the score table, rising, each with its parent among them."""
    chosen: list[int] = []
    free = list(range(4 * 13))
    while len(chosen) < n - 1:
        entry = rng.choice([e for e in free if e < topk or table[e // topk] in chosen])
        chosen.append(entry)
        free.remove(entry)
    return sorted(chosen)


def _from_mask(driver: Driver) -> str:
    rng = random.Random(0)
    for n in (1, 2, 33, 64, 256):
        mask = mask_of([random_tree(rng, n) for _ in range(3)])
        lens, links = Memory("q", (3,), [rng.randrange(10**6) for _ in range(3)]), _link_arrays(3, n)
        eyas_native.tree_from_mask(mask, lens, **links)
        on_device = {name: driver.empty("int64", *memory.shape) for name, memory in links.items()}
        cuda.tree_from_mask(put(driver, mask), put(driver, lens), stream=0, **on_device)
        if fault := differing(driver, {name: (on_device[name], links[name]) for name in LINKS}):
            return f"{fault}: {n} nodes"
        for _ in range(n // 2):
            mask.values[rng.randrange(len(mask.values))] ^= 1
        codes = driver.empty("uint8", 3, n)
        cuda.tree_validate(put(driver, mask), codes, stream=0)
        found = driver.get("B", codes)
        wanted = {(fault.request, fault.node) for fault in eyas_native.tree_validate(mask)}
        if {(i // n, i % n) for i, code in enumerate(found) if code} != wanted:
            return f"tree_validate differs: {n} nodes"
    return ""


def _verify(driver: Driver, sampled: str | None) -> str:
    """Trees of 16 nodes with few distinct tokens, so that long paths are accepted; what follows a verify too."""
    rng, batch, n, columns, vocab = random.Random(1), 6, 16, 6, 11
    links = _link_arrays(batch, n)
    eyas_native.tree_from_mask(mask_of([random_tree(rng, n) for _ in range(batch)]), Memory("q", (batch,)), **links)
    del links["positions"]
    arguments = {"candidates": Memory("q", (batch, n), [rng.randrange(3) for _ in range(batch * n)]), **links}
    if sampled is None:
        call = "verify_greedy"
        arguments["target_predict"] = Memory("q", (batch, n), [rng.randrange(3) for _ in range(batch * n)])
    else:
        call = sampled
        arguments["uniform"] = Memory("f", (batch, n), [rng.random() for _ in range(batch * n)])
        arguments["uniform_final"] = Memory("f", (batch,), [rng.random() for _ in range(batch)])
        arguments["target_probs"] = _distributions(rng, batch, n, vocab)
        if sampled == "verify_rejection":
            arguments["draft_probs"] = _distributions(rng, batch, n, vocab)
    out = {"predicts": Memory("i", (batch * n,)), "accept_index": Memory("i", (batch, columns)),
           "accept_token_num": Memory("i", (batch,))}  # fmt: skip
    on_device = {name: put(driver, memory) for name, memory in out.items()}
    getattr(eyas_native, call)(**out, **arguments)
    getattr(cuda, call)(**on_device, **{k: put(driver, x) for k, x in arguments.items()}, stream=0)
    if fault := differing(driver, {name: (on_device[name], out[name]) for name in out}):
        return f"{call}: {fault}"
    slots = Memory("q", (batch * n,), rng.sample(range(1000), batch * n))
    commit = {"accept_lens": Memory("i", (batch,)), "bonus": Memory("q", (batch,))}
    commit |= {name: Memory("q", (batch, columns)) for name in ("tokens", "src_loc", "tgt_loc", "rows")}
    committed = {name: driver.empty(memory.dtype.name, *memory.shape) for name, memory in commit.items()}
    eyas_native.accept_commit(**out, out_cache_loc=slots, **commit)
    cuda.accept_commit(**on_device, out_cache_loc=put(driver, slots), stream=0, **committed)
    fault = differing(driver, {name: (committed[name], commit[name]) for name in commit})
    return f"accept_commit: {fault}" if fault else ""


def _distributions(rng: random.Random, batch: int, n: int, vocab: int) -> Memory:
    rows = [[rng.random() ** 3 + 1e-3 for _ in range(vocab)] for _ in range(batch * n)]
    return Memory("f", (batch, n, vocab), [x / sum(row) for row in rows for x in row])


def _greedy(driver: Driver) -> str:
    return _verify(driver, None)


def _sampled(driver: Driver) -> str:
    return _verify(driver, "verify_target_only") or _verify(driver, "verify_rejection")


def _move(driver: Driver) -> str:
    pools = [Memory("i", (9, width), range(9 * width)) for width in (4, 36)]
    on_device = [put(driver, pool) for pool in pools]
    targets, sources = Memory("q", (2, 3), [0, 1, 2, 5, 6, -1]), Memory("q", (2, 3), [0, 2, 4, 7, 8, -1])
    eyas_native.kv_move(pools, Memory("q", (5,), targets.values[:5]), Memory("q", (5,), sources.values[:5]))
    cuda.kv_move(driver.put("int64", (2,), array("q", [pool.address for pool in on_device])),
                 driver.put("int64", (2,), array("q", [16, 144])), put(driver, targets), put(driver, sources),
                 stream=0)  # fmt: skip
    return differing(driver, {f"buffer {i}": pair for i, pair in enumerate(zip(on_device, pools, strict=True))})


def _halves(rng: random.Random, *shape: int) -> tuple[Memory, bytes]:
    """Values as float32, and their bf16 bytes."""
    values = rng.choices(VALUES, k=math.prod(shape))
    return Memory("f", shape, values), b"".join(map(CODES["bfloat16"].__getitem__, values))


def _gather(driver: Driver) -> str:
    rng, rows, width = random.Random(2), 9, 72
    sources = [_halves(rng, rows, width) for _ in range(3)]
    weight, index = _halves(rng, 3 * width), Memory("i", (5,), [8, 0, 3, 3, 7])
    for norm in cuda.NORMS:
        wanted, found = Memory("f", (5, 3 * width)), driver.empty("bfloat16", 5, 3 * width)
        weights = (None, None) if norm == "none" else (weight[0], driver.put("bfloat16", (3 * width,), weight[1]))
        eyas_native.hidden_gather([source[0] for source in sources], index, wanted, norm=norm, weight=weights[0])
        cuda.hidden_gather([driver.put("bfloat16", (rows, width), source[1]) for source in sources],
                           put(driver, index), found, norm=norm, weight=weights[1], stream=0)  # fmt: skip
        error = relative_error(floats(driver, found), wanted.values)
        if not error <= (0.0 if norm == "none" else 3e-3):
            return f"norm {norm}: relative error {error:.1e}"
    return ""


def _combine(driver: Driver) -> str:
    rng, n, rows, width = random.Random(3), 3, 5, 64
    parts, codes = _halves(rng, n, rows, width)
    lses = Memory("f", (n, rows), [rng.gauss(0, 2) for _ in range(n * rows)])
    out, lse = driver.empty("bfloat16", rows, width), driver.empty("float32", rows)
    cuda.lse_combine(driver.put("bfloat16", (n, rows, width), codes), put(driver, lses), out, lse, stream=0)
    sums = [sum(math.exp(lses.values[i * rows + r]) for i in range(n)) for r in range(rows)]
    wanted = [sum(math.exp(lses.values[i * rows + r]) / sums[r] * parts.values[(i * rows + r) * width + d]
                  for i in range(n)) for r in range(rows) for d in range(width)]  # fmt: skip
    lse_error = relative_error(driver.get("f", lse), [math.log(x) for x in sums])
    error = max(relative_error(floats(driver, out), wanted), lse_error)
    return "" if error <= 4e-3 else f"relative error {error:.1e}"
