"""Reads a store back and judges it: checksums, shapes, counts, values, each fault with its shard and sample.

Also the small reader behind `show`. The training reader is eyas-draft's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from eyas_contract import CaptureSpec, Contract, CorruptFile, Manifest, ShardRecord
from eyas_contract.safetensors_header import Header, TensorInfo, read_header
from eyas_extract.digest import HASHERS, place_fault
from eyas_extract.dtypes import TORCH_DTYPES
from eyas_extract.values import layer_fault


@dataclass(frozen=True)
class Damage:
    """One fault: shard file, sample id where it can be told (else empty), what is wrong."""

    shard: str
    sample: str
    fault: str


@dataclass(frozen=True)
class Report:
    """What `check` found.

    Attributes:
        complete: whether the store's run had come to its end.
        shards, samples, tokens, trained_tokens: as the manifest counts them.
        damage: every fault.
    """

    complete: bool
    shards: int
    samples: int
    tokens: int
    trained_tokens: int
    damage: tuple[Damage, ...]


def read_tensor(info: TensorInfo) -> torch.Tensor:
    """One tensor of a safetensors file, read into memory."""
    with info.file.open("rb") as source:
        source.seek(info.start)
        raw = bytearray(source.read(info.end - info.start))
    dtype = TORCH_DTYPES[info.dtype]
    return (torch.frombuffer(raw, dtype=dtype) if raw else torch.empty(0, dtype=dtype)).view(info.shape)


def check(store: Path) -> Report:
    """Check every shard that the manifest names; goes on after each fault.

    Raises:
        InvalidInput: no readable contract or manifest.
    """
    contract, manifest = Contract.load(store), Manifest.load(store)
    damage = []
    if manifest.contract_digests != tuple(sorted(contract.digests().items())):
        damage.append(Damage("contract.json", "", "is not the contract whose digests the manifest holds"))
    first_seen: dict[str, str] = {}
    for shard in manifest.shards:
        damage += [Damage(shard.file, sample, fault) for sample, fault in shard_faults(store, contract, shard)]
        for sample in shard.samples:
            if sample.id in first_seen:
                damage.append(Damage(shard.file, sample.id, f"is also in {first_seen[sample.id]}"))
            first_seen[sample.id] = shard.file
    return Report(manifest.complete, len(manifest.shards), manifest.num_samples, manifest.num_tokens,
                  manifest.num_trained, tuple(damage))


def shard_faults(store: Path, contract: Contract, shard: ShardRecord) -> list[tuple[str, str]]:
    """(sample id or empty, fault) of one shard."""
    path = store / shard.file
    if Path(shard.file).name != shard.file or not path.is_file():
        return [("", "no such file in the store")]
    try:
        header = read_header(path)
    except CorruptFile as error:
        return [("", error.found)]
    faults = _header_faults(header, contract, shard, path.stat().st_size)
    if faults:
        return [("", fault) for fault in faults]
    tensors = {}
    for record in shard.tensors:
        tensor = tensors[record.name] = read_tensor(header.tensors[record.name])
        kind, wanted = record.digest
        block = memoryview(tensor.view(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]
        if HASHERS[kind](block).hexdigest() != wanted:
            faults.append(f"the bytes of {record.name} are not those that were written ({kind})")
    return [*(("", fault) for fault in faults), *_sample_faults(tensors, contract.capture, shard)]


def _header_faults(header: Header, contract: Contract, shard: ShardRecord, size: int) -> list[str]:
    faults = [f"{size} bytes, not {shard.bytes}"] if size != shard.bytes else []
    dims = {"T": sum(s.tokens for s in shard.samples), "N+1": len(shard.samples) + 1,
            "K": len(contract.capture.aux_layer_ids), "K*H": contract.capture.aux_width,
            "H": contract.capture.hidden_size}
    for spec in contract.capture.tensors:
        info = header.tensors.get(spec.name)
        shape = tuple(dims[d] if d in dims else int(d) for d in spec.dims)
        if info is None:
            faults.append(f"no tensor {spec.name}")
        elif (info.dtype, info.shape) != (spec.dtype, shape):
            faults.append(f"{spec.name} is {info.dtype} {list(info.shape)}, not {spec.dtype} {list(shape)}")
    for name, digest in contract.digests().items():
        if header.metadata.get(name) != digest:
            faults.append(f"its {name} digest is not the contract's")
    if fault := place_fault(header.metadata):
        faults.append(fault)
    known = {spec.name for spec in contract.capture.tensors}
    if {record.name for record in shard.tensors} != known:
        faults.append("the manifest records other tensors than the contract")
    return faults


def _sample_faults(tensors: dict[str, torch.Tensor], capture: CaptureSpec, shard: ShardRecord
                   ) -> list[tuple[str, str]]:
    faults = []
    bounds = [0]
    for sample in shard.samples:
        bounds.append(bounds[-1] + sample.tokens)
    if tensors["sample_offsets"].tolist() != bounds:
        faults.append(("", "sample_offsets are not the manifest's token counts added up"))
    for i, sample in enumerate(shard.samples):
        rows = slice(bounds[i], bounds[i + 1])
        trained = int(tensors["loss_mask"][rows].ne(0).sum())
        if trained != sample.trained:
            faults.append((sample.id, f"{trained} trained tokens, not {sample.trained}"))
        parts = dict(zip((f"layer {k}" for k in capture.aux_layer_ids),
                         torch.split(tensors["aux_hidden_states"][rows], capture.hidden_size, dim=1),
                         strict=True))
        for name, part in {**parts, "the last layer": tensors["last_hidden_state"][rows]}.items():
            if fault := layer_fault(part, name):
                faults.append((sample.id, fault))
    return faults


def read_sample(store: Path, index: int, sample_id: str) -> tuple[str, list[int], list[int]]:
    """Id, token ids and loss mask of one sample, by number or id.

    Raises:
        CorruptFile: its shard cannot be read.
        LookupError: no such sample.
    """
    places: list[tuple[ShardRecord, int]] = [(shard, i) for shard in Manifest.load(store).shards
                                             for i in range(len(shard.samples))]
    if sample_id:
        places = [(shard, i) for shard, i in places if shard.samples[i].id == sample_id]
        index = 0
    if not 0 <= index < len(places):
        raise LookupError
    shard, i = places[index]
    if not (store / shard.file).is_file():
        raise CorruptFile(str(store / shard.file), "no such file", "a shard that the manifest names",
                          "Run `eyas-extract repair` on the store.")
    header = read_header(store / shard.file)
    start = sum(s.tokens for s in shard.samples[:i])
    rows = slice(start, start + shard.samples[i].tokens)
    values: list[Any] = [read_tensor(header.tensors[name])[rows].tolist() for name in ("input_ids", "loss_mask")]
    return shard.samples[i].id, values[0], values[1]
