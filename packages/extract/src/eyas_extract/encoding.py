"""Rows -> samples, in order, by as many processes as keep an engine busy: templates and round trips take a while."""

from __future__ import annotations

import itertools
import multiprocessing
import os
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path

from eyas_extract.config import Overlong, RunConfig
from eyas_extract.conversations import Conversation, Reject, count_lines
from eyas_extract.mask import Sample, encode
from eyas_extract.template import ChatTemplate

ROWS = 64  # of one task
WORTH_IT = 4096  # rows from which on processes, which take seconds to start, save time
MOST = 8

Row = Conversation | Reject
Encoded = tuple[Row, list[Sample], list[str]]
WORKER: list[ChatTemplate] = []  # of this process, where it is one of the pool's


def processes(config: RunConfig, first_line: int) -> int:
    """How many processes encode: as told, else one for each core but one where there are many rows to come."""
    if config.encoders:
        return config.encoders
    cores = len(os.sched_getaffinity(0))
    return min(MOST, cores - 1) if count_lines(config.data) - first_line >= WORTH_IT and cores > 2 else 1


def encoded(rows: Iterable[Row], config: RunConfig, template: ChatTemplate, count: int) -> Iterator[Encoded]:
    """Each row with its samples and the reasons of those left out.

    Args:
        count: processes; 1 is this one.
    """
    if count == 1:
        for row in rows:
            yield _one(row, template, config.max_length, config.overlong)
        return
    pool = ProcessPoolExecutor(count, multiprocessing.get_context("spawn"), _load,
                               (config.target, sorted(template.stop_ids), template.day))
    try:
        waiting: deque[Future[list[Encoded]]] = deque()
        for group in _groups(rows):
            waiting.append(pool.submit(_many, group, config.max_length, config.overlong))
            if len(waiting) > 4 * count:
                yield from waiting.popleft().result()
        while waiting:
            yield from waiting.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _groups(rows: Iterable[Row]) -> Iterator[list[Row]]:
    source = iter(rows)
    while group := list(itertools.islice(source, ROWS)):
        yield group


def _load(target: Path, stop_ids: list[int], day: str) -> None:
    WORKER.append(ChatTemplate(target, stop_ids))
    WORKER[0].day = day


def _many(rows: list[Row], max_length: int, overlong: Overlong) -> list[Encoded]:
    return [_one(row, WORKER[0], max_length, overlong) for row in rows]


def _one(row: Row, template: ChatTemplate, max_length: int, overlong: Overlong) -> Encoded:
    if isinstance(row, Reject):
        return row, [], []
    return (row, *encode(row, template, max_length=max_length, overlong=overlong))
