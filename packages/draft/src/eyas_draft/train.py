"""The training loop: batches -> TTT loss -> AdamW, with exact resume.

A run folder holds contract.json, config.resolved.json, coverage.json, metrics.jsonl, checkpoints/ and best.json.
A run killed at any moment and started again ends with the same weights as one left alone (bit for bit on a CPU with
the same number of threads): weights, optimiser, random state and data cursor travel in the checkpoint, and nothing
else has a memory.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, TextIO

import torch
from torch import Tensor

from eyas_contract import Contract, InvalidInput, canonical, compare
from eyas_contract.commands import Progress, plain_config, save_config
from eyas_contract.contract import read_json, write_text_atomic
from eyas_draft import checkpoint
from eyas_draft.batches import Batch, Loader, split
from eyas_draft.config import FREE_ON_RESUME, TrainConfig
from eyas_draft.loss import TttLoss, ttt_loss
from eyas_draft.metrics import MetricsLog
from eyas_draft.setup import Setup, draft_ids, prepare
from eyas_draft.ttt import Teacher, scored_positions
from eyas_draft.walk import Walk, walk

SETTINGS = "config.resolved.json"


class Trainer:
    """One run.

    Args:
        config: settings.
        stream: where progress is written; standard error where absent.

    Raises:
        ContractMismatch, InvalidInput, CorruptFile: see `setup.prepare`; also settings that differ from those of the
            run that is to be continued.
    """

    def __init__(self, config: TrainConfig, stream: TextIO | None = None) -> None:
        self.config, self.stream = config, stream
        self.device = torch.device(config.device)
        self.setup: Setup = prepare(config)
        self._claim_folder()
        torch.manual_seed(config.seed)
        self.model = self.setup.model.to(self.device)
        ids = draft_ids(self.setup.contract)
        compute = torch.bfloat16 if config.precision == "bf16" else torch.float32
        self.teacher = Teacher(self.setup.weights, ids, device=self.device, dtype=compute,
                               post_norm=self.setup.contract.capture.last_state == "post_norm")
        self.draft_ids_v = ids.to(self.device)
        trained, self.held = split(self.setup.store, config.holdout, config.seed)
        self.loader = Loader(self.setup.store, trained, config.tokens_per_batch, config.seed, config.max_bad_samples)
        self.total = sum(self.loader.num_batches(e) for e in range(config.epochs)) // config.accumulate
        if not self.total:
            raise InvalidInput("--accumulate", str(config.accumulate), "at least one optimiser step in the whole run",
                               "Lower --accumulate or --tokens-per-batch.")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=config.lr, betas=(0.9, config.beta2),
                                           weight_decay=config.weight_decay, fused=True)
        self.step, self.cursor, self.best = 0, 0, 0.0
        self._known: dict[int, Tensor] = {}
        self._resume()

    def run(self) -> Walk:
        """Train to the end; returns the last measurement."""
        log = MetricsLog(self.config.out, self.step)
        batches = self.loader.batches(self.cursor)
        measured = self._measure(log) if self.step == 0 else None
        per_step = sum(self.setup.store.length(i) for i in self.loader.indices) * self.config.epochs / self.total
        note = "already finished"
        progress = Progress(round(per_step * self.total), "tokens", "train", already=round(per_step * self.step),
                            every=self.config.log_seconds, stream=self.stream)
        while self.step < self.total:
            begun = time.monotonic()
            values = self._optimiser_step(batches)
            self.step += 1
            log.write(step=self.step, **values, seconds=round(time.monotonic() - begun, 4))
            if self._at_checkpoint():
                measured = self._measure(log)
                self._save(measured)
            note = f"step {self.step}/{self.total}  loss {values['loss']:.3f}"
            if measured:
                note += f"  acceptance length {measured.acceptance_length:.3f} (held out, bonus counted)"
            progress.update(values["tokens"], note)
        log.close()
        progress.close(note)
        return measured or self._walk()

    def _optimiser_step(self, batches: Iterator[list[Any]]) -> dict[str, Any]:
        """Forward and backward over `accumulate` batches, one update; returns what metrics.jsonl records."""
        rate = learning_rate(self.config, self.step, self.total)
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        parts: list[TttLoss] = []
        tokens = 0
        while len(parts) < self.config.accumulate:
            samples = next(batches)
            self.cursor += 1
            if not samples:
                continue
            batch = Batch.pack([sample for _, sample in samples], self.device)
            with self._autocast():
                part = ttt_loss(self.model, batch, self._scored(batch, samples), self.teacher.probabilities,
                                steps=self.config.ttt_steps, decay=self.config.decay)
            (part.loss / self.config.accumulate).backward()  # type: ignore[no-untyped-call]
            parts.append(part)
            tokens += batch.input_ids_t.numel()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.clip)
        if not math.isfinite(float(norm)):
            raise InvalidInput(f"step {self.step + 1}", f"a gradient of norm {float(norm)}", "finite gradients",
                               "Lower --lr, or train in fp32; the last checkpoint is intact.")
        self.optimizer.step()
        self.optimizer.zero_grad()
        scored = torch.stack([p.scored for p in parts]).sum(0)
        accuracy = torch.stack([p.correct for p in parts]).sum(0) / scored.clamp(min=1)
        losses = torch.stack([p.step_losses for p in parts]).mean(0)
        return {"cursor": self.cursor, "loss": _round(torch.stack([p.loss.detach() for p in parts]).mean()),
                "step_losses": [_round(x) for x in losses], "step_accuracy": [_round(x) for x in accuracy],
                "lr": rate, "grad_norm": _round(norm), "tokens": tokens, "trained": int(scored[0])}

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

    def _walk(self) -> Walk:
        """Expected acceptance length on the held-out samples."""
        samples = [self.loader.load([i]) for i in self.held]
        batches = (Batch.pack([one[0][1]], self.device) for one in samples if one)
        with self._autocast():
            return walk(self.model, batches, self.config.chain, self.draft_ids_v)

    def _measure(self, log: MetricsLog) -> Walk | None:
        """Walk the held-out samples, log the result, remember the best."""
        if not self.held:
            return None
        result = self._walk()
        log.write(step=self.step, heldout={
            "acceptance_length": round(result.acceptance_length, 5), "chain": self.config.chain,
            "rates": [round(rate, 5) for rate in result.rates], "rounds": result.rounds})
        return result

    def _at_checkpoint(self) -> bool:
        every = self.config.checkpoint_every or max(1, self.total // self.config.epochs)
        return self.step % every == 0 or self.step == self.total

    def _save(self, measured: Walk | None) -> None:
        """Write a checkpoint; name it the best if it is."""
        if measured and measured.acceptance_length >= self.best:
            self.best = measured.acceptance_length
            checkpoint.mark_best(self.config.out, self.step, self.best)  # first: a kill here is made good by resuming
        state = {"step": self.step, "cursor": self.cursor, "best": self.best, "skipped": list(self.loader.skipped),
                 "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                 "random": torch.get_rng_state()}
        checkpoint.save(self.config.out, self.step, state, keep=max(1, self.config.keep))

    def _resume(self) -> None:
        """Continue from the newest checkpoint, if there is one."""
        state = checkpoint.load(self.config.out)
        if state is None:
            return
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.step, self.cursor, self.best = state["step"], state["cursor"], state["best"]
        self.loader.skipped = list(state["skipped"])
        torch.set_rng_state(state["random"])

    def _claim_folder(self) -> None:
        """Write the run's contract and settings, or compare with those of the run that is continued."""
        run = self.config.out
        run.mkdir(parents=True, exist_ok=True)
        settings = plain_config(self.config)
        path = run / SETTINGS
        if path.is_file():
            before = read_json(path, "the settings of a run, by eyas-draft train")
            differences = [f"{key}: {before.get(key)!r} before, {settings.get(key)!r} now"
                           for key in sorted(set(before) | set(settings))
                           if key not in FREE_ON_RESUME and before.get(key) != settings.get(key)]
            differences += [str(m) for m in compare(Contract.load(run), self.setup.contract, str(run), "this store")]
            if differences:
                raise InvalidInput(str(run), "a run with other settings: " + "; ".join(differences),
                                   "the same settings, to continue it exactly", "Give another --out to start anew.")
        self.setup.contract.save(run)
        write_text_atomic(run / "coverage.json", canonical.dumps(self.setup.coverage) + "\n")
        save_config(self.config, run, SETTINGS)

    def _autocast(self) -> AbstractContextManager[Any]:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.config.precision == "bf16")


def learning_rate(config: TrainConfig, step: int, total: int) -> float:
    """Linear rise over the first `warmup` share of the steps, then a cosine to `final_lr * lr`."""
    rising = max(1, round(config.warmup * total))
    if step < rising:
        return config.lr * (step + 1) / rising
    share = (step - rising) / max(1, total - rising)
    return config.lr * (config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * share)))


def _round(value: Tensor) -> float:
    return round(float(value), 6)
