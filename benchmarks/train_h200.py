"""Training measured on one GPU: speed, acceptance at SpecForge's number of tokens, the best draft of ten minutes.

    python benchmarks/train_h200.py [PART ...] --target MODEL --prompts FOLDER --answers ANSWERS.jsonl.xz --out OUT

Parts, each in a process of its own, in the order given; one that fails does not stop the others:
    extract  the answers' hidden states, once through the Hugging Face target
    train    SpecForge's setting (16,000 draft tokens, 7 TTT steps, 1000 steps of 4,432 packed tokens), three recipes;
             speed in the steady state and overall, accuracy per step, expected acceptance length on held-out answers
    serve    the recipe with the best expected acceptance, in SGLang: chain 3/1/4 and tree 3/4/8, as the baseline did
    advise   runs on 1/8 to 1/2 of the answers at a constant rate; what `eyas-draft advise` says of all of them, of
             twice the epochs, and what then came
    kimi     a draft of Kimi-K2's size on random states: tokens/s, MFU, memory, where the time goes; 32k context
    best     the whole way to a draft in `--best-seconds`: prompts by the target itself and from GSM8K, answers by the
             target, states, training, export; then, on no clock, acceptance on all three sets

Results: OUT/train_h200.json, written after every measurement. Baseline: SpecForge a6b6b023 on the same machine.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from capture_path import rows_of
from train_engine import Engine, answer_all, measure
from train_kimi import kimi
from train_states import Row, write_store

from eyas_contract.contract import read_json, write_text_atomic
from eyas_contract.engines.sglang import server_flags
from eyas_draft.advise import advise
from eyas_draft.config import ExportConfig, TrainConfig
from eyas_draft.export import export
from eyas_draft.train import Trainer
from eyas_serve.prompts import Renderer

BASELINE = {"tokens_per_second": 45000, "first_step_accuracy": 0.591, "trained_tokens": 4.43e6,
            "3/1/4": {"eval_gsm8k": 1.977, "eval_mtbench": 1.361},
            "3/4/8": {"eval_gsm8k": 2.352, "eval_mtbench": 1.552}}
SMALL = ["--mem-fraction-static", "0.8", "--max-total-tokens", "200000", "--cuda-graph-max-bs", "8",
         "--max-running-requests", "8"]
LARGE = ["--mem-fraction-static", "0.8", "--max-total-tokens", "400000", "--max-running-requests", "512",
         "--cuda-graph-bs-decode", "1", "8", "32", "64", "128", "192", "256", "320", "384", "448", "512"]
SHAPES = {"3/1/4": (3, 1, 4), "3/4/8": (3, 4, 8)}
SETS = {"eval_gsm8k": 80, "eval_mtbench": 40, "eval_humaneval": 40}


@dataclass(frozen=True)
class Scale:
    """How much is done; the second row is for a dry run on a CPU."""

    answers: int = 5000
    steps: int = 1000
    tokens: int = 4432
    vocab: int = 16000
    prompts_chat: int = 20000
    prompts_code: int = 2500
    prompts_gsm8k: int = 7473
    new_tokens: int = 256
    eval_share: float = 1.0
    best_tokens: int = 8192
    best_vocab: int = 20000
    engines: int = 3
    wide: bool = True


TINY = Scale(40, 12, 512, 64, 20, 8, 24, 24, 0.05, 700, 64, 1, False)


class Report:
    """The results file, rewritten whole at every word: one object a part. A copy in the work folder outlives `out`."""

    def __init__(self, args: argparse.Namespace, part: str) -> None:
        self.path, self.copy, self.part = args.out / "train_h200.json", args.work / "train_h200.json", part

    def add(self, **values: Any) -> None:
        """Merge values into the part and print them."""
        everything = self._everything()
        everything.setdefault(self.part, {}).update(values)
        for path in (self.path, self.copy):
            path.parent.mkdir(parents=True, exist_ok=True)
            write_text_atomic(path, json.dumps(everything, indent=1) + "\n")
        print(f"[{time.strftime('%T')}] {self.part}: {json.dumps(values)[:1500]}", flush=True)

    def other(self, part: str) -> dict[str, Any]:
        """What another part found so far, in an earlier call too."""
        found: dict[str, Any] = self._everything().get(part, {})
        return found

    def _everything(self) -> dict[str, Any]:
        path = self.path if self.path.is_file() else self.copy
        return read_json(path, "results") if path.is_file() else {"baseline_specforge": BASELINE}


class Bench:
    """What the parts share: arguments, folders, prompts."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.target, self.work = args, args.target, args.work
        self.scale = TINY if args.tiny else Scale()
        self.work.mkdir(parents=True, exist_ok=True)
        args.out.mkdir(parents=True, exist_ok=True)

    def first_turns(self, path: Path, count: int) -> list[tuple[str, list[int]]]:
        """(id, prompt ids) of the first user turns, as the baseline asks them."""
        renderer, rows = Renderer(self.target), []
        with path.open(encoding="utf-8") as lines:  # str.splitlines would also cut at the separators inside a text
            for line in islice(lines, count):
                row = json.loads(line)
                turn = row.get("conversations", row.get("messages"))[0]
                rows.append((row["id"], list(renderer.encode([turn]))))
        return rows

    def engine(self, port: int, name: str, *flags: str) -> Engine:
        """A server; its log lies in the results' folder."""
        return Engine(self.target, port, self.args.out / f"server_{name}.log", *flags, device=self.args.device,
                      python=self.args.engine_python)

    def measure(self, engine: Engine, sets: list[str]) -> dict[str, Any]:
        """Acceptance on evaluation sets, concurrency 8, 200 new tokens."""
        found = {}
        for name in sets:
            count = max(2, round(SETS[name] * self.scale.eval_share))
            prompts = [ids for _, ids in self.first_turns(self.args.prompts / f"{name}.jsonl", count)]
            found[name] = measure(engine, prompts, min(8, count), 200 if self.scale.wide else 16)
        return found


def extract(bench: Bench, report: Report) -> None:
    """GSM8K answers -> bench.work/store."""
    answered = [json.loads(line) for line in rows_of(bench.args.answers, bench.scale.answers)]
    renderer = Renderer(bench.target)
    rows: list[Row] = [(row["id"], list(renderer.encode(row["messages"][:-1])), row["messages"][-1]["output_ids"])
                       for row in answered]
    report.add(**write_store(bench.work / "store", bench.target, rows, bench.args.device))


def recipe(bench: Bench, name: str, **changes: Any) -> TrainConfig:
    """SpecForge's setting, with our own optimiser settings."""
    plain = TrainConfig(
        store=bench.work / "store", target=bench.target, out=bench.work / f"run_{name}", vocab_size=bench.scale.vocab,
        ttt_steps=7, epochs=8, max_steps=bench.scale.steps, tokens_per_batch=bench.scale.tokens, lr=1e-3, warmup=0.03,
        checkpoint_every=max(1, bench.scale.steps // 2), keep=1, device=bench.args.device, shapes="fixed",
        verify_store=False, log_seconds=3.0, precision="bf16" if bench.scale.wide else "fp32")
    return replace(plain, **changes)


RECIPES: dict[str, dict[str, Any]] = {
    "ce_1e-3": {}, "ce_2e-3": {"lr": 2e-3}, "mix_2e-3": {"lr": 2e-3, "loss": "ce=0.5,choice=0.5"}}


def train(bench: Bench, report: Report) -> None:
    """All recipes, the first one also for speed."""
    for name, changes in RECIPES.items():
        report.add(**{name: run_training(recipe(bench, name, **changes))})
    found = {name: report.other("train")[name]["expected_acceptance_length"] for name in RECIPES}
    report.add(best=max(found, key=lambda n: found[n]))


def run_training(config: TrainConfig) -> dict[str, Any]:
    """Train to the end; what it took and gave."""
    begun = time.monotonic()
    trainer = Trainer(config)
    ready = time.monotonic()
    walk = trainer.run()
    seconds = time.monotonic() - ready
    lines = [json.loads(line) for line in (config.out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "loss" in line]
    steady = steps[len(steps) // 2:]  # compiling and recording lie in the first steps; a short run is half of them
    tail = steps[-max(1, len(steps) // 20):]
    tokens = sum(s["tokens"] for s in steps)
    return {"tokens": tokens, "tokens_per_second": round(sum(s["tokens"] for s in steady) / sum(
                s["seconds"] for s in steady)), "tokens_per_second_overall": round(tokens / seconds),
            "setup_seconds": round(ready - begun, 2), "run_seconds": round(seconds, 2), "steps": len(steps),
            "train_accuracy": [round(sum(s["step_accuracy"][i] for s in tail) / len(tail), 4)
                               for i in range(config.ttt_steps)],
            "loss": steps[-1]["loss"], "skipped_steps": sum(s["skipped"] for s in steps),
            "data_wait_seconds": round(sum(s["wait"] for s in steps), 3),
            "expected_acceptance_length": round(walk.acceptance_length, 4), "expected_best": round(trainer.best, 4),
            "expected_rates": [round(r, 4) for r in walk.rates],
            "curve": [(line["step"], line["heldout"]["acceptance_length"]) for line in lines if "heldout" in line],
            "way": trainer.stepper.way, "settings": {k: v for k, v in vars(config).items() if not isinstance(v, Path)}}


def serve(bench: Bench, report: Report) -> None:
    """The chosen recipe in both shapes."""
    name = report.other("train").get("best", "ce_1e-3")
    draft = bench.work / "draft"
    export(ExportConfig(run=bench.work / f"run_{name}", out=draft, checkpoint="last", golden=False))
    report.add(recipe=name)
    serve_draft(bench, report, draft, list(SHAPES), ["eval_gsm8k", "eval_mtbench"])


def serve_draft(bench: Bench, report: Report, draft: Path, shapes: list[str], sets: list[str]) -> None:
    """Start a server for each shape, all at once, and measure one after another."""
    engines = [bench.engine(30310 + i, f"{report.part}_{shape.replace('/', '')}", *(SMALL if bench.scale.wide else []),
                            *server_flags(str(draft), *SHAPES[shape])) for i, shape in enumerate(shapes)]
    try:
        for shape, engine in zip(shapes, engines, strict=True):
            engine.ready()
            report.add(**{shape: bench.measure(engine, sets)})
    finally:
        for engine in engines:
            engine.__exit__(None, None, None)


def best(bench: Bench, report: Report) -> None:
    """Prompts, answers, states, training and serving within the time."""
    begun, scale = time.monotonic(), bench.scale

    def spent() -> float:
        return round(time.monotonic() - begun, 1)
    engines = [bench.engine(30320 + i, f"best_{i}", *(LARGE if scale.wide else [])) for i in range(scale.engines)]
    try:
        for engine in engines:
            engine.ready()
        report.add(servers_ready=spent())
        rows = answers_by_the_target(bench, report, engines, begun + 0.40 * bench.args.best_seconds)
        report.add(answered=spent())
    finally:
        for engine in engines:
            engine.__exit__(None, None, None)
    report.add(store=write_store(bench.work / "store_best", bench.target, rows, bench.args.device), stored=spent())
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    chosen = RECIPES[report.other("train").get("best", "ce_2e-3")]
    config = recipe(bench, "probe", store=bench.work / "store_best", tokens_per_batch=scale.best_tokens, max_steps=100,
                    ttt_steps=5, vocab_size=scale.best_vocab, holdout=0.01 if scale.wide else 0.1, epochs=200,
                    intermediate_size=3072 if scale.wide else 0, **{"lr": 2e-3, **chosen})
    probe = run_training(config)
    report.add(probe=probe, probed=spent())
    left = bench.args.best_seconds - spent() - 25  # for compiling, the evaluations and the export
    steps = max(20, int(0.95 * max(left, 0) * probe["tokens_per_second"] * probe["steps"] / probe["tokens"]))
    if not scale.wide:
        steps = 30
    config = replace(config, out=bench.work / "run_best", max_steps=steps, checkpoint_every=max(1, steps // 6))
    report.add(training=run_training(config), trained=spent())
    draft = bench.work / "draft_best"
    export(ExportConfig(run=config.out, out=draft, checkpoint="best", golden=False))
    report.add(seconds=spent())
    serve_draft(bench, report, draft, ["3/1/4"], list(SETS))


def answers_by_the_target(bench: Bench, report: Report, engines: list[Engine], deadline: float) -> list[Row]:
    """Prompts from GSM8K and of the target's own making, with its greedy answers."""
    scale, renderer = bench.scale, Renderer(bench.target)
    opening = text_before_user(renderer)
    end = renderer.tokenizer.token_to_id("<|im_end|>")
    started = time.monotonic()
    asked = [opening] * scale.prompts_chat + [opening + "Write a Python function"] * scale.prompts_code
    ids = [renderer.tokenizer.encode(text, add_special_tokens=False).ids for text in asked]
    own = answer_all(engines, ids, temperature=1.0, top_p=0.95, max_new_tokens=120,
                     **({"stop_token_ids": [end]} if end is not None else {}))
    turns = {}
    for number, out in own.items():
        said = renderer.tokenizer.decode(out, skip_special_tokens=True).strip()
        text = asked[number][len(opening):] + (" " if asked[number] != opening else "") + said
        if 8 < len(text) < 1500 and (end is None or len(out) < 120):
            turns[text] = f"own-{number}"
    report.add(own_prompts=len(turns), own_prompt_tokens=sum(map(len, own.values())),
               own_prompt_seconds=round(time.monotonic() - started, 1), examples=list(turns)[:3])
    prompts = [(name, list(renderer.encode([{"role": "user", "content": text}]))) for text, name in turns.items()]
    prompts += bench.first_turns(bench.args.prompts / "train_gsm8k.jsonl", scale.prompts_gsm8k)
    random.Random(0).shuffle(prompts)
    started = time.monotonic()
    out = answer_all(engines, [p for _, p in prompts], deadline=deadline, temperature=0,
                     max_new_tokens=scale.new_tokens)
    seconds, tokens = time.monotonic() - started, sum(map(len, out.values()))
    report.add(answers=len(out), answer_tokens=tokens, answer_tokens_per_second=round(tokens / seconds))
    return [(prompts[i][0], prompts[i][1], answer) for i, answer in sorted(out.items()) if len(answer) > 2]


def text_before_user(renderer: Renderer) -> str:
    """The chat template's text up to where a user's words begin."""
    mark = "\u2603"
    text: str = renderer.template.render(messages=[{"role": "user", "content": mark}], add_generation_prompt=False,
                                         **renderer.special)
    return text.split(mark)[0]


def advice(bench: Bench, report: Report) -> None:
    """Fit small runs, predict the whole store and twice the epochs, then train those."""
    epochs, every = (3, 0) if bench.scale.wide else (1, 2)
    runs = []
    for fraction in (0.125, 0.25, 0.5):
        config = advised(bench, f"f{fraction}", fraction=fraction, epochs=epochs, checkpoint_every=every)
        report.add(**{f"fraction_{fraction}": run_training(config)["curve"]})
        runs.append(config.out)
    fit, said = advise(runs)
    report.add(fit=vars(fit), advice=[vars(row) for row in said])
    outcomes = {}
    for name, changes in (("2x data", {"fraction": 1.0}), ("2x epochs", {"fraction": 0.5, "epochs": 2 * epochs})):
        config = advised(bench, name.replace(" ", "_"), **{"epochs": epochs, "checkpoint_every": every, **changes})
        predicted = next(row for row in said if row.choice == name)
        outcomes[name] = {"predicted": predicted.length, "low": predicted.low, "high": predicted.high,
                          "came": run_training(config)["expected_acceptance_length"]}
        report.add(outcomes=outcomes)


def advised(bench: Bench, name: str, **changes: Any) -> TrainConfig:
    """A recipe at a constant rate."""
    return recipe(bench, f"advise_{name}", final_lr=1.0, max_steps=0, **changes)


def wide(bench: Bench, report: Report) -> None:
    """See train_kimi.py."""
    for name, values in kimi(bench.args.device, full=bench.scale.wide):
        report.add(**{name: values})


PARTS: dict[str, Callable[[Bench, Report], None]] = {
    "extract": extract, "train": train, "serve": serve, "advise": advice, "kimi": wide,
    "best": best}
LIMITS = {"extract": 100, "train": 220, "serve": 200, "advise": 240, "kimi": 160, "best": 780}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["extract", "train", "serve", "kimi"], metavar="PART")
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--prompts", type=Path, required=True, help="folder of eval_*.jsonl and train_gsm8k.jsonl")
    parser.add_argument("--answers", type=Path, required=True, help="JSONL.xz as `eyas-extract regenerate` writes it")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, default=Path("/dev/shm/eyas_train"))
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--engine-python", default=sys.executable)
    parser.add_argument("--best-seconds", type=float, default=580)
    parser.add_argument("--tiny", action="store_true", help="a dry run")
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.inside:
        part = args.parts[0]
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `finally` ends the servers
        PARTS[part](Bench(args), Report(args, part))
        return
    machine = {"torch": torch.__version__, "device": torch.cuda.get_device_name() if torch.cuda.is_available()
               else "cpu", "cores": os.cpu_count(), "date": time.strftime("%F %T")}
    for part in args.parts:
        report = Report(args, part)
        report.add(machine=machine)
        begun = time.monotonic()
        report.add(exit=run_part(args, part), part_seconds=round(time.monotonic() - begun, 1))


def run_part(args: argparse.Namespace, part: str) -> int | str:
    """One part in a process of its own; its exit code, or why it has none."""
    flags = [word for name in ("target", "prompts", "answers", "out", "work", "device", "engine_python", "best_seconds")
             for word in ("--" + name.replace("_", "-"), str(getattr(args, name)))]
    process = subprocess.Popen([sys.executable, sys.argv[0], part, *flags, *["--tiny"] * args.tiny, "--inside"])
    try:
        return process.wait(LIMITS[part])
    except subprocess.TimeoutExpired:
        process.terminate()  # it ends its servers
        try:
            process.wait(15)
        except subprocess.TimeoutExpired:
            process.kill()
        return f"stopped after {LIMITS[part]} s"


if __name__ == "__main__":
    main()
