"""The training loop: batches -> TTT loss -> AdamW, with exact resume.

A run folder holds contract.json, config.resolved.json, coverage.json, metrics.jsonl, checkpoints/ and best.json.
A run killed at any moment and started again ends with the same weights as one left alone (bit for bit on a CPU with
the same number of threads): weights, optimiser, random state and data cursor travel in the checkpoint, and nothing
else has a memory.
"""

from __future__ import annotations

import io
import math
import sys
from collections.abc import Iterable, Iterator
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING, Any, TextIO

import torch

from eyas_contract import Contract, InvalidInput, canonical, compare
from eyas_contract.commands import Progress, plain_config, save_config
from eyas_contract.contract import read_json, write_text_atomic
from eyas_contract.outputs import require_own, with_temporary
from eyas_draft import checkpoint, sharded
from eyas_draft.batches import Batch, HostBatch, Loader, plan_epoch, split
from eyas_draft.config import FREE_ON_RESUME, TrainConfig
from eyas_draft.feed import Feed, ahead
from eyas_draft.fixed import FixedStepper, pack_sizes
from eyas_draft.metrics import MetricsLog
from eyas_draft.moments import start_moments
from eyas_draft.pace import Pace, flops_per_token
from eyas_draft.ragged import AHEAD, RaggedStepper
from eyas_draft.ranks import Ranks
from eyas_draft.setup import Setup, draft_ids, prepare
from eyas_draft.sharded import Shell, shell_of, whole
from eyas_draft.trackers import open_trackers, require_installed
from eyas_draft.ttt import Teacher, autocast
from eyas_draft.walk import Walk, walk

if TYPE_CHECKING:
    from eyas_draft.real import RealRounds

SETTINGS, COVERAGE = "config.resolved.json", "coverage.json"


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
        require_installed(config.log_to)
        self.config, self.ranks = config, Ranks.join(config.device)
        self.stream = stream if self.ranks.first else io.StringIO()
        self.device = self.ranks.device
        require_possible(config, self.ranks)
        self.setup: Setup = prepare(config)
        if self.ranks.first:
            self._claim_folder()
        self.ranks.wait()
        torch.manual_seed(config.seed)
        self.model = self.setup.model.to(self.device)
        self.spread = self.ranks.shared and config.shapes != "fixed"  # else every process holds the whole draft
        self.shell = shell_of(self.model, self.ranks) if self.spread else Shell(self.model)
        ids = draft_ids(self.setup.contract)
        compute = torch.bfloat16 if config.precision == "bf16" else torch.float32
        self.teacher = Teacher(self.setup.weights, ids, device=self.device, dtype=compute,
                               post_norm=self.setup.contract.capture.last_state == "post_norm")
        self.draft_ids_v = ids.to(self.device)
        trained, self.held = split(self.setup.store, config.holdout, config.seed, config.fraction)
        self.loader = Loader(self.setup.store, trained, config.tokens_per_batch, config.seed, config.max_bad_samples)
        self.total, self.per_epoch = self._count_steps()
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=config.lr, betas=(0.9, config.beta2), weight_decay=config.weight_decay,
            fused=True, capturable=self.device.type == "cuda")
        self.step, self.cursor, self.best = 0, 0, 0.0
        self._real: RealRounds | None = None
        self._resume()
        self.stepper = self._stepper()

    def run(self) -> Walk:
        """Train to the end; returns the last measurement."""
        first, out = self.ranks.first, self.config.out
        trackers = open_trackers(self.config.log_to, out, plain_config(self.config), self.step) if first else []
        with closing(MetricsLog(out, self.step, first, trackers)) as log, closing(self.stepper):
            return self._run(log)

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
        """Fixed shapes on one GPU, ragged ones on a CPU and by several processes, unless the settings say which."""
        config = self.config
        half = self.device.type == "cuda" and config.precision == "bf16"  # what a GPU's flash kernels take
        fixed = half and not self.ranks.shared if config.shapes == "auto" else config.shapes == "fixed"
        if not fixed:
            return RaggedStepper(config, self.model, self.teacher, self.optimizer, self.loader, self.cursor, self.shell,
                                 self.ranks)
        plans = list(islice(self.loader.plans(0), self.total * config.accumulate))
        resident = None if config.resident == "auto" else config.resident == "yes"
        feed = Feed(self.loader, pack_sizes(self.loader, plans), self.device, resident)
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
        read = ([sample for _, sample in self.loader.load(plan)] for plan in plans)
        packed = (HostBatch.of(samples, pinned=pinned) for samples in read if samples)
        return (batch.to(self.device) for batch in ahead(packed, AHEAD))

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
        """Write a checkpoint; name it the best if it is."""
        if measured and measured.acceptance_length >= self.best:
            self.best = measured.acceptance_length
            if self.ranks.first:  # before the checkpoint: a kill between is made good by resuming
                checkpoint.mark_best(self.config.out, self.step, self.best)
        self.cursor = self.stepper.cursor
        skipped = sorted({name for names in self.ranks.gather(self.loader.skipped) for name in names})
        plain = {"step": self.step, "cursor": self.cursor, "best": self.best, "skipped": skipped}
        keep = max(1, self.config.keep)
        if not self.spread:
            if self.ranks.first:
                state = {**plain, "model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                         "random": torch.get_rng_state()}
                checkpoint.save(self.config.out, self.step, state, keep=keep)
            self.ranks.wait()
            return
        sharded.write(checkpoint.place(self.config.out, self.step), sharded.tensors_of(self.model, self.optimizer),
                      plain, self.ranks)
        if self.ranks.first:
            checkpoint.remove_old(self.config.out, keep)

    def _resume(self) -> None:
        """Continue from the newest checkpoint, if there is one, by however many processes it was written."""
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
        self.step, self.cursor, self.best = state["step"], state["cursor"], state["best"]
        self.loader.skipped = list(state["skipped"])
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

    def _claim_folder(self) -> None:
        """Write the run's contract and settings, or compare with those of the run that is continued."""
        run = self.config.out
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
        else:
            require_own(run, with_temporary("contract.json", COVERAGE, SETTINGS), "a new or empty folder, or a run")
        run.mkdir(parents=True, exist_ok=True)
        self.setup.contract.save(run)
        write_text_atomic(run / COVERAGE, canonical.dumps(self.setup.coverage) + "\n")
        save_config(self.config, run, SETTINGS)


def require_possible(config: TrainConfig, ranks: Ranks) -> None:
    """Refuse fixed shapes where they cannot be, before anything is written. Raises InvalidInput."""
    if config.shapes != "fixed":
        return
    if config.accumulate % ranks.world:
        raise InvalidInput("--accumulate", f"{config.accumulate}, with {ranks.world} processes",
                           "as many batches for each, by --shapes fixed", "Give a multiple, or leave --shapes at auto.")
    if ranks.device.type == "cuda" and config.precision != "bf16":
        raise InvalidInput("--shapes", f"fixed, in {config.precision} on a GPU", "bf16, or ragged shapes",
                           "Give --precision bf16, or leave --shapes at auto.")


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
