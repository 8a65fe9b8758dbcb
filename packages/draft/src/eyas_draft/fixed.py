"""Optimiser steps over packs of one shape: the way of a GPU.

Forward, backward and update are recorded as CUDA graphs and replayed, elementwise chains are compiled, and no step
waits for the device: losses, counts and norms gather there and are fetched together every so many steps. A step whose
gradient is not finite changes nothing and is counted. Several processes each hold the whole draft, and add up their
gradients between a step's passes and its update.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from eyas_contract import InvalidInput
from eyas_draft.attention import Layout
from eyas_draft.batches import Loader
from eyas_draft.config import TrainConfig
from eyas_draft.feed import Feed
from eyas_draft.loss import fixed_head_loss
from eyas_draft.model import DraftModel
from eyas_draft.moments import start_moments
from eyas_draft.objectives import parse_mix
from eyas_draft.packs import PackSizes
from eyas_draft.ragged import Record, round_to
from eyas_draft.ranks import Ranks
from eyas_draft.recorded import record
from eyas_draft.regions import compiled
from eyas_draft.ttt import Rows, Teacher, autocast, unroll_rows

BYTES = 16  # a parameter: its weight, gradient and two moments, in float32
LITTLE = 0.1  # of a GPU's memory: drafts that take no more gain by recorded steps, larger ones fill the GPU anyway


def takes_fixed(config: TrainConfig, ranks: Ranks, model: DraftModel) -> bool:
    """Whether a run is on fixed shapes, every process with the whole draft: as its settings say, and by `auto` on a GPU
    in bf16, what its flash kernels take; with several processes, if they can share a step's batches equally and the
    draft is at most `LITTLE` of the smallest GPU among them. The same in all of them.
    """
    if config.shapes != "auto":
        return config.shapes == "fixed"
    if ranks.device.type != "cuda" or config.precision != "bf16":
        return False
    if not ranks.shared:
        return True
    room = LITTLE * min(ranks.gather(torch.cuda.get_device_properties(ranks.device).total_memory))
    held = BYTES * sum(parameter.numel() for parameter in model.parameters())
    return config.accumulate % ranks.world == 0 and held <= room


class FixedStepper:
    """Takes optimiser steps without waiting for their numbers.

    Args:
        config: settings.
        model, teacher, optimizer: what is trained, from what, by what.
        loader, feed: batches.
        cursor: batches taken so far, by all processes; grows with each.
        ranks: the processes that share each step's batches, in equal parts.
        report: takes a line where something asked for could not be had.
    """

    every = 25  # steps after which `drain` is due; the device waits for nothing in between

    def __init__(self, config: TrainConfig, model: DraftModel, teacher: Teacher, optimizer: torch.optim.Optimizer,
                 loader: Loader, feed: Feed, cursor: int, ranks: Ranks, report: Callable[[str], None]) -> None:
        self.config, self.model, self.teacher, self.optimizer = config, model, teacher, optimizer
        self.feed, self.cursor, self.mix, self.report = feed, cursor, parse_mix(config.loss), report
        self._device, self._parameters = feed.device, list(model.parameters())
        self._grads = [torch.zeros_like(parameter) for parameter in self._parameters]
        self._ranks = ranks
        self._batches = feed.batches(ranks.share(loader.plans(cursor), config.accumulate))
        width = config.ttt_steps
        self._stats = torch.zeros(3, width, device=self._device)  # mean loss, right, scored
        self._tokens = torch.zeros((), device=self._device)
        self._norm = torch.zeros((), device=self._device)
        self._bad = torch.zeros((), device=self._device)
        self._history = torch.zeros(self.every, 3 * width + 3, device=self._device)
        self._rate = torch.zeros((), device=self._device)
        self._pending: list[Record] = []
        self._since = 0.0
        self._bad_steps = 0
        self._works: list[Callable[[], None]] | None = None
        self.way = "plain"  # how steps are run, for reports

    def advance(self, step: int, rate: float) -> int:
        """Queue `accumulate` passes and one update; returns the tokens (with several processes about).

        Raises:
            InvalidInput: too many samples with states that are not finite.
        """
        if not self._pending:
            self._since = time.monotonic()
        self._set_rate(rate)
        tokens, passes, waited = 0, 0, 0.0
        self.cursor += self.config.accumulate
        while passes < self._ranks.passes(self.config.accumulate):
            begun = time.monotonic()
            batch = next(self._batches)
            waited += time.monotonic() - begun
            if batch.samples:
                self.feed.place(batch)
                if self._works is None:
                    self._works = self._prepare()
                self._works[0]()
                tokens += batch.tokens
            elif not self._ranks.shared:  # another takes its place; where others compute theirs now, none can
                self.cursor += 1
                continue
            passes += 1
        if self._works is None:
            raise InvalidInput(f"step {step}", "no sample with finite states in this process's batches",
                               "some in the first step", "Extract those samples again.")
        self._tokens.fill_(tokens)
        self._add_up()
        self._works[1]()
        self._history[len(self._pending)] = torch.cat((self._stats.flatten(), self._tokens[None], self._norm[None],
                                                       self._bad[None]))
        self._stats.zero_()
        self._pending.append({"step": step, "cursor": self.cursor, "lr": rate, "wait": round(waited, 4)})
        return tokens * self._ranks.world

    def drain(self) -> list[Record]:
        """What metrics.jsonl records of the steps since the last call; waits for them.

        Raises:
            InvalidInput: more than `max_bad_steps` steps with gradients that are not finite.
        """
        if not self._pending:
            return []
        rows = self._history[:len(self._pending)].cpu()
        seconds = round((time.monotonic() - self._since) / len(self._pending), 5)
        records = [self._record(known, row, seconds) for known, row in zip(self._pending, rows, strict=True)]
        self._pending = []
        bad = [r["step"] for r in records if r["skipped"]]
        self._bad_steps += len(bad)
        if self._bad_steps > self.config.max_bad_steps:
            raise InvalidInput(f"step {bad[-1]}", f"gradients that are not finite in {self._bad_steps} steps",
                               f"at most {self.config.max_bad_steps}, by --max-bad-steps",
                               "Lower --lr, or train in fp32; the last checkpoint is intact.")
        return records

    def close(self) -> None:
        """End the reading thread."""
        self._batches.close()  # type: ignore[attr-defined]  # a generator

    def _record(self, known: Record, row: Tensor, seconds: float) -> Record:
        losses, right, scored = row[:-3].view(3, -1)
        losses = losses / self.config.accumulate
        total = sum(self.config.decay ** i * loss for i, loss in enumerate(losses.tolist()))
        return {**known, "loss": round_to(total), "step_losses": [round_to(x) for x in losses],
                "step_accuracy": [round_to(x) for x in right / scored.clamp(min=1)], "grad_norm": round_to(row[-2]),
                "tokens": int(row[-3]), "trained": int(scored[0]), "seconds": seconds, "skipped": bool(row[-1])}

    def _set_rate(self, rate: float) -> None:
        if self._device.type == "cuda":
            self._rate.fill_(rate)
        for group in self.optimizer.param_groups:
            group["lr"] = self._rate if self._device.type == "cuda" else rate

    def _prepare(self) -> list[Callable[[], None]]:
        """The two parts of a step, made as fast as this device allows."""
        for parameter, grad in zip(self._parameters, self._grads, strict=True):
            parameter.grad = grad
        start_moments(self.optimizer)
        if self._device.type != "cuda":
            return [self._accumulate, self._update]
        for compiling, recording in self._ways():
            try:
                works = self._made_fast(compiling=compiling, recording=recording)
                self.way = " and ".join(["compiled"] * compiling + ["recorded"] * recording)
                return works
            except RuntimeError as error:  # also what dynamo, inductor and CUDA raise
                self.report(f"compile={compiling}, cuda_graph={recording} failed, trying the next slower way "
                            f"({type(error).__name__}: {str(error)[:400]})")
        return self._made_fast(compiling=False, recording=False)

    def _ways(self) -> list[tuple[bool, bool]]:
        """(compile, record) in the order of speed, as far as the settings ask for them."""
        ways = [(True, True), (False, True), (True, False)]
        return [way for way in ways if way[0] <= self.config.compile and way[1] <= self.config.cuda_graph]

    def _made_fast(self, *, compiling: bool, recording: bool) -> list[Callable[[], None]]:
        works = [self._accumulate, self._update]
        try:
            with compiled(compiling):
                if recording:
                    return record(works, self._state())
                self._accumulate()  # what is compiled is compiled before the first step is timed
        finally:
            self._clear()

        def accumulate() -> None:
            with compiled(compiling):
                self._accumulate()
        return [accumulate, self._update]

    def _clear(self) -> None:
        torch._foreach_zero_(self._grads)
        self._stats.zero_()

    def _state(self) -> list[Tensor]:
        """Everything that a step changes."""
        moments = [value for state in self.optimizer.state.values() for value in state.values()
                   if isinstance(value, Tensor)]
        return [*self._parameters, *self._grads, *moments, self._stats, self._norm, self._bad]

    def _accumulate(self) -> None:
        """Forward and backward of the batch in the buffers; gradients and numbers are added up."""
        with autocast(self._device, self.config.precision):
            loss = self._loss()
        (loss / self.config.accumulate).backward()  # type: ignore[no-untyped-call]

    def _loss(self) -> Tensor:
        parts = self.feed.parts()
        sources, starts = parts["sources"].long(), parts["starts"].long()
        place = parts["place"].long()
        rows = Rows(self.feed.buffers.input_ids_t, parts["positions"].long(), parts["ends"].long())
        last = self.feed.buffers.last_me
        targets = self.teacher.probabilities(last)
        best = targets.argmax(-1)
        counted = (sources >= 0) & self.teacher.proposable(last)
        total = targets.new_zeros(())
        unrolled = unroll_rows(self.model, rows, self.feed.buffers.aux_tke, self._layout(parts["bounds"]),
                               self.config.ttt_steps)
        for index, (normed, source, inside) in enumerate(unrolled):
            row = sources - 1 - index
            valid = counted & (row >= starts)
            inverse = place[source].masked_fill(~inside, self.feed.sizes.scored)
            summed, right = fixed_head_loss(normed, self.model.lm_head.weight, targets, best, row.clamp(min=0), valid,
                                            inverse, self.mix)
            count = valid.sum()
            mean = summed / count.clamp(min=1)
            total = total + self.config.decay ** index * mean
            self._stats[:, index] += torch.stack((mean.detach().float(), right.float(), count.float()))
        return total

    def _layout(self, bounds: Tensor) -> Layout:
        if self._device.type == "cuda":
            return Layout.fixed(bounds, self.feed.sizes.longest)
        return Layout([n for n in bounds.diff().tolist() if n], self._device)

    def _add_up(self) -> None:
        """Gradients and numbers of all processes; the passes have divided the losses by the batches of a step."""
        if self._ranks.shared:
            for values in (*self._grads, self._stats, self._tokens):
                self._ranks.sum(values)

    def _update(self) -> None:
        """Clip, step where the gradient is finite, and start the next sum."""
        optimizer: Any = self.optimizer
        norm = torch.nn.utils.clip_grad_norm_(self._parameters, self.config.clip)
        self._norm.copy_(norm)
        self._bad.copy_(~torch.isfinite(norm))
        optimizer.found_inf = self._bad  # the fused kernels leave everything as it is where this is not zero
        optimizer.step()
        torch._foreach_zero_(self._grads)


def pack_sizes(loader: Loader, batches: int) -> PackSizes:
    """Of a run that trains on so many batches, sizes that hold every batch that can come.

    A batch whose samples are all bad is left out and another takes its place, so a run may go further than it has
    steps, by `limit` batches an epoch. Where that is much of an epoch, the sizes are such that any batch fits.
    """
    store = loader.store
    lengths, trained = ([count(i) for i in range(len(store))] for count in (store.length, store.trained))
    if 2 * loader.limit > loader.num_batches(0):
        return PackSizes.of_any(loader.tokens, [lengths[i] for i in loader.indices],
                                [trained[i] for i in loader.indices])
    return PackSizes.of(_plans_that_can_come(loader, batches), lengths, trained)


def _plans_that_can_come(loader: Loader, batches: int) -> Iterator[list[int]]:
    """Batches up to the last that a run may reach; of an epoch at least one is trained on (`Loader.require_few`)."""
    epoch = 0
    while batches > 0:
        plan = loader.plan(epoch)
        yield from plan[:batches + loader.limit]
        batches -= max(1, len(plan) - loader.limit)
        epoch += 1
