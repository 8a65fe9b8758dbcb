"""Seeded packing of ragged samples into batches of about N tokens, with document bounds.

The order is a function of seed and epoch alone, so the data cursor is one number: the batches taken so far.

Shape suffixes: T tokens of a batch (documents one after another), K aux states, E target hidden.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas_contract import InvalidInput
from eyas_draft.states import States, joined, joined_states
from eyas_draft.store import Sample, Store


@dataclass(frozen=True)
class Batch:
    """Documents packed end to end.

    Attributes:
        input_ids_t: int64 [T].
        loss_mask_t: bool [T].
        aux_tke: [T, K*E].
        last_te: [T, E].
        lengths: tokens per document.
        positions_t: int64 [T], from 0 in each document.
        ends_t: int64 [T], index after the last token of the token's document.
    """

    input_ids_t: Tensor
    loss_mask_t: Tensor
    aux_tke: Tensor
    last_te: Tensor
    lengths: tuple[int, ...]
    positions_t: Tensor
    ends_t: Tensor

    @classmethod
    def pack(cls, samples: Sequence[Sample], device: torch.device) -> Batch:
        """Copy samples into one batch on `device`; states keep the store's dtype, bf16 where that is e4m3."""
        return HostBatch.of(samples, pinned=False).to(device)


@dataclass(frozen=True)
class HostBatch:
    """A batch in host memory, states as stored; otherwise as `Batch`."""

    input_ids_t: Tensor
    loss_mask_t: Tensor
    aux: States
    last: States
    lengths: tuple[int, ...]
    positions_t: Tensor
    ends_t: Tensor

    @classmethod
    def of(cls, samples: Sequence[Sample], *, pinned: bool) -> HostBatch:
        """Copy samples; pinned, a GPU fetches the batch while the host goes on."""
        lengths = tuple(s.input_ids_t.numel() for s in samples)
        sizes = torch.tensor(lengths)
        return cls(
            joined([s.input_ids_t.long() for s in samples], pinned=pinned),
            joined([s.loss_mask_t for s in samples], pinned=pinned),
            joined_states([s.aux for s in samples], pinned=pinned),
            joined_states([s.last for s in samples], pinned=pinned), lengths,
            joined([torch.arange(n) for n in lengths], pinned=pinned),
            joined([sizes.cumsum(0).repeat_interleave(sizes)], pinned=pinned))

    def to(self, device: torch.device) -> Batch:
        """On a device, states plain; from pinned memory without waiting."""
        ids, mask, positions, ends = (part.to(device, non_blocking=True) for part in (
            self.input_ids_t, self.loss_mask_t, self.positions_t, self.ends_t))
        return Batch(ids, mask, self.aux.to(device).plain, self.last.to(device).plain, self.lengths, positions, ends)


def plan_epoch(lengths: Sequence[int], indices: Sequence[int], tokens: int, seed: int, epoch: int) -> list[list[int]]:
    """Shuffle `indices` and cut them into batches of at most `tokens` tokens (a longer sample gets its own)."""
    order = list(indices)
    random.Random(f"{seed}/{epoch}").shuffle(order)
    batches: list[list[int]] = []
    filled = 0
    for index in order:
        if not batches or filled + lengths[index] > tokens:
            batches.append([])
            filled = 0
        batches[-1].append(index)
        filled += lengths[index]
    return batches


def split(store: Store, share: float, seed: int, fraction: float = 1.0) -> tuple[list[int], list[int]]:
    """Indices to train on and indices held out; samples without trained tokens are in neither.

    The held-out part is the share asked for, at least one sample where the share is above zero, and is the same for
    every fraction; smaller fractions of the rest lie within larger ones.

    Raises:
        InvalidInput: nothing would be left to train on, or a fraction that is none.
    """
    if not 0 < fraction <= 1:
        raise InvalidInput("--fraction", str(fraction), "above 0, at most 1", "Correct the flag.")
    usable = [i for i in range(len(store)) if store.trained(i) and store.length(i) > 2]
    order = list(usable)
    random.Random(f"{seed}/split").shuffle(order)
    count = max(1, round(share * len(order))) if share > 0 else 0
    if count >= len(usable):
        raise InvalidInput(str(store.folder), f"{len(usable)} usable samples", f"more than the {count} held out",
                           "Extract more samples, or hold out fewer.")
    held, rest = order[:count], order[count:]
    return sorted(rest[:max(1, round(fraction * len(rest)))]), sorted(held)


class Loader:
    """Gives the batches of a run in order, without samples whose states are not finite, of which it keeps an account.

    Args:
        store, indices: what to read.
        tokens: batch size.
        seed: order.
        limit: samples with NaN or infinite states that are passed over before the run stops.
        skipped: ids passed over so far (part of the checkpoint); by all processes, from one checkpoint to the next by
            this one.
    """

    def __init__(self, store: Store, indices: Sequence[int], tokens: int, seed: int, limit: int,
                 skipped: Sequence[str] = ()) -> None:
        self.store, self.indices, self.tokens, self.seed, self.limit = store, indices, tokens, seed, limit
        self.skipped = list(skipped)
        self._lengths = [store.length(i) for i in range(len(store))]

    def num_batches(self, epoch: int) -> int:
        """Batches in an epoch."""
        return len(self.plan(epoch))

    def plan(self, epoch: int) -> list[list[int]]:
        """The batches of an epoch."""
        return plan_epoch(self._lengths, self.indices, self.tokens, self.seed, epoch)

    def batches(self, cursor: int) -> Iterator[list[tuple[int, Sample]]]:
        """Endless batches of (index, sample) from the batch number `cursor` on, epochs one after another."""
        return (self.load(batch) for batch in self.plans(cursor))

    def plans(self, cursor: int) -> Iterator[list[int]]:
        """Endless batches of sample numbers from the batch number `cursor` on, epochs one after another."""
        epoch = 0
        while True:
            plan = self.plan(epoch)
            yield from plan[cursor:]
            cursor, epoch = max(0, cursor - len(plan)), epoch + 1

    def load(self, indices: Sequence[int]) -> list[tuple[int, Sample]]:
        """Read samples; those with non-finite states are left out. They count once their batch's turn has come, not
        when it is read ahead, or the account would depend on the pace of a thread: see `pass_over`."""
        samples = ((index, self.store.sample(index)) for index in indices)
        return [(index, sample) for index, sample in samples if sample.finite]

    def pass_over(self, indices: Iterable[int]) -> None:
        """Count samples with non-finite states, each once.

        Raises:
            InvalidInput: see `require_few`.
        """
        for index in indices:
            if self.store.id(index) not in self.skipped:
                self.skipped.append(self.store.id(index))
                self.require_few()

    def require_few(self) -> None:
        """Raise InvalidInput where more than `limit` samples were passed over, or every one that is trained on."""
        bad = set(self.skipped)
        none_left = len(bad) >= len(self.indices) and all(self.store.id(i) in bad for i in self.indices)
        if len(bad) > self.limit or none_left:
            which = f"all {len(self.indices)} samples to train on" if none_left else f"{len(bad)} samples"
            raise InvalidInput(str(self.store.folder), f"NaN or infinite states in {which}: "
                               f"{', '.join(self.skipped[:10])}", f"at most {self.limit}, by --max-bad-samples, and "
                               "some that are finite", "The target overflowed while extracting (often fp16); extract "
                               "again in bf16.")
