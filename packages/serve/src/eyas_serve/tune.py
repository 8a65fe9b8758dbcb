"""`eyas-serve tune`: which draft tree pays at which concurrency, and whether any does."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import cycle, islice
from pathlib import Path
from typing import Any

from eyas_contract import EngineFailure, InvalidInput
from eyas_contract.commands import plain_config
from eyas_contract.contract import read_json, write_text_atomic
from eyas_contract.engines.sglang import server_flags
from eyas_contract.interpreters import located
from eyas_contract.outputs import require_place, set_aside
from eyas_serve.client import Client
from eyas_serve.config import BenchConfig, ServeConfig, TuneConfig, with_room
from eyas_serve.levels import Arm, Row, crowded, summarise_level
from eyas_serve.measure import Run, measure
from eyas_serve.prompts import Prompt, load_prompts
from eyas_serve.record import SECRET, shareable
from eyas_serve.server import Server

ALONE = "none"
LOOK = 0.4  # of the seconds for which an arm is measured: what a first look takes at least
WORTH = 1.03  # speculation must be this much faster than the target alone before it is advised


@dataclass(frozen=True)
class Shape:
    """An arm: draft steps, branches a step, tokens verified, attention backend; `none` is the target alone."""

    name: str
    steps: int = 0
    topk: int = 0
    num_draft_tokens: int = 0
    backend: str = ""

    def with_backend(self, backend: str) -> Shape:
        """The same tree with another attention backend, named after both."""
        return dataclasses.replace(self, name=f"{self.name} {backend}", backend=backend)

    def config(self, config: TuneConfig, run_dir: Path | None) -> ServeConfig:
        """The server of this arm."""
        common = {field.name: getattr(config, field.name) for field in dataclasses.fields(ServeConfig)}
        arm: dict[str, Any] = {"draft": None} if is_alone(self.name) else {
            "steps": self.steps, "topk": self.topk, "num_draft_tokens": self.num_draft_tokens}
        if self.backend:
            arm["extra"] = " ".join(filter(None, [config.extra, "--attention-backend", self.backend]))
        return ServeConfig(**{**common, "run_dir": run_dir, **arm})


def is_alone(name: str) -> bool:
    """Whether an arm of this name is the target alone."""
    return name.partition(" ")[0] == ALONE


def parse_shapes(texts: Sequence[str]) -> list[Shape]:
    """`3/1/4` -> a Shape; the target alone comes first, whether it was named or not.

    Raises:
        InvalidInput: text of another form, or a tree that SGLang cannot build (every one named).
    """
    shapes, faults = [Shape(ALONE)], []
    for text in dict.fromkeys(texts):
        if text == ALONE:
            continue
        if not re.fullmatch(r"\d+/\d+/\d+", text):
            faults.append(f"{text!r}: no steps/topk/tokens")
            continue
        steps, topk, tokens = map(int, text.split("/"))
        try:
            server_flags("draft", steps, topk, tokens)
        except InvalidInput as error:
            faults.append(f"{text}: {error.found}")
        else:
            shapes.append(Shape(text, steps, topk, tokens))
    if faults:
        raise InvalidInput("--shapes", "; ".join(faults), "trees as steps/topk/tokens that SGLang can build",
                           "A chain has topk 1 and steps + 1 tokens, as in 3/1/4.")
    return shapes


def run_tune(config: TuneConfig, report: Callable[[str], None] = lambda line: None) -> dict[str, Any]:
    """Measure every arm at every concurrency, write `config.out` after each level and the serve.toml at the end.

    An arm whose server does not start is named in the report, under `failed`, and left out. Called again with the same
    settings and prompts, an interrupted run goes on after the last level that it wrote.

    Raises:
        InvalidInput, EngineFailure: bad prompts, shapes or draft; a target that does not serve alone.
    """
    shapes = parse_shapes(config.shapes)
    if config.backends:
        shapes = [shape.with_backend(name) for shape in shapes for name in config.backends]
    prompts = load_prompts(config.prompts, config.target, config.limit)
    levels = sorted(set(config.concurrencies))
    if not levels or levels[0] < 1 or config.draft is None:
        raise InvalidInput("eyas-serve tune", f"concurrencies {levels}, draft {config.draft}",
                           "a draft, and one or more concurrencies of 1 or more", "Correct the flags.")
    config = with_room(config, levels)
    require_place(config.out, "a JSON file for the report, by --out")
    require_place(config.serve_toml, "a TOML file for the best settings, by --serve-toml", taken=(config.out.suffix,))
    kept = Kept(config, levels, report)
    last_alone = max(i for i, shape in enumerate(shapes) if is_alone(shape.name))
    for i, shape in enumerate(shapes):
        try:
            _measure_server(config, shape, prompts, kept, report)
        except EngineFailure as error:
            kept.leave_out(shape.name, str(error))
            if i == last_alone and not kept.rows:
                raise
            report(f"{shape.name} left out: {error}")
    best = kept.write()["advice"][str(levels[0])]["best"]
    chosen = next(shape for shape in shapes if shape.name == best)
    for path in set_aside(config.serve_toml):
        report(f"what was {config.serve_toml.name} is now {path}")
    write_text_atomic(config.serve_toml, as_toml(chosen.config(config, None)))
    return kept.write(complete=True)


class Kept:
    """What was measured so far, on disk as soon as it is known.

    Attributes:
        levels: concurrencies, rising.
        rows: of an interrupted run with the same settings and prompts, where there was one, and then of this.
        failed: arms that did not start or died, and their engines' words.
    """

    def __init__(self, config: TuneConfig, levels: Sequence[int], report: Callable[[str], None]) -> None:
        digest = hashlib.sha256(config.prompts.read_bytes()).hexdigest()
        self.out, self.levels, self.failed = config.out, levels, dict[str, str]()
        self.settings = json.loads(json.dumps({**plain_config(shareable(config)), "prompts_sha256": digest}))
        earlier = read_json(self.out, "a report of eyas-serve tune") if self.out.exists() else {}
        goes_on = earlier.get("complete") is False and earlier.get("config") == self.settings
        self.rows: list[Row] = earlier["rows"] if goes_on else []
        if goes_on:
            report(f"{self.out} is of an interrupted run with these settings: going on after its {len(self.rows)} "
                   "measurements")
            return
        for path in set_aside(self.out):
            report(f"an earlier report is now {path}")

    def missing(self, arm: str) -> list[int]:
        """Levels at which this arm was not measured yet."""
        return [level for level in self.levels
                if not any(row["arm"] == arm and row["concurrency"] == level for row in self.rows)]

    def leave_out(self, arm: str, words: str) -> None:
        """Keep nothing of it."""
        self.failed[arm] = words
        self.rows = [row for row in self.rows if row["arm"] != arm]

    def write(self, *, complete: bool = False) -> dict[str, Any]:
        """The report, with advice for the levels at which the target alone was measured."""
        compared = [level for level in self.levels
                    if any(is_alone(row["arm"]) and row["concurrency"] == level for row in self.rows)]
        result = {"complete": complete, "rows": self.rows, "advice": advise(self.rows, compared),
                  "failed": self.failed, "config": self.settings}
        write_text_atomic(self.out, json.dumps(result, indent=1) + "\n")
        return result


def _measure_server(config: TuneConfig, shape: Shape, prompts: list[Prompt], kept: Kept,
                    report: Callable[[str], None]) -> None:
    """One arm at every concurrency at which it was not measured yet."""
    missing = kept.missing(shape.name)
    if not missing:
        return
    run_dir = config.run_dir / shape.name.replace("/", "-").replace(" ", "-") if config.run_dir else None
    with Server(shape.config(config, run_dir), report) as server:
        for level in missing:
            kept.rows += measure_arm(server.client, prompts, config, shape, level, kept.rows)
            kept.write()


def measure_arm(client: Client, prompts: list[Prompt], config: TuneConfig, shape: Shape, level: int,
                so_far: Sequence[Row]) -> list[Row]:
    """One arm at one concurrency: a first look, then all prompts, and again for `config.seconds` in all, unless that
    look was far slower than the best arm's. It is taken twice before that is believed: the machine may have been busy
    for a second."""
    best = max((row["first_tokens_per_second"] for row in so_far if row["concurrency"] == level), default=0.0)
    enough = 0.0 if is_alone(shape.name) else config.drop_below * best
    run = _first_look(client, prompts, config, shape, level)
    if run.tokens_per_second < enough:
        run = max(run, _first_look(client, prompts, config, shape, level), key=lambda look: look.tokens_per_second)
    stopped = run.tokens_per_second < enough
    wanted = max(len(prompts), math.ceil(config.seconds * len(run.answers) / run.seconds))
    whole = run if stopped or len(run.answers) >= wanted else _measure(client, list(islice(cycle(prompts), wanted)),
                                                                      config, shape, level)
    row, once = (summarise_level(Arm(shape.name, level, whole.answers[:count], whole.seconds, whole.busy, client.room),
                                 whole.asked[:count])[0] for count in (None, len(prompts)))
    accepted = {key: once[key] for key in ("acceptance_length", "histogram", "interval", "rates")}  # of a prompt once
    return [{**row, **accepted, "first_tokens_per_second": run.tokens_per_second, "stopped_early": stopped}]


def _first_look(client: Client, prompts: list[Prompt], config: TuneConfig, shape: Shape, level: int) -> Run:
    """A few prompts; where they were over in no time, as many as last for a share of `config.seconds`: of requests that
    all begin together prompts take less time than of those that come and go, and more so in one arm than in another."""
    count, wanted = max(config.first, 2 * level), LOOK * config.seconds
    run = _measure(client, list(islice(cycle(prompts), count)), config, shape, level)
    if run.seconds >= wanted:
        return run
    return _measure(client, list(islice(cycle(prompts), math.ceil(count * wanted / run.seconds))), config, shape, level)


def _measure(client: Client, prompts: list[Prompt], config: TuneConfig, shape: Shape, level: int) -> Run:
    settings = BenchConfig(target=config.target, prompts=config.prompts, max_new_tokens=config.max_new_tokens,
                           concurrency=level, stream=False)
    return measure(client, prompts, settings, f"{shape.name}, {level} at a time")


def advise(rows: Sequence[Row], levels: Sequence[int]) -> dict[str, Any]:
    """For each concurrency the best arm, its ratio to the target alone, and from where on speculation does not pay.

    Returns:
        {"1": {"best", "tokens_per_second", "speedup"}, ..., "break_even": concurrency or None}. An arm must be
        3 % faster than the target alone to be advised; `none` as the best arm means: do not speculate here.
    """
    result: dict[str, Any] = {}
    for level in levels:
        speeds = {row["arm"]: row["tokens_per_second"] for row in rows
                  if row["concurrency"] == level and not row["stopped_early"]}
        alone = max(filter(is_alone, speeds), key=lambda name: speeds[name])
        best = max(speeds, key=lambda name: speeds[name])
        best = best if speeds[best] >= WORTH * speeds[alone] else alone
        result[str(level)] = {"best": best, "tokens_per_second": speeds[best], "speedup": speeds[best] / speeds[alone]}
    pays = [level for level in levels if not is_alone(result[str(level)]["best"])]
    result["break_even"] = next((level for level in levels if level > max(pays, default=0)), None)
    return result


def as_toml(config: ServeConfig) -> str:
    """A file for `eyas-serve launch --config`: what differs from the defaults. JSON's scalars are TOML's too.

    Radix cache and metrics are off for measuring alone, and so are not in it. Nor are variables of the environment that
    may be secrets: a comment names them.
    """
    secrets = sorted(filter(SECRET.search, config.environment))
    lines = [f"# {name} is left out of the environment: set it where this is launched." for name in secrets]
    config = dataclasses.replace(config, environment={
        name: value for name, value in config.environment.items() if name not in secrets})
    for field in dataclasses.fields(ServeConfig):
        value = getattr(config, field.name)
        if value == field.default or field.name in ("port", "run_dir", "radix_cache", "metrics"):
            continue
        # A virtual environment's interpreter is a link, and not what it leads to.
        absolute = located if field.name == "engine_python" else Path.resolve
        plain = str(absolute(value)) if isinstance(value, Path) else value
        if isinstance(plain, (str, int, float)):
            lines.append(f"{field.name} = {_scalar(plain)}")
        elif isinstance(plain, (tuple, list)):
            lines.append(f"{field.name} = {_scalar(list(plain))}")
        elif isinstance(plain, dict) and plain:
            pairs = ", ".join(f"{_scalar(key)} = {_scalar(text)}" for key, text in plain.items())
            lines.append(f"{field.name} = {{{pairs}}}")
    return "\n".join(lines) + "\n"


def _scalar(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)  # TOML knows no surrogate pairs


def _cell(row: Row, rows: Sequence[Row]) -> str:
    if not row["stopped_early"]:
        return f"{row['tokens_per_second']:.1f}"
    best = max(other["first_tokens_per_second"] for other in rows if other["concurrency"] == row["concurrency"])
    return f"{row['first_tokens_per_second'] / best:.0%} *"


def tune_table(result: dict[str, Any]) -> str:
    """Tokens/s of every arm at every concurrency, and the advice in words. Of an arm that was stopped its first look as
    a share of the best one's: its few requests have no speed to be set beside the others'."""
    advice = result["advice"]
    levels = [key for key in advice if key != "break_even"]
    arms = list(dict.fromkeys(row["arm"] for row in result["rows"]))
    cells = {(row["arm"], str(row["concurrency"])): _cell(row, result["rows"]) for row in result["rows"]}
    text = ["tokens/s" + " " * 18 + "".join(f"{level:>12}" for level in levels)]
    text += [f"  {arm:<24}" + "".join(f"{cells.get((arm, level), '-'):>12}" for level in levels) for arm in arms]
    if any(row["stopped_early"] for row in result["rows"]):
        text.append("  * stopped early: its first requests' speed, beside the best arm's first")
    for level in levels:
        row = advice[level]
        text.append(f"{level} at a time: " + (f"{row['best']}, {row['speedup']:.2f} times the target alone"
                                              if not is_alone(row["best"]) else "do not speculate here"))
    if advice["break_even"] is not None:
        text.append(f"from {advice['break_even']} at a time on speculation does not pay")
    text += [f"warning: {words}" for words in crowded(result["rows"])]
    text += [f"left out: {name}: {words.splitlines()[0]}" for name, words in result.get("failed", {}).items()]
    return "\n".join(text)
