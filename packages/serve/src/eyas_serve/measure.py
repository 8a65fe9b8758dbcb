"""Prompts sent to a server, so many at a time, and what came back in which time."""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass

from eyas_contract import EngineFailure
from eyas_contract.commands import Progress
from eyas_serve.acceptance import Acceptance
from eyas_serve.client import Client, Generation
from eyas_serve.config import BenchConfig
from eyas_serve.in_flight import in_flight
from eyas_serve.levels import Arm, Row, summarise_level
from eyas_serve.prompts import Prompt


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
    made = 0

    def ask(prompt: Prompt | None) -> list[tuple[Prompt, Generation]]:
        nonlocal made
        send, done = client.stream if config.stream else client.generate, list[tuple[Prompt, Generation]]()
        while prompt is not None:
            try:
                answer = send(list(prompt.input_ids), config.max_new_tokens)
            except EngineFailure as error:
                raise EngineFailure(f"{error.where}, prompt {prompt.id!r} of {len(prompt.input_ids)} tokens",
                                    error.found, error.wanted, error.remedy) from error
            made += len(answer.output_ids)
            done.append((prompt, answer))
            prompt = prompt.follow(answer.output_ids)
        bar.update(1, f"{made / (time.perf_counter() - start):,.0f} tokens/s")
        return done

    first = prompts[:max(config.warmup, config.concurrency)]
    bar, start = Progress(len(first), "prompts", f"{label} warm-up"), time.perf_counter()
    in_flight(ask, first, config.concurrency, client.look)
    bar, made = Progress(len(prompts), "prompts", label), 0
    start, used = time.perf_counter(), time.process_time()
    done = [turn for conversation in in_flight(ask, prompts, config.concurrency, client.look) for turn in conversation]
    seconds = time.perf_counter() - start
    busy = (time.process_time() - used) / seconds
    asked, answers = (tuple(column) for column in zip(*done, strict=True))
    acceptance = Acceptance.of(answer.histogram for answer in answers)
    run = Run(answers, seconds, busy, asked)
    bar.close(f"{run.tokens_per_second:,.0f} tokens/s"
              + (f", acceptance length {acceptance.length:.2f}" if acceptance.rounds else ""))
    return run


def measure_levels(client: Client, prompts: list[Prompt], config: BenchConfig, label: str,
                   arm: str) -> tuple[Run, list[Row]]:
    """Every concurrency in turn; the first one's run, and all levels' rows."""
    runs, room = [], client.room
    for level in dict.fromkeys((config.concurrency, *config.sweep)):
        run = measure(client, prompts, dataclasses.replace(config, concurrency=level), f"{label}, {level} at a time")
        runs.append((run, summarise_level(Arm(arm, level, run.answers, run.seconds, run.busy, room), run.asked)))
    return runs[0][0], [row for _, rows in runs for row in rows]
