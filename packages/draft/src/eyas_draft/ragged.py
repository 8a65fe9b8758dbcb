"""Optimiser steps over batches of whatever shape the data has: the way of a CPU, and of several processes."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from eyas_contract import InvalidInput
from eyas_draft.batches import Batch, HostBatch, Loader
from eyas_draft.config import TrainConfig
from eyas_draft.feed import ahead
from eyas_draft.loss import TttLoss, ttt_loss
from eyas_draft.model import DraftModel
from eyas_draft.objectives import parse_mix
from eyas_draft.ranks import Ranks
from eyas_draft.sharded import Shell
from eyas_draft.ttt import Teacher, autocast, scored_positions

Record = dict[str, Any]
AHEAD = 2  # batches laid out before they are asked for: 8,192 tokens of Kimi-K2's states are 470 MB


@dataclass(frozen=True)
class Ready:
    """A batch in host memory, before its turn: which samples, and them packed (none where there is nothing to train),
    and which were left out."""

    indices: tuple[int, ...] = ()
    batch: HostBatch | None = None
    bad: tuple[int, ...] = ()


class RaggedStepper:
    """Takes optimiser steps and tells their numbers at once.

    Args:
        config: settings.
        model, teacher, optimizer: what is trained, from what, by what.
        loader: batches.
        cursor: batches taken so far, by all processes; grows with each.
        shell, ranks: the draft's shell, and the processes that share each step's batches.
    """

    every = 1  # steps after which `drain` is due
    way = "plain, ragged"

    def __init__(self, config: TrainConfig, model: DraftModel, teacher: Teacher, optimizer: torch.optim.Optimizer,
                 loader: Loader, cursor: int, shell: Shell, ranks: Ranks) -> None:
        self.config, self.model, self.teacher, self.optimizer = config, model, teacher, optimizer
        self.loader, self.cursor, self.mix = loader, cursor, parse_mix(config.loss)
        self._shell, self._ranks = shell, ranks
        plans = ranks.share(loader.plans(cursor), config.accumulate)
        self._batches = ahead((self._lay_out(plan) for plan in plans), AHEAD)
        self._known: dict[int, Tensor] = {}
        self._record: list[Record] = []
        self._waited = 0.0  # seconds of this step spent waiting for a batch

    def advance(self, step: int, rate: float) -> int:
        """Forward and backward over `accumulate` batches, one update; returns the tokens.

        Raises:
            InvalidInput: a gradient that is not finite, or too many samples that are not.
        """
        begun, self._waited = time.monotonic(), 0.0
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        numbers = self._ranks.sum(self._gradients())
        losses, correct, scored = numbers[:-3].view(3, -1)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        if isinstance(norm, DTensor):
            norm = norm.full_tensor()
        if not math.isfinite(float(norm)):
            raise InvalidInput(f"step {step}", f"a gradient of norm {float(norm)}", "finite gradients",
                               "Lower --lr, or train in fp32; the last checkpoint is intact.")
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss, tokens, samples = numbers[-3:].tolist()
        self._record.append({
            "step": step, "cursor": self.cursor, "loss": round_to(loss / self.config.accumulate),
            "step_losses": [round_to(x) for x in losses / self.config.accumulate],
            "step_accuracy": [round_to(x) for x in correct / scored.clamp(min=1)],
            "lr": rate, "grad_norm": round_to(norm), "tokens": int(tokens), "samples": int(samples),
            "trained": int(scored[0]), "seconds": round(time.monotonic() - begun, 4),
            "wait": round(self._waited, 4)})
        return int(tokens)

    def drain(self) -> list[Record]:
        """What metrics.jsonl records of the steps since the last call."""
        records, self._record = self._record, []
        return records

    def close(self) -> None:
        """End the reading thread."""
        self._batches.close()

    def _gradients(self) -> Tensor:
        """Add up the gradients of this process's batches; float64 numbers to be summed over all processes: losses,
        right and scored rows of each TTT step, then loss, tokens and samples."""
        numbers = torch.zeros(3 * self.config.ttt_steps + 3, dtype=torch.float64, device=self._ranks.device)
        self.cursor += self.config.accumulate
        passes = 0
        while passes < self._ranks.passes(self.config.accumulate):
            ready = self._next()
            if ready.batch is not None:
                numbers += self._pass(ready.batch, ready.indices)
            elif self._ranks.shared:  # the others gather and scatter now, so this one must
                zero, _ = self._shell(lambda: (self._nothing(), None))
                zero.backward()
            else:
                self.cursor += 1  # another takes its place
                continue
            passes += 1
        return numbers

    def _lay_out(self, plan: list[int]) -> Ready:
        """Read and pack; in the reading thread."""
        samples = self.loader.load(plan) if plan else []
        kept = tuple(index for index, _ in samples)
        bad = tuple(sorted(set(plan) - set(kept)))
        if not samples:
            return Ready(bad=bad)
        pinned = self._ranks.device.type == "cuda"
        return Ready(kept, HostBatch.of([sample for _, sample in samples], pinned=pinned), bad)

    def _next(self) -> Ready:
        begun = time.monotonic()
        ready = next(self._batches)
        self._waited += time.monotonic() - begun
        if ready.bad:
            self.loader.pass_over(ready.bad)
        return ready

    def _nothing(self) -> Tensor:
        """Zero, on which every weight has a gradient: what is scattered must have the same shape everywhere."""
        return torch.stack([parameter.sum() for parameter in self.model.parameters()]).sum() * 0.0

    def _pass(self, on_host: HostBatch, indices: tuple[int, ...]) -> Tensor:
        device = self._ranks.device
        batch = on_host.to(device)

        def compute() -> tuple[Tensor, TttLoss]:
            with autocast(device, self.config.precision):
                part = ttt_loss(self.model, batch, self._scored(batch, indices), self.teacher.probabilities,
                                steps=self.config.ttt_steps, decay=self.config.decay, mix=self.mix)
            loss = part.loss / self.config.accumulate
            return loss + self._nothing() if self._ranks.shared else loss, part
        loss, part = self._shell(compute)
        loss.backward()
        counts = [float(part.loss.detach()), float(batch.input_ids_t.numel()), float(len(indices))]
        return torch.cat([part.step_losses.double(), part.correct.double(), part.scored.double(),
                          torch.tensor(counts, dtype=torch.float64)]).to(device)

    def _scored(self, batch: Batch, indices: tuple[int, ...]) -> Tensor:
        """bool [T]: trained positions whose target choice the draft can propose.

        The target's choice needs its whole head; it is computed once a sample, alone, so that it does not depend on
        what the sample was packed with, and remembered.
        """
        scored = scored_positions(batch)
        start = 0
        for index, length in zip(indices, batch.lengths, strict=True):
            inside = torch.nonzero(scored[start:start + length]).squeeze(1) + start
            if index not in self._known:
                self._known[index] = self.teacher.proposable(batch.last_te[inside])
            scored[inside] = self._known[index]
            start += length
        return scored


def round_to(value: Tensor | float) -> float:
    """Six decimals, for metrics.jsonl."""
    return round(float(value), 6)
