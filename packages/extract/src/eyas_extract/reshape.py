"""Stores of one kind into one, and one into two. Shards are linked where the disk allows it, never decoded."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch

from eyas_contract import (
    Contract,
    ContractMismatch,
    CorruptFile,
    InvalidInput,
    Manifest,
    SampleRecord,
    ShardRecord,
    compare,
)
from eyas_contract.canonical import digest, dumps
from eyas_contract.contract import write_text_atomic
from eyas_contract.outputs import require_own
from eyas_contract.safetensors_header import read_header
from eyas_contract.store import REJECTS_NAME
from eyas_extract.check import read_tensor, shard_faults
from eyas_extract.conversations import read_rejects
from eyas_extract.disk import make_folder, room_for, sync_folder
from eyas_extract.store import SOURCE_NAME, write_safetensors

REMEDY = "Run `eyas-extract repair` on the store."


def merge(stores: Sequence[Path], out: Path) -> Manifest:
    """Put the shards of complete stores, in this order, into a new one.

    Raises:
        ContractMismatch: stores of different targets or captures (every difference named).
        InvalidInput: fewer than two, one not complete, a sample id that stands in two, or `out` not empty.
        CorruptFile: a shard that is missing, or cut, or a list of rejects that is none.
    """
    if len(stores) < 2:
        raise InvalidInput("merge", f"{len(stores)} stores", "two or more", "Name them.")
    contracts = [Contract.load(store) for store in stores]
    mismatches = [m for store, contract in zip(stores[1:], contracts[1:], strict=True)
                  for m in compare(contract, contracts[0], str(store), str(stores[0]))]
    if mismatches:
        raise ContractMismatch(tuple(mismatches), "one store holds states of one kind", "Merge stores of one target.")
    manifests = [Manifest.load(store) for store in stores]
    seen: dict[str, Path] = {}
    faults = [f"{store} is not complete" for store, m in zip(stores, manifests, strict=True) if not m.complete]
    for store, manifest in zip(stores, manifests, strict=True):
        for sample in (s for shard in manifest.shards for s in shard.samples):
            if sample.id in seen:
                faults.append(f"sample {sample.id!r} is in {seen[sample.id]} and in {store}")
            seen[sample.id] = store
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise InvalidInput("merge", "; ".join(faults[:5]) + more, "complete stores without a sample in common",
                           "Finish them, or leave one out.")
    for store, manifest in zip(stores, manifests, strict=True):
        _require_files(store, manifest)
    rejects = "".join(_rejects(store) for store in stores)
    _begin(out)
    records: list[ShardRecord] = []
    for store, manifest in zip(stores, manifests, strict=True):
        for shard in manifest.shards:
            records.append(_linked(store, shard, out, len(records)))
    return _finish(out, contracts[0], {"merged": [m.source_sha256 for m in manifests]}, records, rejects)


def split(store: Path, outs: tuple[Path, Path], share: float) -> tuple[Manifest, Manifest]:
    """Cut a complete store in two: the first `share` of its samples, and the rest.

    Raises:
        InvalidInput: not complete, a share that leaves one side empty, or an `out` that is not empty, or both.
        CorruptFile: a shard that is missing, or cut, or damaged where it is to be divided, or a list of rejects that is
            none.
    """
    if outs[0].resolve() == outs[1].resolve():
        raise InvalidInput("split", f"{outs[0]} for both sides", "two new folders", "Give --first and --second.")
    contract, manifest = Contract.load(store), Manifest.load(store)
    first = round(share * manifest.num_samples) if 0 < share < 1 else 0
    if not manifest.complete or not 0 < first < manifest.num_samples:
        state = "complete" if manifest.complete else "not complete"
        raise InvalidInput(str(store), f"{manifest.num_samples} samples, {state}, a share of {share}",
                           "a complete store and samples on both sides", "Correct --share.")
    _require_files(store, manifest)
    ends = [*accumulate(len(shard.samples) for shard in manifest.shards)]
    for shard, end in zip(manifest.shards, ends, strict=True):
        if end - len(shard.samples) < first < end:  # new digests of its parts must not vouch for damage
            _require_sound(store, contract, shard)
    sides: tuple[list[ShardRecord], list[ShardRecord]] = ([], [])
    rejects = (_rejects(store), "")
    for out in outs:
        _begin(out)
    for shard in manifest.shards:
        size = len(shard.samples)
        if 0 < first < size:
            for side, out, samples in ((0, outs[0], range(first)), (1, outs[1], range(first, size))):
                sides[side].append(_part(store, shard, out, len(sides[side]), samples))
        else:
            side = 0 if first > 0 else 1
            sides[side].append(_linked(store, shard, outs[side], len(sides[side])))
        first -= min(size, max(first, 0))
    result = [_finish(out, contract, {"split": manifest.source_sha256, "share": str(share), "side": i}, sides[i],
                      rejects[i]) for i, out in enumerate(outs)]
    return result[0], result[1]


def _begin(out: Path) -> None:
    make_folder(out)
    require_own(out, (), "a new or empty folder")


def _require_files(store: Path, manifest: Manifest) -> None:
    faults = []
    for shard in manifest.shards:
        path = store / shard.file
        size = path.stat().st_size if path.is_file() else None
        if size != shard.bytes:
            faults.append(f"{shard.file} " + ("is missing" if size is None else f"has {size} bytes, not {shard.bytes}"))
    if faults:
        more = f" and {len(faults) - 5} more" if len(faults) > 5 else ""
        raise CorruptFile(str(store), "; ".join(faults[:5]) + more, "the shards that its manifest names", REMEDY)


def _require_sound(store: Path, contract: Contract, shard: ShardRecord) -> None:
    if faults := [f"{'sample ' + sample + ': ' if sample else ''}{fault}"
                  for sample, fault in shard_faults(store, contract, shard)]:
        raise CorruptFile(str(store / shard.file), "; ".join(faults[:5]), "the states that were written, to be divided",
                          REMEDY)


def _linked(store: Path, shard: ShardRecord, out: Path, number: int) -> ShardRecord:
    name = f"shard-{number:06d}.safetensors"
    with room_for(out / name):
        source = (store / shard.file).resolve()  # a link to a relative link would lead nowhere
        try:
            os.link(source, out / name)
        except FileExistsError as error:  # another process's link: a copy into it would write over that one's store
            raise InvalidInput(str(out / name), "a file by another process", "a folder that nobody else writes to",
                               "Give another --out.") from error
        except OSError:  # another disk, or one without links
            shutil.copyfile(source, out / name)
    return ShardRecord(name, shard.bytes, shard.tensors, shard.samples)


def _part(store: Path, shard: ShardRecord, out: Path, number: int, samples: range) -> ShardRecord:
    """Some neighbouring samples of a shard as a shard of their own."""
    header = read_header(store / shard.file)
    offsets = read_tensor(header.tensors["sample_offsets"])
    start, end = int(offsets[samples.start]), int(offsets[samples.stop])
    tensors = {}
    for record in shard.tensors:
        whole = read_tensor(header.tensors[record.name])
        tensors[record.name] = whole[start:end]
    tensors["sample_offsets"] = (offsets[samples.start:samples.stop + 1] - start).to(torch.int64)
    name = f"shard-{number:06d}.safetensors"
    with room_for(out / name):
        records, size = write_safetensors(out / name, tensors, header.metadata)
    kept: tuple[SampleRecord, ...] = shard.samples[samples.start:samples.stop]
    return ShardRecord(name, size, records, kept)


def _rejects(store: Path) -> str:
    return "".join(dumps(reject) + "\n" for reject in read_rejects(store / REJECTS_NAME))


def _finish(out: Path, contract: Contract, source: dict[str, object], records: Sequence[ShardRecord],
            rejects: str) -> Manifest:
    contract.save(out)
    write_text_atomic(out / SOURCE_NAME, json.dumps(source, indent=1, sort_keys=True) + "\n")
    write_text_atomic(out / REJECTS_NAME, rejects)
    manifest = Manifest(tuple(sorted(contract.digests().items())), digest(source), True, tuple(records))
    manifest.save(out)
    sync_folder(out)
    return manifest
