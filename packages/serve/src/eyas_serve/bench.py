"""Measures a server on prompts, with the draft and without it, and compares what both said."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas_contract import InvalidInput
from eyas_contract.commands import Progress, plain_config
from eyas_contract.contract import read_json, write_text_atomic
from eyas_contract.outputs import set_aside
from eyas_serve.acceptance import DEFINITION, Acceptance
from eyas_serve.api_key import read_key
from eyas_serve.client import Client, Generation
from eyas_serve.config import BenchConfig, with_room
from eyas_serve.html import page
from eyas_serve.levels import Arm, Row, as_csv, compare, lines, summarise_level, warnings
from eyas_serve.probe.session import API_KEY
from eyas_serve.prompts import Prompt, load_prompts
from eyas_serve.server import Server

Report = dict[str, Any]
Levels = list[Row]


@dataclass(frozen=True)
class Run:
    """All answers of one server and what was asked, in order, and the seconds from the first request to the last
    answer."""

    answers: tuple[Generation, ...]
    seconds: float
    busy: float = 0.0
    asked: tuple[Prompt, ...] = ()

    @property
    def tokens(self) -> int:
        """Generated tokens."""
        return sum(len(answer.output_ids) for answer in self.answers)

    @property
    def tokens_per_second(self) -> float:
        """Generated tokens of all requests together, prompt passes included in the time."""
        return self.tokens / self.seconds


def measure(client: Client, prompts: list[Prompt], config: BenchConfig, label: str) -> Run:
    """Send every prompt, `concurrency` at a time, after some that do not count: `warmup`, and `concurrency` at least.

    A live conversation is one of these, its questions one after the other.
    """
    def ask(prompt: Prompt | None) -> list[tuple[Prompt, Generation]]:
        send, done = client.stream if config.stream else client.generate, list[tuple[Prompt, Generation]]()
        while prompt is not None:
            answer = send(list(prompt.input_ids), config.max_new_tokens)
            bar.update(len(answer.output_ids))
            done.append((prompt, answer))
            prompt = prompt.follow(answer.output_ids)
        return done

    bar = Progress(0, "tokens", f"{label} warm-up")
    with ThreadPoolExecutor(config.concurrency) as pool:
        list(pool.map(ask, prompts[:max(config.warmup, config.concurrency)]))
        bar = Progress(0, "tokens", label)
        start, used = time.perf_counter(), time.process_time()
        done = [turn for conversation in pool.map(ask, prompts) for turn in conversation]
        seconds = time.perf_counter() - start
        busy = (time.process_time() - used) / seconds
    asked, answers = (tuple(column) for column in zip(*done, strict=True))
    acceptance = Acceptance.of(answer.histogram for answer in answers)
    bar.close(f"acceptance length {acceptance.length:.2f}" if acceptance.rounds else "")
    return Run(answers, seconds, busy, asked)


def measure_levels(client: Client, prompts: list[Prompt], config: BenchConfig, label: str,
                   arm: str) -> tuple[Run, Levels]:
    """Every concurrency in turn; the first one's run, and all levels' rows."""
    runs, room = [], client.room
    for level in dict.fromkeys((config.concurrency, *config.sweep)):
        run = measure(client, prompts, dataclasses.replace(config, concurrency=level), f"{label}, {level} at a time")
        runs.append((run, summarise_level(Arm(arm, level, run.answers, run.seconds, run.busy, room), run.asked)))
    return runs[0][0], [row for _, rows in runs for row in rows]


def run_bench(config: BenchConfig, report: Callable[[str], None] = lambda line: None) -> Report:
    """Run the benchmark, write `config.out`, and return what was written.

    Raises:
        InvalidInput, EngineFailure: bad prompts or draft; a server that does not start or answer.
    """
    _require_sense(config)
    prompts = [prompt for path in (config.prompts, *config.data_sets)
               for prompt in load_prompts(path, config.target, config.limit, config.turns)]
    old = None if config.against is None else read_report(config.against)
    earlier = None if config.baseline_report is None else earlier_baseline(config, prompts)
    levels: Levels = []
    if not config.url:
        config = with_room(config, (config.concurrency, *config.sweep))
    version, run, baseline = _measure_url(config, prompts, levels) if config.url else \
        _measure_own(config, prompts, report, levels)
    baseline = earlier or baseline
    result = {**summarise(config, version, run, baseline), "levels": levels}
    if old is not None:
        result["against"] = {"report": str(config.against), "rows": compare(old["levels"], levels)}
    config.out.parent.mkdir(parents=True, exist_ok=True)
    table_file, page_file = config.out.with_suffix(".csv"), config.out.with_suffix(".html")
    for path in set_aside(config.out, table_file, page_file):
        report(f"an earlier report is now {path}")
    write_text_atomic(config.out, json.dumps(result, indent=1) + "\n")
    write_text_atomic(table_file, as_csv(levels))
    write_text_atomic(page_file, page(result))
    return result


def _require_sense(config: BenchConfig) -> None:
    faults = [f"{name} {value}" for name, value in (("max-new-tokens", config.max_new_tokens),
                                                    ("concurrency", config.concurrency)) if value < 1]
    if config.baseline_url and not config.url:
        faults.append("baseline-url without url")
    if config.baseline_report and (config.baseline_url or not config.baseline):
        faults.append("baseline-report together with another word on the baseline")
    if config.draft is None and not config.url:
        faults.append("neither draft nor url")
    if faults:
        raise InvalidInput("eyas-serve bench", "; ".join(faults), "counts of 1 or more, and a draft or a --url to "
                           "measure", "Correct the flags.")


def _measure_own(config: BenchConfig, prompts: list[Prompt],
                 report: Callable[[str], None], levels: Levels) -> tuple[str, Run, Run | None]:
    with Server(config, report) as server:
        assert server.engine is not None
        version = server.engine.sglang
        run, rows = measure_levels(server.client, prompts, config, "with draft", "draft")
        levels += rows
    if not config.baseline or config.baseline_report:
        return version, run, None
    run_dir = config.run_dir / "baseline" if config.run_dir else None
    with Server(dataclasses.replace(config, draft=None, run_dir=run_dir), report) as server:
        baseline, rows = measure_levels(server.client, prompts, config, "without draft", "target alone")
        levels += rows
        return version, run, baseline


def read_report(path: Path) -> Report:
    """An earlier report with levels. Raises InvalidInput for anything else."""
    wanted = "a report of eyas-serve bench, by --against"
    report: Report = read_json(path, wanted)
    if not isinstance(report.get("levels"), list):
        raise InvalidInput(str(path), "no levels in it", wanted, "Name the JSON file that bench wrote.")
    return report


def _measure_url(config: BenchConfig, prompts: list[Prompt], levels: Levels) -> tuple[str, Run, Run | None]:
    assert config.url is not None
    key = read_key(config) or os.environ.get(API_KEY, "")
    client = Client(config.url, api_key=key)
    version = str(client.info().get("version", "unknown"))
    run, rows = measure_levels(client, prompts, config, config.url, "draft")
    levels += rows
    if config.baseline_url is None:
        return version, run, None
    baseline, rows = measure_levels(Client(config.baseline_url, api_key=key), prompts, config, config.baseline_url,
                                    "target alone")
    levels += rows
    return version, run, baseline


SAME_FOR_A_BASELINE = ("target", "device", "dtype", "tp", "radix_cache", "max_new_tokens", "turns", "concurrency",
                       "max_running_requests", "extra")


def earlier_baseline(config: BenchConfig, prompts: list[Prompt]) -> Run:
    """The run without a draft that `config.baseline_report` holds.

    Raises:
        InvalidInput: not such a report, or one of other settings or prompts (every difference named).
    """
    path = config.baseline_report
    assert path is not None
    wanted = "a report of eyas-serve bench with a baseline, by --baseline-report"
    report = read_json(path, wanted)
    try:
        old, seconds, rows = report["config"], report["baseline_seconds"], report["prompts"]
        answers = [Generation(tuple(row["baseline_output_ids"]), (), 0.0, "") for row in rows]
        ids = [row["id"] for row in rows]
    except (KeyError, TypeError) as error:
        raise InvalidInput(str(path), f"no baseline in it ({error!r})", wanted, "Measure one: leave out the flag.") \
            from error
    now = plain_config(config)
    faults = [f"{key} {old.get(key)}, here {now[key]}" for key in SAME_FOR_A_BASELINE if old.get(key) != now[key]]
    wanted_ids = [name for prompt in prompts for name in prompt.ids]
    if ids != wanted_ids:
        faults.append(f"{len(ids)} prompts, not the {len(wanted_ids)} of {config.prompts}")
    if faults or seconds is None:
        raise InvalidInput(str(path), "; ".join(faults) or "measured without a baseline",
                           "a baseline of the same settings and prompts", "Measure one: leave out --baseline-report.")
    return Run(tuple(answers), float(seconds))


def summarise(config: BenchConfig, version: str, run: Run, baseline: Run | None) -> Report:
    """The report. `outputs_identical` and the baseline's numbers are null where no baseline was measured."""
    acceptance = Acceptance.of(answer.histogram for answer in run.answers)
    differing = [] if baseline is None else [
        {"id": prompt.id, "first_difference": first_difference(ours.output_ids, theirs.output_ids)}
        for prompt, ours, theirs in zip(run.asked, run.answers, baseline.answers, strict=True)
        if ours.output_ids != theirs.output_ids]
    return {
        "engine": {"name": "SGLang", "version": version},
        "acceptance_length": acceptance.length, "definition": DEFINITION,
        "rounds": acceptance.rounds, "accepted": acceptance.accepted, "histogram": list(acceptance.histogram),
        "conditional_rates": acceptance.conditional_rates(),
        "tokens": run.tokens, "seconds": run.seconds, "tokens_per_second": run.tokens_per_second,
        "baseline_tokens_per_second": baseline and baseline.tokens_per_second,
        "baseline_seconds": baseline and baseline.seconds,
        "speedup": baseline and run.tokens_per_second / baseline.tokens_per_second,
        "outputs_identical": None if baseline is None else not differing, "differing": differing,
        "prompts": [{"id": prompt.id, "prompt_tokens": len(prompt.input_ids), "tokens": len(answer.output_ids),
                     "seconds": answer.seconds, "acceptance_length": Acceptance(answer.histogram).length,
                     "output_ids": list(answer.output_ids),
                     **({} if baseline is None else {"baseline_output_ids": list(baseline.answers[i].output_ids)})}
                    for i, (prompt, answer) in enumerate(zip(run.asked, run.answers, strict=True))],
        "config": plain_config(config),
    }


def first_difference(ours: tuple[int, ...], theirs: tuple[int, ...]) -> int:
    """Index of the first token on which two different outputs differ; the shorter's length where it is a prefix."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))


def table(result: Report) -> str:
    """The report's numbers for a terminal."""
    engine, settings = result["engine"], result["config"]
    rows = [("acceptance length", f"{result['acceptance_length']:.3f}",
             f"{result['rounds']} rounds; bonus token counted, the prompt pass's token not")]
    rows += [(f"accepted at position {k}", f"{rate:.1%}", "given the one before") for k, rate in
             enumerate(result["conditional_rates"], 1)]
    rows.append(("tokens/s with the draft", f"{result['tokens_per_second']:.1f}",
                 f"{result['tokens']} tokens, concurrency {settings['concurrency']}, {settings['dtype']}"))
    if result["baseline_tokens_per_second"] is not None:
        count, differing = len(result["prompts"]), len(result["differing"])
        rows.append(("tokens/s without", f"{result['baseline_tokens_per_second']:.1f}",
                     f"speed-up {result['speedup']:.2f}"))
        rows.append(("outputs identical", "yes" if result["outputs_identical"] else "NO",
                     f"{count - differing} of {count} prompts"))
    width = max(len(row[0]) for row in rows)
    head = f"{engine['name']} {engine['version']}, steps {settings['steps']}, topk {settings['topk']}, " \
           f"draft tokens {settings['num_draft_tokens']}, {len(result['prompts'])} prompts"
    text = [head, *(f"  {name:<{width}}  {value:>8}  {note}" for name, value, note in rows)]
    text += ["", *lines(result["levels"])] if result.get("levels") else []
    for row in result.get("against", {}).get("rows", []):
        faster = f", speed {row['speed_ratio']:.2f} times" if row["speed_ratio"] else ""
        text.append(f"  against the earlier report: {row['arm']}, {row['concurrency']} at a time, {row['data_set']}: "
                    f"acceptance {row['acceptance']}{faster}")
    levels = result.get("levels", [])
    text += [f"  warning: {words}" for words in warnings(levels)]
    busy = max((row["client_busy"] or 0 for row in levels), default=0)
    if busy > 0.7:
        text.append(f"  warning: this client was busy {busy:.0%} of the time: speeds are lower bounds; try --no-stream")
    return "\n".join(text)
