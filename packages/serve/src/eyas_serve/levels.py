"""A benchmark's levels of concurrency: what each arm reached at each, by data set, and how two reports differ."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from eyas_serve.acceptance import Acceptance
from eyas_serve.client import Generation
from eyas_serve.numbers import acceptance_interval, percentiles
from eyas_serve.prompts import Prompt

Row = dict[str, Any]
WAVES = 4  # requests for each that is in flight at a time, below which a level's end weighs in its speed
COLUMNS = ("arm", "concurrency", "data_set", "requests", "tokens", "tokens_per_second", "acceptance_length",
           "interval_low", "interval_high", "ttft_p50", "ttft_p90", "ttft_p99", "tpot_p50", "tpot_p90", "tpot_p99")


@dataclass(frozen=True)
class Arm:
    """One server's answers at one concurrency, in the prompts' order; `busy` is this process's share of a core, `room`
    how many requests the server runs at a time, where it says so."""

    name: str
    concurrency: int
    answers: tuple[Generation, ...]
    seconds: float
    busy: float = 0.0
    room: int | None = None


def summarise_level(arm: Arm, prompts: Sequence[Prompt]) -> list[Row]:
    """Numbers over all requests, then for each data set where there are several. Seconds, tokens, tokens/s."""
    sets = list(dict.fromkeys(prompt.data_set for prompt in prompts))
    rows = [_row(arm, "all", arm.answers)]
    if len(sets) > 1:
        rows += [_row(arm, name, [answer for prompt, answer in zip(prompts, arm.answers, strict=True)
                                  if prompt.data_set == name]) for name in sets]
    return rows


def _row(arm: Arm, data_set: str, answers: Sequence[Generation]) -> Row:
    tokens, drafted = sum(len(a.output_ids) for a in answers), [a.histogram for a in answers if a.histogram]
    interval = acceptance_interval(drafted)
    acceptance = Acceptance.of(drafted)
    first = percentiles([a.first for a in answers if a.first is not None])
    each = percentiles([(a.seconds - a.first) / (len(a.output_ids) - 1) for a in answers
                        if a.first is not None and len(a.output_ids) > 1])
    whole = data_set == "all"
    return {"arm": arm.name, "concurrency": arm.concurrency, "data_set": data_set, "requests": len(answers),
            "tokens": tokens, "seconds": arm.seconds, "tokens_per_second": tokens / arm.seconds if whole else None,
            "acceptance_length": acceptance.length if drafted else None, "histogram": list(acceptance.histogram),
            "interval": list(interval) if interval else None, "rates": acceptance.conditional_rates(),
            "ttft": first, "tpot": each, "latency": percentiles([a.seconds for a in answers]),
            "client_busy": arm.busy if whole else None, "room": arm.room}


def as_csv(rows: Sequence[Row]) -> str:
    """The rows as CSV with COLUMNS."""
    sink = io.StringIO()
    writer = csv.writer(sink, lineterminator="\n")
    writer.writerow(COLUMNS)
    for row in rows:
        interval = row["interval"] or (None, None)
        flat = {**row, "interval_low": interval[0], "interval_high": interval[1],
                **{f"{name}_{share}": (row[name] or {}).get(share) for name in ("ttft", "tpot")
                   for share in ("p50", "p90", "p99")}}
        writer.writerow(["" if flat[name] is None else flat[name] for name in COLUMNS])
    return sink.getvalue()


def speedups(rows: Sequence[Row]) -> dict[int, float]:
    """Concurrency -> tokens/s with the draft over those without, where both were measured."""
    speed = {(row["arm"], row["concurrency"]): row["tokens_per_second"] for row in rows if row["data_set"] == "all"}
    return {level: speed[("draft", level)] / speed[("target alone", level)] for arm, level in speed
            if arm == "draft" and ("target alone", level) in speed}


def compare(old: Sequence[Row], new: Sequence[Row]) -> list[Row]:
    """Row by row; `acceptance` is `worse` or `better` only where the intervals do not meet."""
    before = {(row["arm"], row["concurrency"], row["data_set"]): row for row in old}
    result = []
    for row in new:
        past = before.get((row["arm"], row["concurrency"], row["data_set"]))
        if past is None:
            continue
        word = "unknown"
        if row["interval"] and past["interval"]:
            word = "worse" if row["interval"][1] < past["interval"][0] else \
                "better" if row["interval"][0] > past["interval"][1] else "same within the intervals"
        faster = row["tokens_per_second"] / past["tokens_per_second"] if row["tokens_per_second"] else None
        result.append({"arm": row["arm"], "concurrency": row["concurrency"], "data_set": row["data_set"],
                       "acceptance_length": [past["acceptance_length"], row["acceptance_length"]],
                       "acceptance": word, "speed_ratio": faster})
    return result


def warnings(rows: Sequence[Row]) -> list[str]:
    """What a reader of a benchmark's speeds has to know."""
    return [*crowded(rows), *thin(rows)]


def crowded(rows: Sequence[Row]) -> list[str]:
    """A warning for each server that ran fewer requests at a time than were in flight."""
    few = [row for row in rows if row["data_set"] == "all" and (row.get("room") or math.inf) < row["concurrency"]]
    return [f"{row['arm']} ran at most {row['room']} of {row['concurrency']} requests at a time, the others waited: "
            "its speed there is that of fewer; serve it with --max-running-requests" for row in few]


def thin(rows: Sequence[Row]) -> list[str]:
    """A warning for each level with so few requests that its end, when fewer are in flight, weighs in its speed."""
    few = {row["concurrency"]: row["requests"] for row in rows
           if row["data_set"] == "all" and row["concurrency"] > 1 and row["requests"] < WAVES * row["concurrency"]}
    return [f"{requests} requests at {level} at a time: towards the end fewer are in flight, which weighs in its speed;"
            f" give {WAVES * level} prompts or more" for level, requests in few.items()]


def lines(rows: Sequence[Row]) -> list[str]:
    """The rows for a terminal."""
    text = [f"  {'arm':<13}{'at a time':>10}  {'data set':<16}{'tokens/s':>9}  acceptance length     TTFT p50/p99 ms  "
            "TPOT p50/p99 ms"]
    for row in rows:
        length = "-" if row["acceptance_length"] is None else f"{row['acceptance_length']:.3f}"
        length += f" [{row['interval'][0]:.3f}, {row['interval'][1]:.3f}]" if row["interval"] else ""
        speed = f"{row['tokens_per_second']:.1f}" if row["tokens_per_second"] else "-"
        text.append(f"  {row['arm']:<13}{row['concurrency']:>10}  {row['data_set']:<16}{speed:>9}  {length:<22}"
                    f"{_milliseconds(row['ttft']):>15}  {_milliseconds(row['tpot']):>15}".rstrip())
    return text


def _milliseconds(values: dict[str, float] | None) -> str:
    return f"{1000 * values['p50']:.1f}/{1000 * values['p99']:.1f}" if values else "-"
