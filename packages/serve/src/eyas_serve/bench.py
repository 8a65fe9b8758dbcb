"""Measures a server on prompts, with the draft and without it, and compares what both said."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager

from eyas_contract import InvalidInput
from eyas_contract.outputs import require_place
from eyas_serve.api_key import read_key
from eyas_serve.bench_report import Report, Writer, earlier_baseline, read_report
from eyas_serve.client import Client
from eyas_serve.config import BenchConfig, with_room
from eyas_serve.interpreter import find_interpreter
from eyas_serve.measure import measure_levels
from eyas_serve.probe.session import API_KEY
from eyas_serve.prompts import load_data_sets
from eyas_serve.server import Server

# Our settings, and SGLang's names for those that a running server tells.
TOLD = {"device": "device", "dtype": "dtype", "tp": "tp_size", "dp": "dp_size", "ep": "ep_size",
        "draft": "speculative_draft_model_path", "steps": "speculative_num_steps", "topk": "speculative_eagle_topk",
        "num_draft_tokens": "speculative_num_draft_tokens"}

Measured = tuple[str, AbstractContextManager[Client]]  # its name in the progress, and the server


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
        with closing(Client(config.url, api_key=key)) as asked:
            told = asked.info()
        version, known = str(told.get("version", "unknown")), {ours: told.get(theirs) for ours, theirs in TOLD.items()}
    else:
        config = with_room(config, (config.concurrency, *config.sweep))
        version, known = find_interpreter(config.engine_python, config.device).sglang, {}
    earlier = None if config.baseline_report is None else earlier_baseline(config, prompts, version, known)
    writer = Writer(config, version, known, prompts, old, report)
    label, served = _with_draft(config, key, report)
    with served as client:
        run, levels = measure_levels(client, prompts, config, label, "draft")
    alone = _alone(config, key, report) if earlier is None else None
    if alone is None:
        return writer.write(run, earlier, levels)
    writer.write(run, None, levels, complete=False)
    label, served = alone
    with served as client:
        baseline, rows = measure_levels(client, prompts, config, label, "target alone")
    return writer.write(run, baseline, levels + rows)


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


def _with_draft(config: BenchConfig, key: str, report: Callable[[str], None]) -> Measured:
    """The server that is measured, not yet started."""
    if config.url:
        return config.url, closing(Client(config.url, api_key=key))
    return "with draft", _started(config, report)


def _alone(config: BenchConfig, key: str, report: Callable[[str], None]) -> Measured | None:
    """The same without the draft, where one is to be measured."""
    if config.url:
        return (config.baseline_url, closing(Client(config.baseline_url, api_key=key))) if config.baseline_url else None
    run_dir = config.run_dir / "baseline" if config.run_dir else None
    alone = dataclasses.replace(config, draft=None, run_dir=run_dir)
    return ("without draft", _started(alone, report)) if config.baseline else None


@contextmanager
def _started(config: BenchConfig, report: Callable[[str], None]) -> Iterator[Client]:
    with Server(config, report) as server:
        yield server.client
