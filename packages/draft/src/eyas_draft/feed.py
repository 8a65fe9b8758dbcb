"""Keeps a GPU fed: packs are laid out ahead by a thread, states lie on the device or are read ahead of their use.

A store that fits is put on the device once, and a batch is then one small copy and two gathers; a larger one is read
from its memory map into pinned memory by the same thread. Both end in the same buffers, whose addresses never change.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import accumulate
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from eyas_draft.batches import Loader
from eyas_draft.packs import PackSizes, fill_pack, split_parts
from eyas_draft.states import States, joined, joined_states
from eyas_draft.store import Sample, Store

T = TypeVar("T")
AHEAD = 4  # batches prepared before they are asked for
SHARE = 0.5  # of the device's free memory that a store may take
CHECK_ROWS = 1 << 16


@dataclass(frozen=True)
class Buffers:
    """Where a batch lies on the device.

    Attributes:
        ints: int32 [sizes.total], see `packs.fill_pack`.
        input_ids_t: int64 [T].
        aux_tke: [T, K*E] target states.
        last_me: [M, E] last states of the scored positions.
    """

    ints: Tensor
    input_ids_t: Tensor
    aux_tke: Tensor
    last_me: Tensor


@dataclass(frozen=True)
class Prepared:
    """A batch on the host: its numbers, its tokens (padding not counted), its states where they are streamed, and the
    samples that were left out."""

    ints: Tensor
    tokens: int
    samples: int
    rows: tuple[Tensor, States, States] | None
    bad: tuple[int, ...] = ()


class Feed:
    """Fills the buffers of one run.

    Args:
        loader: what to read, and the account of samples passed over.
        sizes: of every pack.
        device: where the buffers lie.
        resident: put the whole store on the device; None where it fits a GPU.
    """

    def __init__(self, loader: Loader, sizes: PackSizes, device: torch.device, resident: bool | None = None) -> None:
        self.loader, self.sizes, self.device, self._pinned = loader, sizes, device, device.type == "cuda"
        store = loader.store
        capture = store.contract.capture
        self.dtype = store.sample(0).aux.dtype
        self.firsts = [0, *accumulate(store.length(i) for i in range(len(store)))]
        self.buffers = Buffers(
            torch.zeros(sizes.total, dtype=torch.int32, device=device),
            torch.zeros(sizes.tokens, dtype=torch.int64, device=device),
            torch.zeros(sizes.tokens, capture.aux_width, dtype=self.dtype, device=device),
            torch.zeros(sizes.scored, capture.hidden_size, dtype=self.dtype, device=device))
        self.resident = fits(store, device) if resident is None else resident
        self._table = Table(store, device) if self.resident else None
        self._masks: dict[int, np.typing.NDArray[np.bool_]] = {}

    def batches(self, plans: Iterator[list[int]]) -> Iterator[Prepared]:
        """Prepared batches in the plan's order, laid out ahead by a thread; what was left out of one counts as it is
        taken.

        Raises:
            InvalidInput: too many samples with non-finite states.
        """
        with closing(ahead((self.prepare(plan) for plan in plans), AHEAD)) as prepared:
            for batch in prepared:
                self.loader.pass_over(batch.bad)
                yield batch

    def prepare(self, indices: Sequence[int]) -> Prepared:
        """Lay one batch out on the host; samples with non-finite states are left out. Raises CorruptFile where a shard
        does not verify."""
        samples: list[Sample] = []
        if self._table:
            kept = [i for i in indices if i not in self._table.bad]
            masks, firsts = [self._table.mask(i) for i in kept], [self.firsts[i] for i in kept]
        else:
            loaded = self.loader.load(indices)
            kept, samples = [i for i, _ in loaded], [sample for _, sample in loaded]
            masks = [sample.loss_mask_t.numpy() for sample in samples]
            firsts = [0, *accumulate(len(mask) for mask in masks)][:-1]
        ints = torch.empty(self.sizes.total, dtype=torch.int32, pin_memory=self._pinned)
        tokens = fill_pack(ints.numpy(), self.sizes, firsts, masks) if masks else 0
        rows = self._rows(samples, ints) if samples else None
        return Prepared(ints, tokens, len(masks), rows, tuple(sorted(set(indices) - set(kept))))

    def place(self, batch: Prepared) -> None:
        """Copy a prepared batch into the buffers."""
        buffers = self.buffers
        buffers.ints.copy_(batch.ints, non_blocking=True)
        if batch.rows is not None:
            ids, aux, last = batch.rows
            buffers.input_ids_t.copy_(ids, non_blocking=True)
            aux.into(buffers.aux_tke)
            last.into(buffers.last_me)
            return
        assert self._table
        parts = self.parts()
        take = parts["take"].long()
        buffers.input_ids_t.copy_(self._table.input_ids[take])
        torch.index_select(self._table.aux, 0, take, out=buffers.aux_tke)
        torch.index_select(self._table.last, 0, take[parts["sources"].clamp(min=0).long()], out=buffers.last_me)

    def parts(self) -> dict[str, Tensor]:
        """The buffers' numbers by name, int32 views."""
        names = self.sizes.parts
        return dict(zip(names, torch.split(self.buffers.ints, list(names.values())), strict=True))

    def _rows(self, samples: Sequence[Sample], ints: Tensor) -> tuple[Tensor, States, States]:
        """Ids and states of a streamed batch, gathered into pinned memory; the last states of scored positions only."""
        sources, start = torch.from_numpy(split_parts(self.sizes, ints.numpy())["sources"]).long(), 0
        last = list[States]()
        for sample in samples:
            end = start + sample.input_ids_t.numel()
            last.append(sample.last.taken(sources[(sources >= start) & (sources < end)] - start))
            start = end
        tokens, pinned = self.sizes.tokens, self._pinned
        return (joined([s.input_ids_t.long() for s in samples], pinned=pinned, room=tokens),
                joined_states([s.aux for s in samples], pinned=pinned, room=tokens),
                joined_states(last, pinned=pinned, room=self.sizes.scored))


class Table:
    """A whole store on the device, rows of all samples one after another.

    Attributes:
        input_ids: int64 [N]; aux: [N, K*E]; last: [N, E].
        bad: samples with NaN or infinite states.
    """

    def __init__(self, store: Store, device: torch.device) -> None:
        total, capture = sum(store.length(i) for i in range(len(store))), store.contract.capture
        dtype = store.sample(0).aux.dtype
        self.input_ids = torch.empty(total, dtype=torch.int64, device=device)
        self.aux = torch.empty(total, capture.aux_width, dtype=dtype, device=device)
        self.last = torch.empty(total, capture.hidden_size, dtype=dtype, device=device)
        self._masks = []
        bounds = [0]
        for index in range(len(store)):
            sample = store.sample(index)
            start, end = bounds[-1], bounds[-1] + sample.input_ids_t.numel()
            self.input_ids[start:end].copy_(sample.input_ids_t)
            sample.aux.into(self.aux[start:end])
            sample.last.into(self.last[start:end])
            self._masks.append(sample.loss_mask_t.numpy())
            bounds.append(end)
        finite = torch.cat([torch.isfinite(a).all(-1) & torch.isfinite(b).all(-1) for a, b in zip(
            torch.split(self.aux, CHECK_ROWS), torch.split(self.last, CHECK_ROWS), strict=True)]).cpu()
        rows = torch.nonzero(~finite).squeeze(1)
        self.bad = set((torch.searchsorted(torch.tensor(bounds), rows, right=True) - 1).tolist())

    def mask(self, index: int) -> np.typing.NDArray[np.bool_]:
        """Loss mask of a sample."""
        return self._masks[index]


def fits(store: Store, device: torch.device) -> bool:
    """Whether the store's states may lie on the device, where e4m3 takes the room of bf16."""
    if device.type != "cuda":
        return False
    free, _ = torch.cuda.mem_get_info(device)
    return table_bytes(store) < SHARE * free


def table_bytes(store: Store) -> int:
    """Of all states, plain."""
    capture = store.contract.capture
    return store.manifest.num_tokens * (capture.aux_width + capture.hidden_size) * store.sample(0).aux.dtype.itemsize


def ahead(items: Iterator[T], depth: int) -> Generator[T, None, None]:
    """The same items, `depth` of them made ahead by a thread, which ends with the iterator that is returned."""
    ready: queue.Queue[tuple[T | None, BaseException | None]] = queue.Queue(depth)
    over = threading.Event()

    def put(item: T | None, error: BaseException | None = None) -> None:
        while not over.is_set():
            try:
                ready.put((item, error), timeout=0.1)
                return
            except queue.Full:
                continue

    def work() -> None:
        try:
            for item in items:
                put(item)
                if over.is_set():
                    return
            put(None)
        except BaseException as error:  # handed to the consumer, who raises it
            put(None, error)

    thread = threading.Thread(target=work, name="eyas-draft feed", daemon=True)
    thread.start()
    try:
        while True:
            item, error = ready.get()
            if error is not None:
                raise error
            if item is None:
                return
            yield item
    finally:
        over.set()
        thread.join()
