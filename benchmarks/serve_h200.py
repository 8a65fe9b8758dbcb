"""Serving shown on one GPU host within eight minutes: launch, probe, bench, tune, what the guard costs.

    python benchmarks/serve_h200.py --target T --draft D --prompts P.jsonl --out FOLDER [--device cpu]

Each step (`--steps` names some) is a command as a person types it, with a time limit of its own; one that fails is
recorded and the others go on; with `--minutes` over, what is left is recorded as skipped.

    launch    two servers side by side, with the draft and without, watched by `--json-events` to READY
    probe     the served draft against its golden record
    bench     both at every concurrency: JSON, CSV and the HTML report; then both stop, and leave nothing
    tune      the draft's trees, the target alone among them, at every concurrency; a serve.toml
    overhead  guard and metrics against bare SGLang (`guard_overhead.py`)

Results: FOLDER/serve_h200.json, written after every step, FOLDER/bench.html, and the commands' own files and logs.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
from guard_overhead import machine
from host import expose_plugin, nvidia_smi

from eyas_contract.contract import read_json, write_text_atomic
from eyas_serve.processes import running

HERE = Path(__file__).resolve().parent
CLI = (sys.executable, "-m", "eyas_serve.cli")
ENDING = 20.0  # seconds for a command to end by itself after SIGTERM
Facts = dict[str, Any]


class StepError(Exception):
    """A step's command failed, or had no time left."""


def end(process: subprocess.Popen[str]) -> int:
    """SIGTERM, then SIGKILL; the exit code. The engine's keeper ends what a killed command leaves."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        return process.wait(ENDING)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


class Run:
    """The steps' common settings, deadline and results."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.out, self.servers = options, options.out, list[Launch]()
        self.deadline = time.monotonic() + 60 * options.minutes
        self.result: Facts = {"machine": machine(), "settings": {
            key: value.name if isinstance(value, Path) else value for key, value in vars(options).items()}, "steps": {}}

    def step(self, name: str, seconds: float, work: Callable[[float], Facts]) -> None:
        """Do it within its limit; its facts, or why there are none, into the results."""
        began, left = time.monotonic(), self.deadline - time.monotonic()
        try:
            if left < 5:
                raise StepError("skipped: no time left")
            facts = work(min(seconds, left))
        except (StepError, OSError, ValueError, KeyError) as error:
            facts = {"failed": f"{type(error).__name__}: {error}"}
        facts["step_seconds"] = round(time.monotonic() - began, 1)
        self.result["steps"][name] = facts
        text = json.dumps(self.result, indent=1, default=lambda path: path.name)
        write_text_atomic(self.out / "serve_h200.json", text + "\n")
        print(f"{name}: {facts['step_seconds']} s", facts.get("failed", "")[:500], flush=True)

    def command(self, name: str, words: Sequence[object], seconds: float) -> str:
        """Run to its end; what it wrote to stdout. Everything stands in FOLDER/name.log too."""
        text = [str(word) for word in words]
        with (self.out / f"{name}.log").open("w", encoding="utf-8") as log:
            process = subprocess.Popen(text, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True)
            try:
                told, _ = process.communicate(timeout=seconds)
            except subprocess.TimeoutExpired:
                raise StepError(f"ended after its {seconds:.0f} s; see {name}.log") from None
            finally:
                end(process)
            log.write(told)
        if process.returncode:
            raise StepError(f"exit code {process.returncode}: {(self.out / f'{name}.log').read_text()[-1500:]}")
        return told

    def engine_flags(self) -> list[object]:
        """Of every server alike."""
        options = self.options
        words: list[object] = ["--target", options.target, "--device", options.device, "--dtype", options.dtype,
                               "--no-radix-cache", "--max-total-tokens", options.max_total_tokens,
                               "--cuda-graph-max-bs", max(options.concurrencies),
                               "--max-running-requests", max(options.concurrencies)]
        for flag, value in (("--engine-python", options.engine_python), ("--extra", options.extra)):
            words += [f"{flag}={value}"] if value else []  # a value that begins with dashes needs the sign
        return words

    def draft_flags(self) -> list[object]:
        """Of the servers that speculate."""
        steps, topk, tokens = self.options.shape.split("/")
        return ["--draft", self.options.draft, "--steps", steps, "--topk", topk, "--num-draft-tokens", tokens]


class Launch:
    """`eyas-serve launch`, its events kept."""

    def __init__(self, run: Run, name: str, flags: Sequence[object]) -> None:
        self.run, self.name, self.events = run, name, list[Facts]()
        self.url, self.log = "", run.out / f"{name}.events.jsonl"
        words = [*CLI, "launch", *run.engine_flags(), *flags, "--port", 0, "--run-dir", run.out / name, "--json-events"]
        if run.options.mem_fraction:
            words += ["--mem-fraction", run.options.mem_fraction]
        self.errors = (run.out / f"{name}.log").open("w", encoding="utf-8")
        self.process = subprocess.Popen([str(word) for word in words], stdout=subprocess.PIPE, stderr=self.errors,
                                        text=True, start_new_session=True)

    def ready(self) -> Facts:
        """Read events until READY; the time of each phase. Ends with the process."""
        assert self.process.stdout is not None
        with self.log.open("w", encoding="utf-8") as sink:
            for line in self.process.stdout:
                sink.write(line)
                self.events.append(json.loads(line))
                if self.events[-1]["event"] == "ready":
                    break
        last = self.events[-1] if self.events else {}
        if last.get("event") != "ready":
            words = last.get("found") or (self.run.out / f"{self.name}.log").read_text()[-1500:]
            raise StepError(f"{self.name} ended: {words}")
        self.url = last["url"]
        phases = {event["phase"]: event["seconds"] for event in reversed(self.events) if event["event"] == "progress"}
        return {"seconds_to_ready": last["seconds"], "first_acceptance_length": last.get("acceptance_length"),
                "phase_began": dict(sorted(phases.items(), key=lambda pair: pair[1])), "events": len(self.events),
                "progress": [event["text"] for event in self.events if event["text"]]}

    def stop(self) -> Facts:
        """SIGTERM; the exit code (143 is right) and how many of its processes are left (0 is right)."""
        tree = psutil.Process(self.process.pid).children(recursive=True) if self.process.poll() is None else []
        began = time.monotonic()
        code = end(self.process)
        left = sum(running(process.pid) for process in tree)
        self.errors.close()
        return {"exit_code": code, "processes": len(tree), "left": left,
                "seconds": round(time.monotonic() - began, 1)}


def gpu_mib() -> int | None:
    """Memory in use on all GPUs, MiB; None without nvidia-smi."""
    try:
        return sum(int(row[0]) for row in nvidia_smi("memory.used"))
    except (OSError, subprocess.CalledProcessError):
        return None


def launch(run: Run, seconds: float) -> Facts:
    """Both servers at once."""
    before = gpu_mib()
    run.servers = [Launch(run, "draft", run.draft_flags()), Launch(run, "alone", [])]
    with ThreadPoolExecutor(2) as pool:
        waiting = {server.name: pool.submit(server.ready) for server in run.servers}
        try:
            facts: Facts = {name: future.result(seconds) for name, future in waiting.items()}
            return {**facts, "gpu_mib": [before, gpu_mib()]}
        except TimeoutError:
            raise StepError(f"not READY within {seconds:.0f} s") from None
        finally:
            if not all(future.done() and not future.exception() for future in waiting.values()):
                for server in run.servers:
                    end(server.process)


def probe(run: Run, seconds: float) -> Facts:
    """Verdict, findings and stages of the served draft."""
    found: Facts = json.loads(run.command("probe", [*CLI, "probe", run.servers[0].url, "--json"], seconds))
    return {key: found[key] for key in ("verdict", "engine", "findings", "proposals") if key in found}


def bench(run: Run, seconds: float) -> Facts:
    """With and without the draft at every concurrency."""
    options, (draft, alone) = run.options, run.servers
    first, *others = options.concurrencies
    words = [*CLI, "bench", *run.engine_flags(), *run.draft_flags(), "--url", draft.url, "--baseline-url", alone.url,
             "--prompts", options.prompts, "--turns", options.turns, "--limit", options.limit, "--max-new-tokens",
             options.max_new_tokens, "--concurrency", first, "--out", run.out / "bench.json"]
    words += ["--sweep", *others] if others else []
    words += ["--data-sets", *options.data_sets] if options.data_sets else []
    told = run.command("bench", words, seconds)
    print(told, end="", flush=True)
    report = read_json(run.out / "bench.json", "the report of eyas-serve bench")
    return {"levels": [{key: row[key] for key in ("arm", "concurrency", "data_set", "requests", "tokens_per_second",
                                                  "acceptance_length", "interval", "ttft", "tpot")}
                       for row in report["levels"]],
            "outputs_identical": report["outputs_identical"], "differing": len(report["differing"]),
            "files": ["bench.json", "bench.csv", "bench.html"]}


def stop(run: Run, seconds: float) -> Facts:
    """Both servers."""
    facts: Facts = {server.name: server.stop() for server in run.servers}
    return {**facts, "gpu_mib": gpu_mib()}


def tune(run: Run, seconds: float) -> Facts:
    """Every tree at every concurrency; ended early, what the arms so far gave."""
    options, out = run.options, run.out / "tune.json"
    words = [*CLI, "tune", *run.engine_flags(), *run.draft_flags(), "--prompts", options.prompts, "--limit",
             options.limit, "--max-new-tokens", options.max_new_tokens, "--concurrencies", *options.concurrencies,
             "--shapes", *options.shapes, "--out", out, "--serve-toml", run.out / "serve.toml"]
    ended = ""
    try:
        print(run.command("tune", words, seconds), end="", flush=True)
    except StepError as error:
        ended = str(error)
        if not out.exists():
            raise
    report = read_json(out, "the report of eyas-serve tune")
    facts = {"advice": report["advice"], "rows": [
        {key: row[key] for key in ("arm", "concurrency", "tokens_per_second", "acceptance_length", "stopped_early")}
        for row in report["rows"]], "not_started": report.get("failed", {})}
    return {**facts, "ended": ended} if ended else facts


def overhead(run: Run, seconds: float) -> Facts:
    """Two servers of its own; a third of the time is theirs to start in."""
    options, out = run.options, run.out / "guard_overhead.json"
    steps, topk, tokens = options.shape.split("/")
    words: list[object] = [
        sys.executable, HERE / "guard_overhead.py", "--target", options.target, "--draft", options.draft, "--prompts",
        options.prompts, "--out", out, "--device", options.device, "--dtype", options.dtype, "--steps", steps, "--topk",
        topk, "--num-draft-tokens", tokens, "--max-total-tokens", options.max_total_tokens, "--seconds", 0.5 * seconds,
        "--max-new-tokens", options.max_new_tokens, "--count", options.overhead_count, "--concurrency",
        min(8, options.overhead_count), "--extra", options.extra]
    words += ["--engine-python", options.engine_python] if options.engine_python else []
    words += ["--mem-fraction", options.mem_fraction] if options.mem_fraction else []
    try:
        print(run.command("overhead", words, seconds), end="", flush=True)
    except StepError:
        if "over_off" not in (read_json(out, "rounds") if out.exists() else {}):
            raise
    report: Facts = read_json(out, "the report of guard_overhead.py")
    return {key: value for key, value in report.items() if key not in ("machine", "settings")}


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("target", "draft", "prompts", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--data-sets", type=Path, nargs="*", default=[])
    parser.add_argument("--turns", choices=("last", "live"), default="last")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--engine-python", type=Path)
    parser.add_argument("--shape", default="3/1/4", help="of launch, bench and overhead: steps/topk/tokens")
    parser.add_argument("--shapes", nargs="+", default=["1/1/2", "3/1/4", "3/4/8"], help="of tune")
    steps = ("bench", "tune", "overhead")
    parser.add_argument("--steps", nargs="+", choices=steps, default=steps, help="bench: launch, probe, bench and stop")
    parser.add_argument("--concurrencies", type=int, nargs="+", default=[1, 4, 16, 64])
    for name, default in (("limit", 96), ("max-new-tokens", 128), ("max-total-tokens", 65536), ("overhead-count", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--mem-fraction", type=float, default=None, help="of each of two servers side by side")
    parser.add_argument("--minutes", type=float, default=7.5, help="of everything")
    parser.add_argument("--extra", default="", help="further arguments of SGLang, for every server")
    return parser.parse_args(argv)


def main() -> None:
    """All steps in order."""
    options = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    expose_plugin(options.out / "entry", "eyas-serve")
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    run, share = Run(options), 60 * options.minutes
    try:
        if "bench" in options.steps:
            run.step("launch", 0.25 * share, lambda seconds: launch(run, seconds))
            if "failed" not in run.result["steps"]["launch"]:
                run.step("probe", 30, lambda seconds: probe(run, seconds))
                run.step("bench", 0.35 * share, lambda seconds: bench(run, seconds))
                run.step("stop", 60, lambda seconds: stop(run, seconds))
        if "tune" in options.steps:
            run.step("tune", 0.6 * share, lambda seconds: tune(run, seconds))
        if "overhead" in options.steps:
            run.step("overhead", 0.25 * share, lambda seconds: overhead(run, seconds))
    finally:
        for server in run.servers:
            end(server.process)
    print(options.out / "serve_h200.json")
    sys.exit(any("failed" in facts for facts in run.result["steps"].values()))


if __name__ == "__main__":
    main()
