"""Optimiser steps over batches of whatever shape the data has: the way of a CPU."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from eyas_contract import InvalidInput
from eyas_draft.batches import Batch, Loader
from eyas_draft.config import TrainConfig
from eyas_draft.loss import TttLoss, ttt_loss
from eyas_draft.model import DraftModel
from eyas_draft.objectives import parse_mix
from eyas_draft.ttt import Teacher, autocast, scored_positions

Record = dict[str, Any]


class RaggedStepper:
    """Takes optimiser steps and tells their numbers at once.

    Args:
        config: settings.
        model, teacher, optimizer: what is trained, from what, by what.
        loader: batches.
        cursor: batches taken so far; grows with each.
    """

    every = 1  # steps after which `drain` is due
    way = "plain, ragged"

    def __init__(self, config: TrainConfig, model: DraftModel, teacher: Teacher, optimizer: torch.optim.Optimizer,
                 loader: Loader, cursor: int) -> None:
        self.config, self.model, self.teacher, self.optimizer = config, model, teacher, optimizer
        self.loader, self.cursor, self.mix = loader, cursor, parse_mix(config.loss)
        self._device = next(model.parameters()).device
        self._batches: Iterator[list[Any]] = loader.batches(cursor)
        self._known: dict[int, Tensor] = {}
        self._record: list[Record] = []

    def advance(self, step: int, rate: float) -> int:
        """Forward and backward over `accumulate` batches, one update; returns the tokens.

        Raises:
            InvalidInput: a gradient that is not finite, or too many samples that are not.
        """
        begun = time.monotonic()
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        parts, tokens = self._gradients()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        if not math.isfinite(float(norm)):
            raise InvalidInput(f"step {step}", f"a gradient of norm {float(norm)}", "finite gradients",
                               "Lower --lr, or train in fp32; the last checkpoint is intact.")
        self.optimizer.step()
        self.optimizer.zero_grad()
        scored = torch.stack([p.scored for p in parts]).sum(0)
        accuracy = torch.stack([p.correct for p in parts]).sum(0) / scored.clamp(min=1)
        losses = torch.stack([p.step_losses for p in parts]).mean(0)
        self._record.append({
            "step": step, "cursor": self.cursor, "loss": round_to(torch.stack([p.loss.detach() for p in parts]).mean()),
            "step_losses": [round_to(x) for x in losses], "step_accuracy": [round_to(x) for x in accuracy],
            "lr": rate, "grad_norm": round_to(norm), "tokens": tokens, "trained": int(scored[0]),
            "seconds": round(time.monotonic() - begun, 4)})
        return tokens

    def drain(self) -> list[Record]:
        """What metrics.jsonl records of the steps since the last call."""
        records, self._record = self._record, []
        return records

    def close(self) -> None:
        """Nothing to end."""

    def _gradients(self) -> tuple[list[TttLoss], int]:
        parts: list[TttLoss] = []
        tokens = 0
        while len(parts) < self.config.accumulate:
            samples = next(self._batches)
            self.cursor += 1
            if not samples:
                continue
            batch = Batch.pack([sample for _, sample in samples], self._device)
            with autocast(self._device, self.config.precision):
                part = ttt_loss(self.model, batch, self._scored(batch, samples), self.teacher.probabilities,
                                steps=self.config.ttt_steps, decay=self.config.decay, mix=self.mix)
            (part.loss / self.config.accumulate).backward()  # type: ignore[no-untyped-call]
            parts.append(part)
            tokens += batch.input_ids_t.numel()
        return parts, tokens

    def _scored(self, batch: Batch, samples: list[Any]) -> Tensor:
        """bool [T]: trained positions whose target choice the draft can propose.

        The target's choice needs its whole head; it is computed once a sample, alone, so that it does not depend on
        what the sample was packed with, and remembered.
        """
        scored = scored_positions(batch)
        start = 0
        for (index, _), length in zip(samples, batch.lengths, strict=True):
            inside = torch.nonzero(scored[start:start + length]).squeeze(1) + start
            if index not in self._known:
                self._known[index] = self.teacher.proposable(batch.last_te[inside])
            scored[inside] = self._known[index]
            start += length
        return scored


def round_to(value: Tensor | float) -> float:
    """Six decimals, for metrics.jsonl."""
    return round(float(value), 6)
