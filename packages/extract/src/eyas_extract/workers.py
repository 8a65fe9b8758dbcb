"""Shards over servers: several in flight on each, given back in order, those of a lost server done again by another."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

from eyas_contract import EngineFailure, SampleRecord, TensorRecord
from eyas_extract.conversations import Reject
from eyas_extract.mask import Sample
from eyas_extract.protocol import Captor, RowsDone, read_rows, rows_file
from eyas_extract.server import Refused, Server, ServerLost
from eyas_extract.shard_file import ShardFile

POLL = 0.01  # seconds
TRIES = 3  # of a sample whose rows did not all come
BAD_REQUEST = 400  # HTTP: what SGLang says of a prompt that it cannot take
LOSSES = 5  # of servers over one shard, after which the shard is thought to be why


class Source(Protocol):
    """A server that can be brought back."""

    server: Server

    def revive(self) -> None:
        """Return once it answers again. Raises EngineFailure where it will not."""


@dataclass(frozen=True)
class Filled:
    """A shard with all its states: the file, its tensors' records, its samples, and number and fault of the others."""

    file: ShardFile
    records: tuple[TensorRecord, ...]
    samples: list[SampleRecord]
    bad: dict[int, str]

    def rejects(self, samples: Sequence[Sample]) -> list[Reject]:
        """Those left out of the shard's samples, by line."""
        return [Reject(samples[i].line, samples[i].id, why) for i, why in sorted(self.bad.items())]


@dataclass
class Job:
    """A shard to be filled; `make` lays out a fresh file for each attempt."""

    make: Callable[[], ShardFile]
    future: Future[Filled]
    losses: int = 0


class Workers:
    """Threads that fill shards; use as a context manager.

    A server has `ahead` shards to compute at any time: as many threads again lay out what it computes next, or wait
    for rows on their way to the disk, and hashing and syncing is done by a pool.

    Args:
        sources: the servers.
        ahead: shards that each computes at a time.
        require: raises where a captor is not the one wanted.
        patience: seconds to wait for rows that a server has computed and not yet reported.
    """

    def __init__(self, sources: Sequence[Source], ahead: int, require: Callable[[Captor], None],
                 patience: float = 120.0) -> None:
        self.require, self.patience = require, patience
        self.jobs: queue.Queue[Job | None] = queue.Queue()
        self.left, self.lost = len(sources), 0
        self.lock = threading.Lock()
        self.stopped = False
        self.locks = {id(source): threading.Lock() for source in sources}
        self.dead: dict[int, EngineFailure] = {}
        self.turns = {id(source): threading.BoundedSemaphore(ahead) for source in sources}
        self.finishers = ThreadPoolExecutor(finishers(), "eyas-finisher")
        self.threads = [threading.Thread(target=self._work, args=(source,), daemon=True)
                        for source in sources for _ in range(2 * ahead)]
        for thread in self.threads:
            thread.start()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self.stopped = True
        for _ in self.threads:
            self.jobs.put(None)
        self.finishers.shutdown(wait=False, cancel_futures=True)

    def submit(self, make: Callable[[], ShardFile]) -> Future[Filled]:
        """Have a shard filled; `make` lays out a fresh file for each attempt."""
        future: Future[Filled] = Future()
        self.jobs.put(Job(make, future))
        return future

    def _work(self, source: Source) -> None:
        while (job := self.jobs.get()) is not None and not self.stopped:
            try:
                self._fill(source, job)
            except ServerLost as lost:
                job.losses += 1
                if job.losses > LOSSES:
                    job.future.set_exception(lost)
                    continue
                self.jobs.put(job)
                if not self._revived(source):
                    return
            except BaseException as error:
                job.future.set_exception(error)

    def _revived(self, source: Source) -> bool:
        """Whether a lost server is back; where it is gone for good and the last, every waiting job fails with why."""
        with self.locks[id(source)]:
            if self.stopped:
                return False
            if id(source) not in self.dead:
                if source.server.healthy():
                    return True
                with self.lock:
                    self.lost += 1
                try:
                    source.revive()
                    return True
                except EngineFailure as failure:
                    self.dead[id(source)] = failure
                    self.left -= 1
            if self.left == 0:
                while not self.jobs.empty():
                    job = self.jobs.get()
                    if job is not None:
                        job.future.set_exception(self.dead[id(source)])
            return False

    def _fill(self, source: Source, job: Job) -> None:
        """Have the server fill the job's file, and leave the rest to a finisher."""
        file = job.make()
        try:
            bad = fill(source.server, file, self.require, self.patience, self.turns[id(source)])
        except BaseException:
            file.remove()
            raise
        self.finishers.submit(self._finish, job, file, bad)

    def _finish(self, job: Job, file: ShardFile, bad: dict[int, str]) -> None:
        try:
            records, samples = file.finish(bad)
            rows_file(file.path).unlink(missing_ok=True)
            job.future.set_result(Filled(file, records, samples, bad))
        except BaseException as error:
            file.remove()
            job.future.set_exception(error)


def finishers() -> int:
    """Threads that hash and sync: half the cores, for the other half may be an engine's on the same machine."""
    return max(len(os.sched_getaffinity(0)) // 2, 1)


def fill(server: Server, file: ShardFile, require: Callable[[Captor], None], patience: float,
         turn: AbstractContextManager[object] | None = None) -> dict[int, str]:
    """Have a server write a shard's rows, and wait until it says that all are there.

    Args:
        server: that captures.
        file: laid out.
        require: raises where a captor is not the one wanted.
        patience: seconds to wait for rows that the server has computed and not yet reported.
        turn: held while the server computes.

    Returns:
        Number of each sample whose states cannot be used, and why.

    Raises:
        ServerLost: it is gone; the file is of no use then.
        EngineFailure: it refuses, does not write, or rows were missing every time.
    """
    marks = file.marks()
    number = {mark.first: i for i, mark in enumerate(marks)}
    waiting, offset = set(number.values()), 0
    bad: dict[int, str] = {}
    for attempt in range(TRIES):
        asked = sorted(waiting)
        with turn or nullcontext():
            refused = _ask(server, file, asked, attempt)
        bad |= refused
        waiting -= refused.keys()
        faults: dict[int, str] = {}
        deadline = time.monotonic() + patience
        while len(faults) < len(waiting):
            lines, offset = read_rows(rows_file(file.path), offset)
            for line in lines:
                if isinstance(line, Captor):
                    require(line)
                    continue
                _check(line, marks[number[line.first]].rows)
                i = number[line.first]
                if line.fault:
                    faults[i] = line.fault
                elif i in waiting:
                    waiting.discard(i)
                    faults.pop(i, None)
                    if line.bad:
                        bad[i] = line.bad
            if lines:
                deadline = time.monotonic() + patience
            elif len(faults) < len(waiting):
                if time.monotonic() > deadline:
                    raise _silent(server, file, len(waiting) - len(faults), patience)
                time.sleep(POLL)
        if not waiting:
            return bad
    raise EngineFailure(server.url, f"{len(faults)} samples incomplete {TRIES} times: {next(iter(faults.values()))}",
                        "one row of states for each token, by eyas-extract", "Nothing of them was stored.")


def _ask(server: Server, file: ShardFile, asked: Sequence[int], attempt: int) -> dict[int, str]:
    """Have samples computed, each alone where the server refuses them together; number and reason of those refused."""
    together, alone = (file.marks(2 * attempt + again) for again in (0, 1))
    ids = [file.samples[i].input_ids for i in asked]
    try:
        server.prefill(ids, [together[i].request_id() for i in asked])
        return {}
    except Refused as refusal:
        if refusal.status != BAD_REQUEST:
            raise
    refused = {}
    for i, each in zip(asked, ids, strict=True):
        try:
            server.prefill([each], [alone[i].request_id()])
        except Refused as refusal:
            if refusal.status != BAD_REQUEST:
                raise
            refused[i] = f"the server refuses: {refusal.found[:300]}"
    return refused


def _check(line: RowsDone, rows: int) -> None:
    assert line.rows == rows, f"rows {line.rows} of a sample of {rows} tokens"


def _silent(server: Server, file: ShardFile, count: int, patience: float) -> EngineFailure:
    if not server.healthy():
        return ServerLost(server.url, "no answer", "a server that answers", "Check that it runs.")
    return EngineFailure(server.url, f"the prompts were computed, but for {patience:.0f} s nothing was heard of the "
                         f"states of {count} samples", f"rows in {file.path.parent}, by the capture plug-in",
                         "Is the plug-in loaded there, with this store's folder, or one above it, as its root?")


class Attached:
    """A server that somebody else runs.

    Args:
        url: its URL.
        patience: seconds to wait for it to come back.
    """

    def __init__(self, url: str, patience: float) -> None:
        self.server, self.patience = Server(url), patience

    def revive(self) -> None:
        """Wait for it."""
        deadline = time.monotonic() + self.patience
        while not self.server.healthy():
            if time.monotonic() > deadline:
                raise EngineFailure(self.server.url, f"gone for {self.patience:.0f} s", "a server that answers",
                                    "Start it again; the same command goes on where this one stopped.")
            time.sleep(1.0)
