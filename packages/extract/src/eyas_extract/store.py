"""Writes a store: shards, then the manifest that makes them count. Killed at any moment, it stays valid.

Order of a commit: shard to a temporary name, synced, renamed, folder synced; `rejects.jsonl` replaced; `manifest.json`
replaced. A shard or reject that the manifest does not cover yet is made again by the next run.
"""

from __future__ import annotations

import dataclasses
import json
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash

from eyas_contract import (
    Contract,
    ContractMismatch,
    CorruptFile,
    InvalidInput,
    Manifest,
    Mismatch,
    SampleRecord,
    ShardRecord,
    TensorRecord,
    compare,
)
from eyas_contract.canonical import digest, dumps
from eyas_contract.contract import read_json, write_text_atomic
from eyas_contract.outputs import lock, require_own, with_temporary
from eyas_contract.safetensors_header import read_header
from eyas_contract.store import MANIFEST_NAME, REJECTS_NAME
from eyas_extract.conversations import Reject, read_rejects
from eyas_extract.digest import NEXT_LINE, place, place_fault
from eyas_extract.disk import make_folder, room_for, sync_folder
from eyas_extract.dtypes import NAMES
from eyas_extract.template import DAY

SOURCE_NAME = "source.json"
LONGEST = "longest"  # tokens of a sample, where the target has fewer positions than --max-length

Source = dict[str, str | int]


@dataclass(frozen=True)
class Ready:
    """A shard that is whole and synced under a temporary name in the store's folder.

    Attributes:
        file: its path.
        records: of its tensors.
        samples: in packed order.
        rejects: of the lines before `next_line` that are not yet recorded.
        next_line: first input line that is in no shard yet.
    """

    file: Path
    records: tuple[TensorRecord, ...]
    samples: Sequence[SampleRecord]
    rejects: Sequence[Reject]
    next_line: int


class StoreWriter:
    """A store being written, or continued where it stopped.

    Args:
        folder: of the store; made where it does not exist.
        contract: target and capture.
        source: input digest and every setting that the stored bytes depend on.
        repairing: shards may be missing or damaged.

    Raises:
        ContractMismatch: the folder holds shards of another contract or source (every difference named).
        CorruptFile: its last shard or its rejects are not what was written.
        InvalidInput: the folder holds something else, or cannot be written.
    """

    def __init__(self, folder: Path, contract: Contract, source: Source, *, repairing: bool = False) -> None:
        self.folder, self.contract, self.source, self.repairing = folder, contract, {**source}, repairing
        self.manifest = Manifest(tuple(sorted(contract.digests().items())), digest(source), False, ())
        self.next_line = 1
        self.rejects: list[Reject] = []
        self.rejects_saved = False  # whether the file holds just these
        make_folder(folder)
        with room_for(folder):
            self.lock = lock(folder)
            try:
                if (folder / MANIFEST_NAME).is_file():
                    self._continue()
                else:
                    self._begin()
            except BaseException:
                self.close()
                raise

    def _begin(self) -> None:
        require_own(self.folder, with_temporary("contract.json", SOURCE_NAME, MANIFEST_NAME),
                    "a new or empty folder, or a store")
        self._record()

    def _record(self) -> None:
        self.contract.save(self.folder)
        write_text_atomic(self.folder / SOURCE_NAME, json.dumps(self.source, indent=1, sort_keys=True) + "\n")
        self.manifest.save(self.folder)

    def _continue(self) -> None:
        found = Manifest.load(self.folder)
        there = str(self.folder)
        mismatches = list(compare(Contract.load(self.folder), self.contract, there, "this run"))
        old, given = read_source(self.folder), {**self.source}
        self._adopt(old)
        for key in sorted({*old, *self.source}):
            if old.get(key) != self.source.get(key):
                mismatches.append(Mismatch(f"source.{key}", str(old.get(key)), str(self.source.get(key)), there,
                                           "this run"))
        if not mismatches and found.source_sha256 != digest(self.source):
            mismatches.append(Mismatch("manifest.source_sha256", found.source_sha256, digest(self.source), there,
                                       "this run"))
        if mismatches and not found.shards and not self.repairing:  # nothing to mix with: no row would do, or a kill
            self.source = given
            (self.folder / REJECTS_NAME).unlink(missing_ok=True)
            self._record()
            return
        if mismatches:
            raise ContractMismatch(tuple(mismatches), "continuing would mix two extractions in one store",
                                   "Give another --out, or run with the store's own input and settings.")
        self.manifest = dataclasses.replace(found, schema_version=self.manifest.schema_version)
        for leftover in self.folder.glob(".*shard-*.safetensors.tmp*"):  # two dots: of a shard without its bad samples
            leftover.unlink()
        if found.shards and not self.repairing:
            self.next_line = _place_of(self.folder / found.shards[-1].file)
        self.rejects = [r for r in read_rejects(self.folder / REJECTS_NAME)
                        if found.complete or self.repairing or r.line < self.next_line]

    def _adopt(self, old: Source) -> None:
        """What a store was begun with and no flag says; a store that is older than these has neither."""
        for key in (DAY, LONGEST):
            self.source.pop(key, None)
            if key in old:
                self.source[key] = old[key]

    def commit(self, tensors: dict[str, torch.Tensor], samples: Sequence[SampleRecord], rejects: Sequence[Reject],
               next_line: int) -> None:
        """Add one shard and the rejects among its lines.

        Args:
            tensors: the contract's tensors, on the CPU.
            samples: in packed order.
            rejects: of the lines before `next_line` that are not yet recorded.
            next_line: first input line that is in no shard yet.

        Raises:
            EyasError: the disk is full; everything committed before is whole.
        """
        path = self.folder / shard_name(len(self.manifest.shards))
        with room_for(path):
            records, size = write_safetensors(path, tensors, self.metadata(next_line))
        self._register([ShardRecord(path.name, size, records, tuple(samples))], rejects, next_line)

    def adopt(self, ready: Sequence[Ready]) -> None:
        """Add shards, all by one replacement of the manifest: a dozen small ones a second would spend it on syncs.

        Raises:
            EyasError: as `commit`.
        """
        shards = []
        with room_for(self.folder):
            for number, each in enumerate(ready, len(self.manifest.shards)):
                path = self.folder / shard_name(number)
                shards.append(ShardRecord(path.name, each.file.stat().st_size, each.records, tuple(each.samples)))
                each.file.replace(path)
            sync_folder(self.folder)
        self._register(shards, [reject for each in ready for reject in each.rejects], ready[-1].next_line)

    def replace(self, number: int, shard: ShardRecord, rejects: Sequence[Reject]) -> None:
        """Record a shard that was made anew in the place of an old one, and those of its samples that are bad now."""
        shards = [*self.manifest.shards]
        shards[number] = shard
        with room_for(self.folder / MANIFEST_NAME):
            if rejects:
                self._save_rejects(sorted(dict.fromkeys([*self.rejects, *rejects]), key=lambda r: r.line))
            self._save_manifest(dataclasses.replace(self.manifest, shards=tuple(shards)))

    def metadata(self, next_line: int) -> dict[str, str]:
        """What stands in a shard's header."""
        return {**self.contract.digests(), **place(next_line)}

    def _register(self, shards: Sequence[ShardRecord], rejects: Sequence[Reject], next_line: int) -> None:
        with room_for(self.folder):
            if rejects or not self.rejects_saved:
                self._save_rejects([*self.rejects, *rejects])
            self._save_manifest(dataclasses.replace(self.manifest, shards=(*self.manifest.shards, *shards)))
        self.next_line = next_line

    def finish(self, rejects: Sequence[Reject]) -> None:
        """Record the rejects after the last shard and that the store is complete."""
        with room_for(self.folder / MANIFEST_NAME):
            self._save_rejects([*self.rejects, *rejects])
            self._save_manifest(dataclasses.replace(self.manifest, complete=True))

    def close(self) -> None:
        """Let other writers in."""
        os.close(self.lock)

    def _save_rejects(self, rejects: list[Reject]) -> None:
        write_text_atomic(self.folder / REJECTS_NAME, "".join(dumps(r) + "\n" for r in rejects))
        self.rejects, self.rejects_saved = rejects, True

    def _save_manifest(self, manifest: Manifest) -> None:
        manifest.save(self.folder)
        sync_folder(self.folder)
        self.manifest = manifest


def read_source(folder: Path) -> dict[str, Any]:
    """What a store was made from. Raises InvalidInput where its `source.json` is missing or something else."""
    wanted = "the store's source settings, by eyas-extract"
    found = read_json(folder / SOURCE_NAME, wanted)
    if not isinstance(found, dict):
        raise InvalidInput(str(folder / SOURCE_NAME), f"a JSON {type(found).__name__}", wanted, "Restore the file.")
    return found


def _place_of(path: Path) -> int:
    """The first input line after a store's last shard."""
    metadata = read_header(path).metadata if path.is_file() else {}
    fault = place_fault(metadata)
    if fault or not metadata.get(NEXT_LINE, "").isdigit():
        raise CorruptFile(str(path), fault or "the last committed shard is missing or not ours",
                          "a shard with its place in the input", "Run `eyas-extract repair` on the store.")
    return int(metadata[NEXT_LINE])


def shard_name(number: int) -> str:
    """File name of a shard."""
    return f"shard-{number:06d}.safetensors"


def header_bytes(entries: Sequence[tuple[str, str, tuple[int, ...], int]], metadata: dict[str, str]) -> bytes:
    """The length and header of a safetensors file of tensors (name, dtype, shape, bytes), in this order."""
    header: dict[str, object] = {"__metadata__": metadata}
    offset = 0
    for name, dtype, shape, size in entries:
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header, separators=(",", ":")).encode("utf-8")
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def write_safetensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]
                      ) -> tuple[tuple[TensorRecord, ...], int]:
    """Write a safetensors file atomically and durably; returns its tensors' records and its size.

    Own writer because the library's neither syncs nor hashes while it writes. Source: the format's specification.
    """
    records, blocks, entries = [], [], []
    for name, tensor in tensors.items():
        block = memoryview(tensor.contiguous().view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        dtype, shape = NAMES[tensor.dtype], tuple(tensor.shape)
        records.append(TensorRecord(name, dtype, shape, xxh3_128=xxhash.xxh3_128(block).hexdigest()))
        blocks.append(block)
        entries.append((name, dtype, shape, block.nbytes))
    header = header_bytes(entries, metadata)
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("wb", buffering=0) as sink:
            for block in (memoryview(header), *blocks):
                while block:
                    block = block[sink.write(block):]
            os.fsync(sink.fileno())
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)
    return tuple(records), len(header) + sum(block.nbytes for block in blocks)
