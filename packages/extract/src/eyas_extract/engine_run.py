"""Extraction through SGLang: shards laid out here, filled by the plug-in inside the engine, committed here in order."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack
from pathlib import Path

import torch

from eyas_contract import CaptureSpec, Contract, ContractMismatch, EngineFailure, InvalidInput, Mismatch
from eyas_contract.commands import Progress
from eyas_contract.safetensors_header import read_header
from eyas_extract.check import read_tensor
from eyas_extract.config import RunConfig
from eyas_extract.conversations import Reject, count_lines
from eyas_extract.engine_process import Engine, EngineSettings
from eyas_extract.golden import Golden
from eyas_extract.mask import Sample
from eyas_extract.pending import Pending, shards
from eyas_extract.protocol import Captor, CaptureSettings, rows_file
from eyas_extract.shard_file import ShardFile
from eyas_extract.store import Ready, StoreWriter
from eyas_extract.template import ChatTemplate
from eyas_extract.workers import Attached, Filled, Source, Workers, fill, finishers

CHECK_TOKENS = 64
CHECK_PATIENCE = 60.0  # seconds to wait for the check's states
PATIENCE = 60.0  # seconds to wait for a lost server of somebody else's
RESTARTS = 3  # in a row, of an engine of our own that dies before another shard is done
RUN_DIR = ".engine"  # in the store's folder: log and status files of our own engine


class Own:
    """An engine that this run starts, and starts again when it dies."""

    def __init__(self, settings: EngineSettings, capture: CaptureSettings, run_dir: Path) -> None:
        self.settings, self.capture, self.run_dir = settings, capture, run_dir
        self._start()
        self.deaths = 0

    def revive(self) -> None:
        """Start it again."""
        self.engine.stop()
        self.deaths += 1
        if self.deaths > RESTARTS:
            raise EngineFailure(self.engine.where, f"died {self.deaths} times without finishing a shard",
                                "an engine that computes the samples", f"See its log: {self.engine.log}")
        self._start()

    def _start(self) -> None:
        self.engine = Engine(self.settings, self.capture, self.run_dir)
        self.server = self.engine.server


def extract(config: RunConfig, device: str, template: ChatTemplate, writer: StoreWriter) -> str:
    """Make and commit the shards that are missing; returns what the first check found.

    Raises:
        EyasError: no usable engine, one that captures something else, or a full disk.
    """
    progress = Progress(count_lines(config.data), "rows", "extract", already=writer.next_line - 1)
    kept: list[Reject] = []
    check = ""
    with ExitStack() as stack:
        workers: Workers | None = None
        sources: list[Source] = []
        window: deque[tuple[Pending, Future[Filled] | None]] = deque()
        limit = 2 * config.ahead * max(len(config.servers), config.engines, 1) + finishers()
        committer = Committer(writer, progress, sources)
        for pending in shards(config, template, writer.next_line, progress):
            if pending.samples and workers is None:
                sources += open_sources(config, device, writer, stack)
                check = "; ".join(first_check(source, config, writer, pending.samples[0]) for source in sources)
                workers = stack.enter_context(Workers(sources, config.ahead, wanted(writer.contract)))
            future = workers.submit(layout(writer, pending)) if workers and pending.samples else None
            window.append((pending, future))
            if len(window) > limit:
                committer.commit(window)
        while window:
            committer.commit(window)
        kept = committer.kept
        writer.finish(kept)
        lost = f", {workers.lost} servers lost on the way" if workers and workers.lost else ""
    progress.close(f"{writer.manifest.num_tokens:,} tokens{lost}")
    return check


class Committer:
    """Puts filled shards into the store, in the input's order."""

    def __init__(self, writer: StoreWriter, progress: Progress, sources: Sequence[Source]) -> None:
        self.writer, self.progress, self.sources = writer, progress, sources
        self.kept: list[Reject] = []
        self.start, self.done = time.monotonic(), 0

    def commit(self, window: deque[tuple[Pending, Future[Filled] | None]]) -> None:
        """Wait for the first shard, and add it with those after it that are done too. Raises what filling raised."""
        ready: list[Ready] = []
        samples = 0
        try:
            while window and (not samples or (future := window[0][1]) is None or future.done()):
                pending, future = window.popleft()
                samples += len(pending.samples)
                ready += self._ready(pending, future.result() if future else None)
        finally:  # those before one that failed are whole
            if ready:
                self.writer.adopt(ready)
        self.progress.update(samples, f"{self.done / (time.monotonic() - self.start):,.0f} tokens/s")

    def _ready(self, pending: Pending, filled: Filled | None) -> list[Ready]:
        rejects = [*self.kept, *pending.rejects]
        if filled is not None:
            rejects += filled.rejects(pending.samples)
            for source in self.sources:
                if isinstance(source, Own):
                    source.deaths = 0
            self.done += pending.tokens
        rejects.sort(key=lambda r: r.line)
        if filled is None or not filled.samples:
            if filled is not None:
                filled.file.remove()
            self.kept = rejects
            return []
        self.kept = []
        return [Ready(filled.file.path, filled.records, filled.samples, rejects, pending.next_line)]


def layout(writer: StoreWriter, pending: Pending) -> Callable[[], ShardFile]:
    """What lays out a shard's file."""
    capture, metadata = writer.contract.capture, writer.metadata(pending.next_line)
    return lambda: ShardFile(writer.folder, capture, pending.samples, metadata)


def open_sources(config: RunConfig, device: str, writer: StoreWriter, stack: ExitStack) -> list[Source]:
    """The servers named, or an engine of our own."""
    if config.servers:
        attached: list[Source] = [Attached(url, PATIENCE) for url in config.servers]
        dead = [source.server.url for source in attached if not source.server.healthy()]
        if dead:
            raise EngineFailure(", ".join(dead), "no answer to the health check", "running servers, by --servers",
                                "Start them with `eyas-extract engine`, or leave them out.")
        return attached
    run_dir = writer.folder / RUN_DIR
    settings = engine_settings(config, device, str(writer.source["model_dtype"]))
    if config.ray:
        from eyas_extract.ray_engines import open_engines

        capture = capture_settings(config, writer.contract.capture, run_dir)
        return [*open_engines(config.ray, config.engines, settings, capture, run_dir, stack)]
    own = Own(settings, capture_settings(config, writer.contract.capture, run_dir), run_dir)
    stack.callback(lambda: own.engine.stop())
    return [own]


def engine_settings(config: RunConfig, device: str, dtype: str) -> EngineSettings:
    """How this run's engine is started."""
    return EngineSettings(config.target, device.partition(":")[0], dtype, config.tp, config.engine_python, 0,
                          config.engine_args)


def capture_settings(config: RunConfig, capture: CaptureSpec, run_dir: Path) -> CaptureSettings:
    """What it captures, below the store's folder only."""
    stored = next(spec.dtype for spec in capture.tensors if spec.name == "last_hidden_state")
    return CaptureSettings(capture.aux_layer_ids, str(config.out.resolve()), str((run_dir / "ranks").resolve()), stored)


def wanted(contract: Contract) -> Callable[[Captor], None]:
    """Raises where an engine captures something else than the store holds."""
    capture = contract.capture
    stored = next(spec.dtype for spec in capture.tensors if spec.name == "last_hidden_state")
    values = {"aux_layer_ids": capture.aux_layer_ids, "hidden_size": capture.hidden_size, "store_dtype": stored}

    def require(captor: Captor) -> None:
        there = f"{captor.target_class} in SGLang {captor.engine}"
        differences = tuple(Mismatch(name, str(getattr(captor, name)), str(value), there, "this run")
                            for name, value in values.items() if getattr(captor, name) != value)
        if captor.weights not in ("", contract.target.weights_fingerprint):
            differences += (Mismatch("weights_fingerprint", captor.weights, contract.target.weights_fingerprint, there,
                                     "this run"),)
        if differences:
            raise ContractMismatch(differences, "its states would be other ones than the store says",
                                   "Start the engine with this run's layers and dtype.")

    return require


def first_check(source: Source, config: RunConfig, writer: StoreWriter, sample: Sample) -> str:
    """One short prompt through everything, before any volume; returns what was found.

    Raises:
        InvalidInput: the states are not what leads to the engine's own log-probabilities.
        EngineFailure: none came, or not of the layers asked for.
    """
    length = min(len(sample.input_ids), CHECK_TOKENS)
    short = Sample("check", 0, sample.input_ids[:length], sample.loss_mask[:length])
    capture, seen = writer.contract.capture, []
    require = wanted(writer.contract)

    def note(captor: Captor) -> None:
        require(captor)
        seen.append(captor)

    file = ShardFile(writer.folder, capture, [short], writer.metadata(1))
    try:
        bad = fill(source.server, file, note, CHECK_PATIENCE)
        if not seen:
            raise InvalidInput(source.server.url, bad.get(0, "no states"), "the states of a short prompt, by "
                               "eyas-extract", "Nothing was stored.")
        engine = source.server.logprobs(short.input_ids, "check")
        last = _last_state(file)
    finally:
        file.remove()
        rows_file(file.path).unlink(missing_ok=True)
    captor = seen[0]
    where = f"{captor.target_class} in SGLang {captor.engine}"
    if bad or not captor.proof:
        raise InvalidInput(where, bad.get(0, "its layers' outputs were never seen"), "sound states of the layers asked "
                           "for, by eyas-extract", "Nothing was stored.")
    found = Golden(config.target).compare(last, list(short.input_ids), engine, where, captor.store_dtype)
    return f"{where}: {captor.proof}; {found}; gathered by {captor.gather}"


def _last_state(file: ShardFile) -> torch.Tensor:
    """The last layer's states [T, H], float32."""
    tensors = read_header(file.path).tensors
    last = read_tensor(tensors["last_hidden_state"]).float()
    return last * read_tensor(tensors["last_scale"]) if "last_scale" in tensors else last
