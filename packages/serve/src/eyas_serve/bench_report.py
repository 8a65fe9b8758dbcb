"""A benchmark's report: what it holds, how it is written and read again, and its text for a terminal."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from eyas_contract import InvalidInput
from eyas_contract.commands import plain_config
from eyas_contract.contract import read_json, write_text_atomic
from eyas_contract.outputs import set_aside
from eyas_serve.acceptance import DEFINITION, Acceptance
from eyas_serve.client import Generation
from eyas_serve.config import BenchConfig, ServeConfig
from eyas_serve.html import page
from eyas_serve.levels import Row, as_csv, compare, lines, warnings
from eyas_serve.measure import Run
from eyas_serve.prompts import Prompt
from eyas_serve.record import shareable

Report = dict[str, Any]
# What a target alone may differ in and still be the same baseline: the draft, places, names and watching.
FREE_FOR_A_BASELINE = {"draft", "steps", "topk", "num_draft_tokens", "host", "port", "engine_python", "api_key_file",
                       "api_key_env", "preflight", "guard", "stall_seconds", "on_stall", "acceptance_floor",
                       "log_rotate_mb", "run_dir"}
MEASURED_ALIKE = ("max_new_tokens", "turns", "concurrency", "stream")


class Writer:
    """Writes a benchmark's files; an earlier report's are put aside before the first.

    Args:
        version: SGLang's.
        known: settings as a running server tells them, None for those that it does not; empty for a server of ours.
        old: an earlier report to compare with.
        report: takes lines of progress.
    """

    def __init__(self, config: BenchConfig, version: str, known: Mapping[str, Any], prompts: Sequence[Prompt],
                 old: Report | None, report: Callable[[str], None]) -> None:
        self.config, self.old, self.report = config, old, report
        self.about = {"engine": {"name": "SGLang", "version": version}, "definition": DEFINITION,
                      "prompts_sha256": digest(prompts), "config": {**plain_config(shareable(config)), **known}}
        self.files = (config.out, config.out.with_suffix(".csv"), config.out.with_suffix(".html"))
        self.begun = False

    def write(self, run: Run, baseline: Run | None, levels: list[Row], *, complete: bool = True) -> Report:
        """The report, as written.

        Raises:
            InvalidInput: it cannot be written; the message holds the numbers.
        """
        result = {"complete": complete, **self.about, **summarise(run, baseline), "levels": levels}
        if self.old is not None:
            result["against"] = {"report": str(self.config.against), "rows": compare(self.old["levels"], levels),
                                 "settings": differences(self.old, result)}
        try:
            for path in () if self.begun else set_aside(*self.files):
                self.report(f"an earlier report is now {path}")
            self.begun = True
            for path, text in zip(self.files, (json.dumps(result, indent=1) + "\n", as_csv(levels), page(result)),
                                  strict=True):
                write_text_atomic(path, text)
        except OSError as error:
            raise InvalidInput(str(self.config.out), f"cannot be written ({error.strerror})", "room for the report, by "
                               "--out", f"This is what it would hold:\n{table(result)}") from error
        return result


def digest(prompts: Sequence[Prompt]) -> str:
    """Of what is asked first, in order; what a live conversation goes on with depends on the answers."""
    return hashlib.sha256(json.dumps([list(prompt.input_ids) for prompt in prompts]).encode()).hexdigest()


def read_report(path: Path) -> Report:
    """An earlier report with levels. Raises InvalidInput for anything else."""
    wanted = "a report of eyas-serve bench, by --against"
    report: Report = read_json(path, wanted)
    if not isinstance(report, dict) or not isinstance(report.get("levels"), list):
        raise InvalidInput(str(path), "no levels in it", wanted, "Name the JSON file that bench wrote.")
    return report


def differences(old: Report, new: Report) -> list[str]:
    """Settings that two reports do not share, places and names aside, e.g. `steps 3, before 5`."""
    before, now = old.get("config", {}), new["config"]
    aside = {"out", "against", "run_dir", "port", "prompts", "data_sets", "baseline_report", "url", "baseline_url"}
    found = [f"{name} {now[name]}, before {before[name]}" for name in now
             if name not in aside and name in before and before[name] != now[name]]
    versions = [report.get("engine", {}).get("version") for report in (old, new)]
    found += [f"SGLang {versions[1]}, before {versions[0]}"] if versions[0] != versions[1] else []
    hashes = [report.get("prompts_sha256") for report in (old, new)]
    return found + (["other prompts"] if None not in hashes and hashes[0] != hashes[1] else [])


def earlier_baseline(config: BenchConfig, prompts: Sequence[Prompt], version: str, known: Mapping[str, Any]) -> Run:
    """The run without a draft that `config.baseline_report` holds.

    Raises:
        InvalidInput: not such a report, or one of other settings, prompts or version (every difference named).
    """
    path = config.baseline_report
    assert path is not None
    wanted = "a report of eyas-serve bench with a baseline, by --baseline-report"
    report = read_json(path, wanted)
    try:
        old, seconds, rows = report["config"], report["baseline_seconds"], report["prompts"]
        answers = [Generation(tuple(row["baseline_output_ids"]), (), 0.0, "") for row in rows]
        earlier_version, asked = report["engine"]["version"], report["prompts_sha256"]
    except (KeyError, TypeError) as error:
        raise InvalidInput(str(path), f"no baseline in it ({error!r})", wanted, "Measure one: leave out the flag.") \
            from error
    now = {**plain_config(shareable(config)), **known}
    alike = [field.name for field in dataclasses.fields(ServeConfig) if field.name not in FREE_FOR_A_BASELINE]
    faults = [f"{key} {old.get(key)}, here {now[key]}" for key in (*alike, *MEASURED_ALIKE) if old.get(key) != now[key]]
    wanted_ids = [name for prompt in prompts for name in prompt.ids]
    if len(rows) != len(wanted_ids):
        faults.append(f"{len(rows)} prompts, not the {len(wanted_ids)} of {config.prompts}")
    elif asked != digest(prompts):
        faults.append(f"other prompts than those of {config.prompts}")
    if earlier_version != version:
        faults.append(f"SGLang {earlier_version}, here {version}")
    if faults or seconds is None:
        raise InvalidInput(str(path), "; ".join(faults) or "measured without a baseline",
                           "a baseline of the same settings and prompts", "Measure one: leave out --baseline-report.")
    return Run(tuple(answers), float(seconds))


def summarise(run: Run, baseline: Run | None) -> Report:
    """A report's numbers. Null: `outputs_identical` and the baseline's where none was measured, the acceptance length
    where there was no round."""
    acceptance = Acceptance.of(answer.histogram for answer in run.answers)
    differing = [] if baseline is None else [
        {"id": prompt.id, "first_difference": first_difference(ours.output_ids, theirs.output_ids)}
        for prompt, ours, theirs in zip(run.asked, run.answers, baseline.answers, strict=True)
        if ours.output_ids != theirs.output_ids]
    return {
        "acceptance_length": acceptance.length if acceptance.rounds else None,
        "rounds": acceptance.rounds, "accepted": acceptance.accepted, "histogram": list(acceptance.histogram),
        "conditional_rates": acceptance.conditional_rates(),
        "tokens": run.tokens, "seconds": run.seconds, "tokens_per_second": run.tokens_per_second,
        "baseline_tokens_per_second": baseline and baseline.tokens_per_second,
        "baseline_seconds": baseline and baseline.seconds,
        "speedup": baseline and run.tokens_per_second / baseline.tokens_per_second,
        "outputs_identical": None if baseline is None else not differing, "differing": differing,
        "prompts": [_of_prompt(prompt, answer, None if baseline is None else baseline.answers[i])
                    for i, (prompt, answer) in enumerate(zip(run.asked, run.answers, strict=True))]}


def _of_prompt(prompt: Prompt, answer: Generation, baseline: Generation | None) -> Row:
    return {"id": prompt.id, "prompt_tokens": len(prompt.input_ids), "tokens": len(answer.output_ids),
            "seconds": answer.seconds,
            "acceptance_length": Acceptance(answer.histogram).length if sum(answer.histogram) else None,
            "output_ids": list(answer.output_ids),
            **({} if baseline is None else {"baseline_output_ids": list(baseline.output_ids)})}


def first_difference(ours: tuple[int, ...], theirs: tuple[int, ...]) -> int:
    """Index of the first token on which two different outputs differ; the shorter's length where it is a prefix."""
    return next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))


def table(result: Report) -> str:
    """The report's numbers for a terminal."""
    engine, settings = result["engine"], result["config"]
    length = "-" if result["acceptance_length"] is None else f"{result['acceptance_length']:.3f}"
    rows = [("acceptance length", length,
             f"{result['rounds']} rounds; bonus token counted, the prompt pass's token not")]
    rows += [(f"accepted at position {k}", f"{rate:.1%}", "given the one before") for k, rate in
             enumerate(result["conditional_rates"], 1)]
    rows.append(("tokens/s with the draft", f"{result['tokens_per_second']:.1f}",
                 f"{result['tokens']} tokens, concurrency {settings['concurrency']}, {settings['dtype'] or 'dtype?'}"))
    if result["baseline_tokens_per_second"] is not None:
        count, differing = len(result["prompts"]), len(result["differing"])
        rows.append(("tokens/s without", f"{result['baseline_tokens_per_second']:.1f}",
                     f"speed-up {result['speedup']:.2f}"))
        rows.append(("outputs identical", "yes" if result["outputs_identical"] else "NO",
                     f"{count - differing} of {count} prompts"))
    width = max(len(row[0]) for row in rows)
    tree = "a tree that it does not tell" if settings["steps"] is None else \
        f"steps {settings['steps']}, topk {settings['topk']}, draft tokens {settings['num_draft_tokens']}"
    text = [f"{engine['name']} {engine['version']}, {tree}, {len(result['prompts'])} prompts",
            *(f"  {name:<{width}}  {value:>8}  {note}" for name, value, note in rows)]
    text += ["", *lines(result["levels"])] if result.get("levels") else []
    return "\n".join([*text, *_against(result), *(f"  warning: {words}" for words in _warnings(result))])


def _against(result: Report) -> list[str]:
    against = result.get("against", {})
    text = [f"  against the earlier report, of other settings: {words}" for words in against.get("settings", [])]
    for row in against.get("rows", []):
        faster = f", speed {row['speed_ratio']:.2f} times" if row["speed_ratio"] else ""
        text.append(f"  against the earlier report: {row['arm']}, {row['concurrency']} at a time, {row['data_set']}: "
                    f"acceptance {row['acceptance']}{faster}")
    return text


def _warnings(result: Report) -> list[str]:
    levels = result.get("levels", [])
    text = [] if result["rounds"] else ["no round of speculation was seen: this server drafts nothing, or does not "
                                        "tell what it accepts"]
    text += warnings(levels)
    busy = max((row["client_busy"] or 0 for row in levels), default=0)
    return text + ([f"this client was busy {busy:.0%} of the time: speeds are lower bounds; try --no-stream"]
                   if busy > 0.7 else [])
