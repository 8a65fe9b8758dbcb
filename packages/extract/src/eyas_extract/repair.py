"""Bad shards of a store made anew and nothing else: what `check` names is set aside, its samples extracted again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from eyas_contract import InvalidInput, ShardRecord
from eyas_extract.capture import Capture
from eyas_extract.check import Report, check
from eyas_extract.config import RepairConfig
from eyas_extract.conversations import Reject
from eyas_extract.disk import room_for, sync_folder
from eyas_extract.dtypes import STORE_DTYPES
from eyas_extract.pending import Pending, settled, shards
from eyas_extract.run import describe, fill
from eyas_extract.store import StoreWriter, write_safetensors
from eyas_extract.target import load_target, pick_device, stop_ids
from eyas_extract.template import ChatTemplate

QUARANTINE = "quarantine"


@dataclass(frozen=True)
class Repaired:
    """What was done: faults found, shards made anew, their samples and tokens, and the check afterwards.

    Attributes:
        rejects: samples of these shards whose states can no longer be used.
    """

    faults: int
    shards: tuple[str, ...]
    samples: int
    tokens: int
    after: Report
    rejects: tuple[Reject, ...] = ()


class Maker(Protocol):
    """Makes one shard's file under the store's name for it; returns its record, and the samples that it lacks."""

    def __call__(self, pending: Pending, name: str) -> tuple[ShardRecord, list[Reject]]: ...


def repair(config: RepairConfig) -> Repaired:
    """Check a store; move each damaged shard into `quarantine/`, and extract its samples again.

    Raises:
        ContractMismatch: input, settings or target are not those of the store.
        InvalidInput: the input no longer has the samples of a damaged shard.
        EyasError: as extraction does.
    """
    device = pick_device(config.device)
    contract, source = describe(config, device)
    before = check(config.out)
    bad = {damage.shard for damage in before.damage}
    if not bad:
        return Repaired(0, (), 0, 0, before)
    writer = StoreWriter(config.out, contract, source, repairing=True)
    try:
        places = {tuple(s.id for s in shard.samples): i for i, shard in enumerate(writer.manifest.shards)
                  if shard.file in bad}
        rejects: list[Reject] = []
        template = ChatTemplate(config.target, sorted(stop_ids(config.target)))
        config = settled(config, template, writer.source)
        done = []
        with making(config, device, writer) as make:
            for pending in shards(config, template, 1):
                held = {s.id for s in pending.samples}
                ids = next((ids for ids in places if held.issuperset(ids)), None)
                if ids is None:
                    continue
                number = places.pop(ids)
                kept = dataclasses.replace(pending, samples=[s for s in pending.samples if s.id in set(ids)])
                _set_aside(config.out, writer.manifest.shards[number].file)
                shard, bad_now = make(kept, writer.manifest.shards[number].file)
                writer.replace(number, shard, bad_now)
                done.append(shard)
                rejects += bad_now
    finally:
        writer.close()
    if places:
        raise InvalidInput(str(config.data), f"no rows for the samples of {len(places)} damaged shards, such as "
                           f"{next(iter(places))[0]!r}", "the input that the store was made from", "Give that file.")
    samples = [sample for shard in done for sample in shard.samples]
    return Repaired(len(before.damage), tuple(s.file for s in done), len(samples), sum(s.tokens for s in samples),
                    check(config.out), tuple(rejects))


def _set_aside(store: Path, name: str) -> None:
    path = store / name
    if path.is_file():
        with room_for(store):
            (store / QUARANTINE).mkdir(exist_ok=True)
            path.replace(store / QUARANTINE / name)
            sync_folder(store)


@contextmanager
def making(config: RepairConfig, device: str, writer: StoreWriter) -> Iterator[Maker]:
    """What makes shards: Hugging Face in this process, or SGLang."""
    with ExitStack() as stack:
        yield _by_engine(config, device, writer, stack) if config.engine == "sglang" else \
            _by_hugging_face(config, device, writer)


def _by_hugging_face(config: RepairConfig, device: str, writer: StoreWriter) -> Maker:
    capture_spec = writer.contract.capture
    target = load_target(config.target, device, config.dtype)
    dtype = STORE_DTYPES[capture_spec.tensors[2].dtype]
    checked = False

    def make(pending: Pending, name: str) -> tuple[ShardRecord, list[Reject]]:
        nonlocal checked
        with Capture(target, capture_spec.aux_layer_ids) as capture:
            if not checked:
                capture.check(pending.samples[0].input_ids)
                checked = True
            tensors, samples, rejects = fill(capture, pending.samples, config.batch_tokens, dtype)
        with room_for(writer.folder / name):
            records, size = write_safetensors(writer.folder / name, tensors, writer.metadata(pending.next_line))
        return ShardRecord(name, size, records, tuple(samples)), rejects

    return make


def _by_engine(config: RepairConfig, device: str, writer: StoreWriter, stack: ExitStack) -> Maker:
    from eyas_extract import engine_run
    from eyas_extract.workers import Workers

    sources = engine_run.open_sources(config, device, writer, stack)
    workers: Workers | None = None

    def make(pending: Pending, name: str) -> tuple[ShardRecord, list[Reject]]:
        nonlocal workers
        if workers is None:
            for source in sources:
                engine_run.first_check(source, config, writer, pending.samples[0])
            workers = stack.enter_context(Workers(sources, 1, engine_run.wanted(writer.contract)))
        filled = workers.submit(engine_run.layout(writer, pending)).result()
        size = filled.file.path.stat().st_size
        filled.file.path.replace(writer.folder / name)
        sync_folder(writer.folder)
        return ShardRecord(name, size, filled.records, tuple(filled.samples)), filled.rejects(pending.samples)

    return make
