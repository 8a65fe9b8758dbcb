"""Part `train` of `several_gpus.sh`: `torchrun` and FSDP2 on 1, 2, 4, 8 processes.

First one run of `eyas-draft train`, the same with each number: its loss curve against that of one process, and a
checkpoint written by the most processes continued by one, and the other way round. In float32, so that a difference in
what is computed is not taken for rounding. Then weak scaling, each process with as many tokens whatever their number:
a small draft and one of Kimi-K2's size on random states, in bf16, by the trainer's own steppers: ragged batches with
the draft spread by FSDP2, and fixed shapes with the whole draft in every process.
"""

from __future__ import annotations

import gc
import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from several import Part, conversations, part
from train_kimi import KIMI, SMALL, RandomFeed

from eyas_contract import DraftSpec
from eyas_draft.config import TrainConfig
from eyas_draft.fixed import FixedStepper
from eyas_draft.model import DraftModel
from eyas_draft.ragged import RaggedStepper
from eyas_draft.ranks import Ranks
from eyas_draft.sharded import shell_of
from eyas_draft.states import States
from eyas_draft.store import Sample
from eyas_draft.target_weights import TargetWeights
from eyas_draft.ttt import Teacher
from eyas_extract.config import RunConfig
from eyas_extract.run import run

STEPS, EVERY = 24, 6  # optimiser steps of the curve, and between its checkpoints
SMOLLM2 = DraftSpec(**{**vars(KIMI), "hidden_size": 576, "intermediate_size": 1536, "num_heads": 9, "num_kv_heads": 3,
                       "head_dim": 64, "target_hidden_size": 576, "draft_vocab_size": 16000,
                       "target_vocab_size": 49152})
DRAFTS = {"small": SMOLLM2, "kimi": KIMI}
WANTED = 0.85  # of perfect scaling, for the draft of Kimi's size
CHECKED = "kimi"  # the draft that has to scale: of Kimi-K2's size, spread by FSDP2
FIRST, CURVE = 1e-5, 1e-3  # relative differences of losses: before any update, and of the whole curve


def torchrun(processes: int, *words: object) -> None:
    """Run a program with so many processes; its own words where it fails."""
    process = subprocess.Popen([sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
                                str(processes), *map(str, words)], stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
                               text=True)
    try:
        _, said = process.communicate()
    finally:
        if process.poll() is None:  # out of time: its processes are in sessions of their own, and end only by its hand
            process.terminate()
            process.wait(15)
    if process.returncode:
        raise RuntimeError(f"torchrun of {processes}: exit code {process.returncode}\n{said[-4000:]}")


def train(part: Part, store: Path, name: str, processes: int) -> Path:
    """The run `name`, to its end; continued where it has checkpoints."""
    out = part.work / name
    vocab, tokens = (64, 256) if part.cpu else (4096, 4096)
    torchrun(processes, "-m", "eyas_draft.cli", "train", "--store", store, "--target", part.target, "--out", out,
             "--device", part.device, "--precision", "fp32", "--vocab-size", vocab, "--tokens-per-batch", tokens,
             "--accumulate", max(part.sizes[-1], 2), "--max-steps", STEPS, "--epochs", 1000, "--ttt-steps", 3,
             "--checkpoint-every", EVERY, "--keep", 9, "--lr", 1e-3)
    return out


def curve(out: Path) -> dict[int, float]:
    """Loss of each step."""
    return {row["step"]: row["loss"] for row in steps(out)}


def steps(out: Path) -> list[dict[str, Any]]:
    """What metrics.jsonl holds of each optimiser step."""
    return [row for row in map(json.loads, (out / "metrics.jsonl").read_text().splitlines()) if "loss" in row]


def compare(part: Part, check: str, processes: int, found: dict[int, float], wanted: dict[int, float]) -> None:
    """Two curves, step by step."""
    whole = sorted(found) == sorted(wanted) == list(range(1, STEPS + 1))
    far = [abs(found.get(step, math.inf) - loss) / loss for step, loss in sorted(wanted.items())]
    figure = {"first step": float(f"{far[0]:.1e}"), "worst step": float(f"{max(far):.1e}"), "steps": len(found),
              "loss": [wanted[1], wanted[max(wanted)]]}
    part.check(check, processes, figure, f"all {STEPS} steps; relative difference at most {CURVE}, at first {FIRST}",
               whole and far[0] <= FIRST and max(far) <= CURVE)


def curves(part: Part) -> None:
    """The same run with each number of processes, and continued by another."""
    rows, turns = (120, (1, 3)) if part.cpu else (400, (4, 12))
    data, store = conversations(part.work / "data.jsonl", rows, turns, seed=3), part.work / "store"
    run(RunConfig(part.target, data, store, device=part.device))
    runs = {n: train(part, store, f"run{n}", n) for n in part.sizes}
    one = curve(runs[1])
    for n, out in runs.items():
        late = steps(out)[STEPS // 3:]
        part.number(processes=n, run="the same steps (strong scaling), fp32", tokens_per_second=round(
            sum(row["tokens"] for row in late) / sum(row["seconds"] for row in late)))
        if n > 1:
            compare(part, "the loss curve is that of one process", n, curve(out), one)
    most = part.sizes[-1]
    if most == 1:
        part.skip("a checkpoint is continued by another number", 2, "the same curve", "one GPU")
    for before, after in ((most, 1), (1, most)) if most > 1 else ():
        cut_off(runs[before], part.work / f"from{before}to{after}")
        out = train(part, store, f"from{before}to{after}", after)
        compare(part, f"a checkpoint of step {STEPS // 2} by {before} is continued by {after}", after, curve(out), one)


def cut_off(run: Path, copy: Path) -> None:
    """A copy of a run as it was after half of its steps."""
    shutil.copytree(run, copy)
    (copy / "best.json").unlink(missing_ok=True)
    for path in (copy / "checkpoints").iterdir():
        if int(path.stem.removeprefix("step-")) > STEPS // 2:
            shutil.rmtree(path)
    assert any((copy / "checkpoints").iterdir())


def spread_scaling(part: Part) -> None:
    """Of drafts spread by FSDP2."""
    check = "weak scaling of the kimi draft"
    for n, efficiency in scaling(part, "spread").items():
        why = "the processes share the cores, and the draft is tiny" if part.cpu else ""
        part.check(check, n, efficiency, f"at least {WANTED} of {n} times one process",
                   None if part.cpu else efficiency >= WANTED, why)
    if part.sizes[-1] == 1:
        part.skip(check, 2, f"at least {WANTED} of 2 times one process", "one GPU")


def whole_scaling(part: Part) -> None:
    """Of drafts that every process holds whole; numbers alone."""
    scaling(part, "whole")


def scaling(part: Part, held: str) -> dict[int, float]:
    """Tokens/s with equal tokens a process, drafts `spread` over the processes or `whole` in each; the efficiency of
    the checked draft for each number of processes above one."""
    one, efficiencies = dict[str, float](), dict[int, float]()
    for n in part.sizes:
        result = part.work / f"{held}-{n}.json"
        torchrun(n, __file__, "--rank", result, part.device, held)
        for name, found in json.loads(result.read_text()).items():
            one.setdefault(name, found["tokens_per_second"])
            efficiency = round(found["tokens_per_second"] / (n * one[name]), 4)
            part.number(processes=n, draft=name, efficiency=efficiency, **found)
            if n > 1 and name == CHECKED:
                efficiencies[n] = efficiency
    return efficiencies


class RandomLoader:
    """Stands where `eyas_draft.batches.Loader` stands: always the same documents, random states."""

    def __init__(self, spec: DraftSpec, documents: int, length: int, dtype: torch.dtype) -> None:
        mask = torch.arange(length) >= length // 4
        self.batch = [(i, Sample(f"r{i}", torch.randint(spec.target_vocab_size, (length,), dtype=torch.int32), mask,
                                 *(States(torch.randn(length, layers * spec.target_hidden_size, dtype=dtype))
                                   for layers in (spec.num_aux, 1)))) for i in range(documents)]

    def plans(self, cursor: int) -> Iterator[list[int]]:
        """Endless."""
        while True:
            yield [0]

    def load(self, indices: list[int]) -> list[tuple[int, Sample]]:
        """The same for all."""
        return self.batch


def one_rank(result: Path, device: str, held: str) -> None:
    """What each process of a scaling run does; the first writes the numbers."""
    ranks = Ranks.join(device)
    drafts = DRAFTS if device == "cuda" else {"kimi": SMALL}  # on a CPU both would be the same tiny one
    spread = held == "spread"
    found = {name if spread else f"{name}, whole in every process": scaled(spec, ranks, spread=spread)
             for name, spec in drafts.items()}
    if ranks.first:
        result.write_text(json.dumps(found))
    ranks.leave()


def scaled(spec: DraftSpec, ranks: Ranks, *, spread: bool) -> dict[str, Any]:
    """Steps of a draft on random states, as `Trainer` sets them up; numbers of all processes together."""
    full = ranks.device.type == "cuda"
    documents, length, warm, count = (4, 2048, 2, 6) if full else (2, 32, 1, 3)
    dtype = torch.bfloat16 if full else torch.float32
    if full:
        gc.collect()  # the draft before this one, which its stepper's closures hold
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    torch.manual_seed(0)
    table = torch.randn(spec.target_vocab_size, spec.hidden_size, device=ranks.device, dtype=dtype) * 0.02
    with ranks.device:
        model = DraftModel(spec, table)
    shell = shell_of(model, ranks) if spread else None
    head = TargetWeights(table, table, torch.ones(spec.hidden_size), spec.rms_norm_eps, {})
    ids = torch.arange(spec.draft_vocab_size) * (spec.target_vocab_size // spec.draft_vocab_size)
    teacher = Teacher(head, ids, post_norm=False, device=ranks.device, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=full)
    config = TrainConfig(Path(), Path(), Path(), accumulate=ranks.world, precision="bf16" if full else "fp32")
    loader: Any = RandomLoader(spec, documents, length, dtype)
    stepper: RaggedStepper | FixedStepper
    if shell is not None:
        stepper = RaggedStepper(config, model, teacher, optimizer, loader, 0, shell, ranks)
    else:
        feed: Any = RandomFeed(spec, [length] * documents, ranks.device, dtype)
        stepper = FixedStepper(config, model, teacher, optimizer, loader, feed, 0, ranks, print)
    for step in range(warm):
        stepper.advance(step, 1e-5)
    stepper.drain()
    for step in range(warm, warm + count):
        stepper.advance(step, 1e-5)
    rows = stepper.drain()
    stepper.close()
    seconds = sum(row["seconds"] for row in rows)
    return {"hidden": spec.hidden_size, "tokens_a_process": documents * length, "ttt_steps": config.ttt_steps,
            "way": stepper.way, "tokens_per_second": round(sum(row["tokens"] for row in rows) / seconds, 1),
            "step_seconds": round(seconds / count, 4),
            "waiting_for_data_seconds": round(sum(row["wait"] for row in rows) / count, 4), "loss": rows[-1]["loss"],
            "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if full else None}


def main() -> None:
    """The part, or one process of a scaling run."""
    if sys.argv[1:2] == ["--rank"]:
        one_rank(Path(sys.argv[2]), *sys.argv[3:])
        return
    this = part("train")
    for piece in (spread_scaling, curves, whole_scaling):
        try:
            piece(this)
        except Exception as error:  # the other pieces may still succeed
            this.check(piece.__name__, this.sizes[-1], f"{type(error).__name__}: {error}"[-3000:], "no failure", False)


if __name__ == "__main__":
    main()
