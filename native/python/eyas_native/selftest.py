"""Checks of every operation on the machine at hand. Standard library only: it runs wherever the package does."""

from __future__ import annotations

import math
import random
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import eyas_native
from eyas_native.errors import ArgumentError

_TYPES = {"f": "float32", "i": "int32", "q": "int64", "B": "uint8"}


class Memory:
    """The least that the operations need of an array: a shape over a standard-library array."""

    def __init__(self, code: str, shape: tuple[int, ...], values: Any = None) -> None:
        size = math.prod(shape)
        self.values = array(code, values if values is not None else [0] * size)
        assert len(self.values) == size, (shape, len(self.values))
        self.shape, self.itemsize = shape, self.values.itemsize
        self.dtype, self.flags = _Dtype(_TYPES[code]), _Flags()

    @property
    def strides(self) -> tuple[int, ...]:
        """Bytes, as numpy's."""
        return tuple(self.itemsize * math.prod(self.shape[axis + 1 :]) for axis in range(len(self.shape)))

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"data": (self.values.buffer_info()[0], False)}


@dataclass(frozen=True)
class _Dtype:
    name: str
    isnative: bool = True


@dataclass(frozen=True)
class _Flags:
    writeable: bool = True


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    name: str
    passed: bool
    detail: str

    def __str__(self) -> str:
        return f"{'ok  ' if self.passed else 'FAIL'}  {self.name:40} {self.detail}"


def run() -> list[Check]:
    """All checks; attention once for each instruction set that runs here."""
    exact = {
        "tree_build": _tree,
        "tree_from_mask": _tree_from_mask,
        "tree_validate": _validate,
        "verify_greedy": _verify,
        "accept_commit": _commit,
        "kv_write": _write,
        "kv_move": _move,
        "hidden_gather": _gather,
        "bad arguments are refused": _refusals,
    }
    checks = [_exact(name, check) for name, check in exact.items()]
    try:
        for isa in eyas_native.build_info()["isas"]:
            eyas_native.set_isa(isa)
            checks += list(_attention(isa))
    finally:
        eyas_native.set_isa(None)
    return checks


def _exact(name: str, check: Callable[[], bool]) -> Check:
    passed = check()
    return Check(name, passed, "equal" if passed else "differs")


_PARENTS = (-1, 0, 0, 1, 1, 2)  # node 3 and 4 hang from 1, 5 from 2


def _mask() -> list[int]:
    rows: list[list[int]] = []
    for node, parent in enumerate(_PARENTS):
        seen = list(rows[parent]) if node else [0] * len(_PARENTS)
        seen[node] = 1
        rows.append(seen)
    return [seen for row in rows for seen in row]


def _links() -> dict[str, Memory]:
    names = ("retrive_index", "retrive_next_token", "retrive_next_sibling")
    return {"positions": Memory("q", (6,)), **{name: Memory("q", (1, 6)) for name in names}}


def _links_are_right(links: dict[str, Memory]) -> bool:
    return [list(links[name].values) for name in links] == [
        [10, 11, 11, 12, 12, 12],
        [0, 1, 2, 3, 4, 5],
        [1, 3, 5, -1, -1, -1],
        [-1, 2, -1, 4, -1, -1],
    ]


def _tree() -> bool:
    # topk 2: candidates 0, 1 hang from the root, 2, 3 from candidate 0 (slot 1), 4, 5 from candidate 1 (slot 2)
    links, mask = _links(), Memory("B", (36,))
    eyas_native.tree_build(
        Memory("q", (1, 3), [-1, 0, 1]),
        Memory("q", (1, 5), [0, 1, 2, 3, 4]),
        Memory("q", (1,), [10]),
        topk=2,
        depth=2,
        num_nodes=6,
        mask_mode=eyas_native.MASK_TREE_ONLY,
        tree_mask=mask,
        **links,
    )
    return _links_are_right(links) and list(mask.values) == _mask()


def _tree_from_mask() -> bool:
    links = _links()
    eyas_native.tree_from_mask(Memory("B", (1, 6, 6), _mask()), Memory("q", (1,), [10]), **links)
    return _links_are_right(links)


def _validate() -> bool:
    broken = _mask()
    broken[3 * 6 + 2] = 1  # node 3 sees its parent's sibling
    proper = eyas_native.tree_validate(Memory("B", (1, 6, 6), _mask()))
    return proper == () and [fault.node for fault in eyas_native.tree_validate(Memory("B", (1, 6, 6), broken))] == [3]


def _verify() -> bool:
    links = _links()
    eyas_native.tree_from_mask(Memory("B", (1, 6, 6), _mask()), Memory("q", (1,), [10]), **links)
    predicts, accepted, count = Memory("i", (6,), [-7] * 6), Memory("i", (1, 4)), Memory("i", (1,))
    candidates = Memory("q", (1, 6), [100, 101, 102, 103, 104, 105])
    target = Memory("q", (1, 6), [101, 104, 0, 0, 55, 0])  # root -> 1 -> 4, then 55 is the bonus
    links.pop("positions")
    eyas_native.verify_greedy(predicts, accepted, count, candidates, **links, target_predict=target)
    found = (list(predicts.values), list(accepted.values), list(count.values))
    return found == ([101, 104, -7, -7, 55, -7], [0, 1, 4, -1], [2])


def _commit() -> bool:
    predicts, accepted = Memory("i", (6,), [101, 104, 0, 0, 55, 0]), Memory("i", (1, 4), [0, 1, 4, -1])
    lens, bonus = Memory("i", (1,)), Memory("q", (1,))
    out = {name: Memory("q", (1, 4)) for name in ("tokens", "src_loc", "tgt_loc", "rows")}
    slots = Memory("q", (6,), range(20, 26))
    eyas_native.accept_commit(predicts, accepted, Memory("i", (1,), [2]), slots, accept_lens=lens, bonus=bonus, **out)
    return [*lens.values, *bonus.values] == [3, 55] and [list(memory.values) for memory in out.values()] == [
        [101, 104, 55, -1],
        [20, 21, 24, -1],
        [20, 21, 22, -1],
        [0, 1, 4, -1],
    ]


def _write() -> bool:
    k, v = Memory("f", (2, 1, 2), [1, 2, 3, 4]), Memory("f", (2, 1, 1), [5, 6])
    k_pool, v_pool = Memory("f", (3, 1, 2)), Memory("f", (3, 1, 1))
    eyas_native.kv_write(k, v, k_pool, v_pool, Memory("q", (2,), [2, 0]))
    return list(k_pool.values) == [3, 4, 0, 0, 1, 2] and list(v_pool.values) == [6, 0, 5]


def _move() -> bool:
    pool = Memory("f", (4, 2), range(8))
    eyas_native.kv_move([pool], Memory("q", (3,), [0, 1, 2]), Memory("q", (3,), [1, 2, 0]))
    return list(pool.values) == [2, 3, 4, 5, 0, 1, 6, 7]


def _gather() -> bool:
    sources = [Memory("f", (3, 2), range(6)), Memory("f", (3, 2), range(10, 16))]
    out, added = Memory("f", (2, 4)), Memory("f", (2, 4))
    eyas_native.hidden_gather(sources, Memory("q", (2,), [2, 0]), out)
    eyas_native.hidden_gather(sources, Memory("q", (2,), [2, 0]), added, residuals=[None, sources[0]])
    plain = list(out.values) == [4, 5, 14, 15, 0, 1, 10, 11]
    return plain and list(added.values) == [4, 5, 18, 20, 0, 1, 10, 12]


def _refusals() -> bool:
    pool = Memory("f", (4, 2), range(8))
    try:
        eyas_native.kv_move([pool], Memory("q", (1,), [0]), Memory("q", (1,), [4]))
    except ArgumentError as error:
        return error.where == "src_loc" and list(pool.values) == list(range(8))
    return False


def _attention(isa: str) -> Iterator[Check]:
    rng = random.Random(0)
    prefix, nodes, q_heads, kv_heads, dim = 70, len(_PARENTS), 4, 2, 32
    keys = prefix + nodes

    def normal(*shape: int) -> Memory:
        return Memory("f", shape, [rng.gauss(0, 1) for _ in range(math.prod(shape))])

    q, k, v = normal(nodes, q_heads, dim), normal(keys, kv_heads, dim), normal(keys, kv_heads, dim)
    slots = rng.sample(range(keys), keys)
    seen = [[j for j in range(nodes) if _mask()[i * nodes + j]] for i in range(nodes)]
    lists = [slots[:prefix] + [slots[prefix + j] for j in row] for row in seen]
    tree_out, decode_out = Memory("f", q.shape), Memory("f", q.shape)
    eyas_native.tree_attention(
        q,
        k,
        v,
        tree_out,
        Memory("i", (1, keys), slots),
        Memory("q", (1,), [0]),
        Memory("q", (1,), [keys]),
        Memory("q", (1,), [nodes]),
        Memory("q", (1,), [0]),
        scale=dim**-0.5,
        tree_mask=Memory("B", (nodes * nodes,), _mask()),
    )
    table = Memory("i", (nodes, keys), [slot for row in lists for slot in [*row, *[0] * (keys - len(row))]])
    lens = Memory("q", (nodes,), [len(row) for row in lists])
    rows = Memory("q", (nodes,), range(nodes))
    eyas_native.decode_attention(q, k, v, decode_out, table, rows, lens, scale=dim**-0.5)
    wanted = [
        value
        for i, row in enumerate(lists)
        for head in range(q_heads)
        for value in _attend(q, k, v, i, head, head // (q_heads // kv_heads), row)
    ]
    error = max(abs(a - b) for a, b in zip(tree_out.values, wanted, strict=True))
    yield Check(f"tree_attention, {isa}", error < 1e-5, f"largest error {error:.1e}")
    same = decode_out.values == tree_out.values
    yield Check(f"decode_attention, {isa}", same, f"{'bit-equal to' if same else 'differs from'} tree_attention")


def _attend(q: Memory, k: Memory, v: Memory, row: int, head: int, kv_head: int, slots: list[int]) -> list[float]:
    dim = q.shape[2]

    def vector(memory: Memory, first: int, second: int) -> list[float]:
        start = (first * memory.shape[1] + second) * dim
        return list(memory.values[start : start + dim])

    query = vector(q, row, head)
    scores = [sum(map(float.__mul__, query, vector(k, slot, kv_head))) * dim**-0.5 for slot in slots]
    weights = [math.exp(score - max(scores)) for score in scores]
    values = [vector(v, slot, kv_head) for slot in slots]
    return [sum(w * x[d] for w, x in zip(weights, values, strict=True)) / sum(weights) for d in range(dim)]
