"""Measures a server on prompts, with the draft and without it, and compares what both said."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable

from eyas_contract import InvalidInput
from eyas_contract.outputs import require_place
from eyas_serve.api_key import read_key
from eyas_serve.bench_report import Report, Writer, earlier_baseline, read_report
from eyas_serve.client import Client
from eyas_serve.config import BenchConfig, with_room
from eyas_serve.interpreter import find_interpreter
from eyas_serve.levels import Row
from eyas_serve.measure import Run, measure_levels
from eyas_serve.probe.session import API_KEY
from eyas_serve.prompts import Prompt, load_data_sets
from eyas_serve.server import Server

# Our settings, and SGLang's names for those that a running server tells.
TOLD = {"device": "device", "dtype": "dtype", "tp": "tp_size", "dp": "dp_size", "ep": "ep_size",
        "draft": "speculative_draft_model_path", "steps": "speculative_num_steps", "topk": "speculative_eagle_topk",
        "num_draft_tokens": "speculative_num_draft_tokens"}


def run_bench(config: BenchConfig, report: Callable[[str], None] = lambda line: None) -> Report:
    """Run the benchmark, write `config.out` and the files beside it, and return what was written.

    The draft's half is written as soon as it is measured, with `complete` false until the whole is.

    Raises:
        InvalidInput, EngineFailure: bad prompts or draft; a place that nothing can be written to; a server that does
            not start or answer, or that dies meanwhile.
    """
    _require_sense(config)
    require_place(config.out, "a JSON file for the report, by --out", taken=(".csv", ".html"))
    prompts = load_data_sets((config.prompts, *config.data_sets), config.target, config.limit, config.turns)
    old = None if config.against is None else read_report(config.against)
    key = (read_key(config) or os.environ.get(API_KEY, "")) if config.url else ""
    if config.url:
        told = Client(config.url, api_key=key).info()
        version, known = str(told.get("version", "unknown")), {ours: told.get(theirs) for ours, theirs in TOLD.items()}
    else:
        config = with_room(config, (config.concurrency, *config.sweep))
        version, known = find_interpreter(config.engine_python, config.device).sglang, {}
    earlier = None if config.baseline_report is None else earlier_baseline(config, prompts, version, known)
    writer = Writer(config, version, known, prompts, old, report)
    measure = _measure_url if config.url else _measure_own
    return measure(config, prompts, earlier, writer, key)


def _require_sense(config: BenchConfig) -> None:
    faults = [f"{name} {value}" for name, value in (("max-new-tokens", config.max_new_tokens),
                                                    ("concurrency", config.concurrency),
                                                    *(("sweep", level) for level in config.sweep)) if value < 1]
    if config.baseline_url and not config.url:
        faults.append("baseline-url without url")
    if config.baseline_report and (config.baseline_url or not config.baseline):
        faults.append("baseline-report together with another word on the baseline")
    if config.draft is None and not config.url:
        faults.append("neither draft nor url")
    if faults:
        raise InvalidInput("eyas-serve bench", "; ".join(faults), "counts of 1 or more, and a draft or a --url to "
                           "measure", "Correct the flags.")


def _measure_own(config: BenchConfig, prompts: list[Prompt], earlier: Run | None, writer: Writer, key: str) -> Report:
    with Server(config, writer.report) as server:
        run, levels = measure_levels(server.client, prompts, config, "with draft", "draft")
    if earlier is not None or not config.baseline:
        return writer.write(run, earlier, levels)
    writer.write(run, None, levels, complete=False)
    run_dir = config.run_dir / "baseline" if config.run_dir else None
    with Server(dataclasses.replace(config, draft=None, run_dir=run_dir), writer.report) as server:
        baseline, rows = measure_levels(server.client, prompts, config, "without draft", "target alone")
    return writer.write(run, baseline, levels + rows)


def _measure_url(config: BenchConfig, prompts: list[Prompt], earlier: Run | None, writer: Writer, key: str) -> Report:
    assert config.url is not None

    def measured(url: str, arm: str) -> tuple[Run, list[Row]]:
        return measure_levels(Client(url, api_key=key), prompts, config, url, arm)

    run, levels = measured(config.url, "draft")
    if earlier is not None or config.baseline_url is None:
        return writer.write(run, earlier, levels)
    writer.write(run, None, levels, complete=False)
    baseline, rows = measured(config.baseline_url, "target alone")
    return writer.write(run, baseline, levels + rows)
