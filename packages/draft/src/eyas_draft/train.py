"""The training loop: batches -> TTT loss -> AdamW, with exact resume.

A run folder holds contract.json, config.resolved.json, coverage.json, data.json (which samples), metrics.jsonl,
checkpoints/ and best.json.
A run killed at any moment and started again ends with the same weights as one left alone (bit for bit on a CPU with
the same number of threads): weights, optimiser, random state and data cursor travel in the checkpoint, and nothing
else has a memory.
"""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, closing
from typing import TYPE_CHECKING, Any, TextIO

import torch

from eyas_contract import InvalidInput
from eyas_contract.commands import Progress, plain_config
from eyas_contract.outputs import held
from eyas_draft import checkpoint, sharded
from eyas_draft.batches import Batch, HostBatch, Loader, plan_epoch, split
from eyas_draft.config import TrainConfig
from eyas_draft.feed import Feed, ahead
from eyas_draft.fixed import FixedStepper, pack_sizes, takes_fixed
from eyas_draft.metrics import MetricsLog
from eyas_draft.moments import start_moments
from eyas_draft.objectives import parse_mix
from eyas_draft.pace import Pace, flops_per_token
from eyas_draft.ragged import AHEAD, RaggedStepper
from eyas_draft.ranges import require_in_range, require_possible
from eyas_draft.ranks import Ranks
from eyas_draft.run_folder import claim
from eyas_draft.setup import Setup, draft_ids, prepare
from eyas_draft.sharded import Shell, shell_of, whole
from eyas_draft.store import Sample
from eyas_draft.trackers import open_trackers, require_installed
from eyas_draft.ttt import Teacher, autocast
from eyas_draft.walk import Walk, walk

if TYPE_CHECKING:
    from eyas_draft.real import RealRounds


class Trainer:
    """One run.

    Args:
        config: settings.
        stream: where progress is written; standard error where absent.

    Raises:
        ContractMismatch, InvalidInput, CorruptFile: see `require_in_range`, `Ranks.join`, `setup.prepare`,
            `run_folder.claim` and `checkpoint.load`; of these only the last comes when something has been written.
    """

    def __init__(self, config: TrainConfig, stream: TextIO | None = None) -> None:
        require_in_range(config)
        parse_mix(config.loss)
        require_installed(config.log_to)
        self.config, self.ranks = config, Ranks.join(config.device)
        self.stream = stream if self.ranks.first else io.StringIO()
        self.device = self.ranks.device
        require_possible(config, self.ranks)
        self.setup: Setup = prepare(config)
        trained, self.held = split(self.setup.store, config.holdout, config.seed, config.fraction)
        self.loader = Loader(self.setup.store, trained, config.tokens_per_batch, config.seed, config.max_bad_samples)
        self.total, self.per_epoch = self._count_steps()
        if self.ranks.first:
            claim(config, self.setup)
        self.ranks.wait()
        torch.manual_seed(config.seed)
        self.model = self.setup.model.to(self.device)
        self.fixed = takes_fixed(config, self.ranks, self.model)
        self.spread = self.ranks.shared and not self.fixed  # else every process holds the whole draft
        self.shell = shell_of(self.model, self.ranks) if self.spread else Shell(self.model)
        ids = draft_ids(self.setup.contract)
        compute = torch.bfloat16 if config.precision == "bf16" else torch.float32
        self.teacher = Teacher(self.setup.weights, ids, device=self.device, dtype=compute,
                               post_norm=self.setup.contract.capture.last_state == "post_norm")
        self.draft_ids_v = ids.to(self.device)
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.lr, betas=(0.9, config.beta2), weight_decay=config.weight_decay,
            fused=True, capturable=self.device.type == "cuda")
        self.step, self.cursor = 0, 0
        self.best = 0.0
        self.best_step: int | None = None
        self._real: RealRounds | None = None
        self._resume()
        self.stepper = self._stepper()

    def run(self) -> Walk:
        """Train to the end; returns the last measurement.

        Raises:
            InvalidInput: another process trains in this folder, or what a step or checkpoint refuses.
        """
        first, out = self.ranks.first, self.config.out
        with ExitStack() as stack:
            stack.enter_context(closing(self.stepper))
            if first:
                stack.enter_context(held(out))
            trackers = open_trackers(self.config.log_to, out, plain_config(self.config), self.step) if first else []
            return self._run(stack.enter_context(closing(MetricsLog(out, self.step, first, trackers))))

    def _run(self, log: MetricsLog) -> Walk:
        measured = self._measure(log) if self.step == 0 else None
        per_step = sum(self.setup.store.length(i) for i in self.loader.indices) / self.per_epoch
        numbers, pace = "already finished" if self.step == self.total else "", self._pace()
        progress = Progress(round(per_step * self.total), "tokens", "train", already=round(per_step * self.step),
                            every=self.config.log_seconds, stream=self.stream)
        while self.step < self.total:
            tokens = self.stepper.advance(self.step + 1, learning_rate(self.config, self.step, self.total))
            self.step += 1
            if self._at_checkpoint() or self.step % self.stepper.every == 0:
                for record in self.stepper.drain():
                    log.write(**pace.add(record))
                    numbers = f"step {record['step']}/{self.total}  loss {record['loss']:.3f}"
                numbers += pace.note()
            if self._at_checkpoint():
                measured = self._measure(log)
                self._save(measured)
            progress.update(tokens, numbers + _note(measured))
        progress.close(numbers + _note(measured))
        return measured or self._walk()

    def _pace(self) -> Pace:
        assert self.setup.contract.draft is not None
        per_token = flops_per_token(self.setup.contract.draft, self.setup.store, self.loader.indices,
                                    self.config.ttt_steps)
        name = torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else ""
        return Pace(per_token, name, self.ranks.world)

    def _count_steps(self) -> tuple[int, float]:
        """Optimiser steps of the whole run, and of a mean epoch."""
        config = self.config
        wanted, epochs, batches = config.max_steps * config.accumulate, 0, 0
        while epochs < config.epochs and (not wanted or batches < wanted):
            batches += self.loader.num_batches(epochs)
            epochs += 1
        total = min(batches // config.accumulate, config.max_steps or batches)
        if not total:
            raise InvalidInput("--accumulate", str(config.accumulate), "at least one optimiser step in the whole run",
                               "Lower --accumulate or --tokens-per-batch.")
        return total, batches / epochs / config.accumulate

    def _stepper(self) -> RaggedStepper | FixedStepper:
        config = self.config
        if self.ranks.shared:
            self._report(f"{self.ranks.world} processes, " + (
                "each with the whole draft, on fixed shapes" if self.fixed else "the draft spread over them by FSDP2"))
        if not self.fixed:
            return RaggedStepper(config, self.model, self.teacher, self.optimizer, self.loader, self.cursor, self.shell,
                                 self.ranks)
        sizes = pack_sizes(self.loader, self.total * config.accumulate)
        resident = None if config.resident == "auto" else config.resident == "yes"
        feed = Feed(self.loader, sizes, self.device, resident)
        return FixedStepper(config, self.model, self.teacher, self.optimizer, self.loader, feed, self.cursor,
                            self.ranks, self._report)

    def _report(self, line: str) -> None:
        stream = self.stream or sys.stderr
        stream.write(line + "\n")
        stream.flush()

    def _walk(self) -> Walk:
        """Expected acceptance length on the held-out samples."""
        with autocast(self.device, self.config.precision), whole(self.shell):
            mine = walk(self.model, self._held_out(), self.config.chain, self.draft_ids_v)
        return Walk(tuple(self.ranks.sum(torch.tensor(mine.histogram, device=self.device)).tolist()))

    def _held_out(self) -> Iterator[Batch]:
        """This process's held-out samples: one at a time, packed on a GPU, which would idle over one."""
        size = self.config.tokens_per_batch if self.device.type == "cuda" else 0
        lengths = [self.setup.store.length(i) for i in range(len(self.setup.store))]
        held = self.held[self.ranks.rank::self.ranks.world]
        plans: Iterable[list[int]] = plan_epoch(lengths, held, size, 0, 0) if size else ([i] for i in held)
        pinned = self.device.type == "cuda"
        read = (self._finite(plan) for plan in plans)
        packed = (HostBatch.of(samples, pinned=pinned) for samples in read if samples)
        return (batch.to(self.device) for batch in ahead(packed, AHEAD))

    def _finite(self, plan: list[int]) -> list[Sample]:
        loaded = self.loader.load(plan)
        self.loader.pass_over(set(plan) - {index for index, _ in loaded})
        return [sample for _, sample in loaded]

    def _measure(self, log: MetricsLog) -> Walk | None:
        """Walk the held-out samples, decode some where asked to, log both; returns the one that checkpoints go by."""
        if not self.held:
            return None
        result = self._walk()
        values: dict[str, Any] = {
            "distinct_tokens": sum(self.setup.store.length(i) for i in self.loader.indices),
            "acceptance_length": round(result.acceptance_length, 5), "chain": self.config.chain,
            "rates": [round(rate, 5) for rate in result.rates], "rounds": result.rounds}
        if self.config.decode_prompts:
            result = self._decode()
            values |= {"decoded_acceptance_length": round(result.acceptance_length, 5), "decoded_rounds": result.rounds}
        log.write(step=self.step, heldout=values)
        if result.acceptance_length < self.best - 2 * result.standard_error:
            self._report(f"step {self.step}: acceptance length {result.acceptance_length:.3f}, {self.best:.3f} before: "
                         "is it trained too long? The best checkpoint is kept.")
        return result

    def _decode(self) -> Walk:
        """Real rounds on held-out prompts, shared among the processes."""
        if self._real is None:
            from eyas_draft.real import RealRounds, openings
            prompts = openings(self.setup.store, self.held, self.config.decode_prompts)
            self._real = RealRounds(
                self.config.target, self.setup.contract, self.setup.weights,
                prompts[self.ranks.rank::self.ranks.world], chain=self.config.chain,
                max_new_tokens=self.config.decode_tokens, device=self.device)
        with whole(self.shell):
            mine = self._real.measure(self.model)
        return Walk(tuple(self.ranks.sum(torch.tensor(mine.histogram, device=self.device)).tolist()))

    def _at_checkpoint(self) -> bool:
        every = self.config.checkpoint_every or max(1, int(self.per_epoch))
        return self.step % every == 0 or self.step == self.total

    def _save(self, measured: Walk | None) -> None:
        """Write a checkpoint, name it the best if it is, remove old ones: in this order, so that the one that is named
        is there whenever a kill or a full disk comes.

        Raises:
            InvalidInput: too many samples with non-finite states, those of all processes together.
        """
        self.loader.skipped = sorted({name for names in self.ranks.gather(self.loader.skipped) for name in names})
        self.loader.require_few()
        length = measured.acceptance_length if measured else None
        if length is not None and length >= self.best:
            self.best, self.best_step = length, self.step
        self.cursor, out = self.stepper.cursor, self.config.out
        plain = {"step": self.step, "cursor": self.cursor, "measured": length, "best": self.best,
                 "best_step": self.best_step, "skipped": self.loader.skipped}
        if self.spread:
            sharded.write(checkpoint.place(out, self.step), sharded.tensors_of(self.model, self.optimizer), plain,
                          self.ranks)
        elif self.ranks.first:
            checkpoint.save(out, self.step, {**plain, "model": self.model.state_dict(),
                                             "optimizer": self.optimizer.state_dict(),
                                             "random": torch.get_rng_state()})
        if self.ranks.first:
            if self.best_step == self.step:
                checkpoint.mark_best(out, self.step, self.best)
            checkpoint.remove_old(out, max(1, self.config.keep))
        self.ranks.wait()

    def _resume(self) -> None:
        """Continue from the newest checkpoint, if there is one, by however many processes it was written.

        Raises:
            InvalidInput: more samples with non-finite states than are allowed by now.
        """
        path = checkpoint.latest(self.config.out)
        if path is None:
            return
        if path.is_dir() and self.spread:
            start_moments(self.optimizer)
            state = sharded.read_plain(path)
            sharded.read_into(path, sharded.tensors_of(self.model, self.optimizer))
        else:
            whole_state = checkpoint.load(self.config.out)
            assert whole_state is not None
            state = whole_state
            self._adopt(state)
        self.step, self.cursor = state["step"], state["cursor"]
        best = checkpoint.settle_best(self.config.out, state) if self.ranks.first else None
        self.best_step, self.best = self.ranks.gather(best)[0]
        if self.best < state["best"]:
            self._report(f"step {self.step}: the best checkpoint (acceptance length {state['best']:.3f}) is gone; the "
                         f"best of what is left is {'not known' if self.best_step is None else 'this one'}")
        self.loader.skipped = list(state["skipped"])
        if self.step < self.total:
            self.loader.require_few()
        if "random" in state:
            torch.set_rng_state(state["random"])

    def _adopt(self, state: dict[str, Any]) -> None:
        """Take over a whole state: of this form of run, or of the other."""
        if "optimizer" in state and not self.spread:
            self.model.load_state_dict(state["model"])
            self.optimizer.load_state_dict(state["optimizer"])
            return
        values = state.get("tensors")
        if values is None:
            names = [name for name, _ in self.model.named_parameters()]
            values = {f"model.{name}": value for name, value in state["model"].items()}
            for number, moments in state["optimizer"]["state"].items():
                values |= {f"{kind}.{names[number]}": value for kind, value in moments.items()}
        start_moments(self.optimizer)
        sharded.fill(sharded.tensors_of(self.model, self.optimizer), values)


def _note(measured: Walk | None) -> str:
    if measured is None:
        return ""
    return f"  acceptance length {measured.acceptance_length:.3f} (held out, bonus counted)"


def learning_rate(config: TrainConfig, step: int, total: int) -> float:
    """Linear rise over the first `warmup` share of the steps, then a cosine to `final_lr * lr`."""
    rising = max(1, round(config.warmup * total))
    if step < rising:
        return config.lr * (step + 1) / rising
    share = (step - rising) / max(1, total - rising)
    return config.lr * (config.final_lr + (1 - config.final_lr) * 0.5 * (1 + math.cos(math.pi * share)))
