"""Reads a store of hidden states by memory map, trusting nothing in it until checked.

On opening: contract, manifest and every shard's header. On first use of a shard: the digests of its tensors. On each
sample: finite states; the mask must agree with the manifest.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eyas_contract import CaptureSpec, Contract, CorruptFile, InvalidInput, Manifest, ShardRecord
from eyas_contract.safetensors_header import Header, read_header
from eyas_draft.mapped import digest_of, map_tensor
from eyas_draft.states import States


@dataclass(frozen=True)
class Sample:
    """One sample, T tokens.

    Attributes:
        id: the sample's id.
        input_ids_t: int32 [T].
        loss_mask_t: bool [T], True where the assistant produced the token.
        aux: outputs of the aux layers, as stored.
        last: output of the last layer, as stored.
    """

    id: str
    input_ids_t: Tensor
    loss_mask_t: Tensor
    aux: States
    last: States

    @property
    def aux_tke(self) -> Tensor:
        """[T, K*E]; bf16 where the store holds e4m3."""
        return self.aux.plain

    @property
    def last_te(self) -> Tensor:
        """[T, E], likewise."""
        return self.last.plain

    @property
    def finite(self) -> bool:
        """Whether no state is NaN or infinite."""
        return self.aux.finite and self.last.finite


class Store:
    """A checked store; samples are numbered over all shards in the manifest's order.

    Args:
        folder: the store.
        verify: compare each shard's digests with the manifest on first use.

    Raises:
        InvalidInput: no store, no samples, states missing, or a loss mask that is all zero or all one.
        CorruptFile: a shard cut, changed, or not what contract and manifest describe (the shard is named).
    """

    def __init__(self, folder: Path, *, verify: bool = True) -> None:
        self.folder, self.verify = folder, verify
        self.contract = Contract.load(folder)
        self.manifest = Manifest.load(folder)
        self._check_contract()
        self._headers = [self._checked_header(shard) for shard in self.manifest.shards]
        self._tensors: dict[int, dict[str, Tensor]] = {}
        self._places = [(i, j) for i, shard in enumerate(self.manifest.shards) for j in range(len(shard.samples))]
        self._check_masks()

    def __len__(self) -> int:
        return len(self._places)

    def length(self, index: int) -> int:
        """Tokens of a sample, from the manifest."""
        shard, place = self._places[index]
        return self.manifest.shards[shard].samples[place].tokens

    def trained(self, index: int) -> int:
        """Tokens of a sample that are trained on, from the manifest."""
        shard, place = self._places[index]
        return self.manifest.shards[shard].samples[place].trained

    def id(self, index: int) -> str:
        """Id of a sample."""
        shard, place = self._places[index]
        return self.manifest.shards[shard].samples[place].id

    def sample(self, index: int) -> Sample:
        """Map one sample. Raises CorruptFile where its shard does not verify."""
        shard, place = self._places[index]
        record = self.manifest.shards[shard].samples[place]
        tensors = self._shard(shard)
        start, end = tensors["sample_offsets"][place:place + 2].tolist()
        mask = tensors["loss_mask"][start:end].bool()
        if int(mask.sum()) != record.trained:
            raise _corrupt(self.folder / self.manifest.shards[shard].file,
                           f"sample {record.id!r} has {int(mask.sum())} trained tokens, the manifest {record.trained}")
        aux, last = (States(tensors[values][start:end], tensors[scales][start:end] if scales in tensors else None)
                     for values, scales in (("aux_hidden_states", "aux_scales"), ("last_hidden_state", "last_scale")))
        return Sample(record.id, tensors["input_ids"][start:end], mask, aux, last)

    def samples_digest(self) -> str:
        """SHA-256 (hex) of all samples' ids and lengths in order: what the order of training, the samples held out and
        the data cursor depend on."""
        digest = hashlib.sha256()
        for shard in self.manifest.shards:
            for sample in shard.samples:
                digest.update(json.dumps([sample.id, sample.tokens, sample.trained]).encode() + b"\n")
        return digest.hexdigest()

    def token_counts(self) -> Tensor:
        """Occurrences of every target token among the trained tokens, int64 [V_target]."""
        size = self.contract.target.vocab_size
        counts = torch.zeros(size, dtype=torch.int64)
        for shard in range(len(self.manifest.shards)):
            tensors = self._shard(shard)
            ids = tensors["input_ids"][tensors["loss_mask"].bool()].long()
            if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < size:
                raise _corrupt(self.folder / self.manifest.shards[shard].file,
                               f"token ids {int(ids.min())} to {int(ids.max())} in a vocabulary of {size}")
            counts += torch.bincount(ids, minlength=size)
        return counts

    def _check_contract(self) -> None:
        expected = tuple(sorted(self.contract.digests().items()))
        if self.manifest.contract_digests != expected:
            raise CorruptFile(str(self.folder / "manifest.json"), f"contract digests {self.manifest.contract_digests}",
                              f"{expected}, those of contract.json beside it",
                              "contract.json or manifest.json belongs to another store; restore it or extract again.")
        if self.contract.capture.last_state == "none":
            raise InvalidInput(str(self.folder), "a store without the last layer's state",
                               "last_state pre_norm or post_norm, by training: it gives the target's distribution",
                               "Extract again with the last state.")
        if not self.manifest.num_samples:
            raise InvalidInput(str(self.folder), "no samples", "a store with samples, by training",
                               "Extract first, or see rejects.jsonl for why samples were left out.")

    def _check_masks(self) -> None:
        trained, tokens = self.manifest.num_trained, self.manifest.num_tokens
        if trained in (0, tokens):
            raise InvalidInput(str(self.folder), f"a loss mask that is all {'one' if trained else 'zero'}",
                               "the assistant's tokens marked and no others, by training",
                               "Check the chat template's handling of the assistant's turns and extract again.")

    def _checked_header(self, shard: ShardRecord) -> Header:
        path = self.folder / shard.file
        if Path(shard.file).name != shard.file or not path.is_file():
            raise _corrupt(path, "no such file in the store, though the manifest names it")
        size = path.stat().st_size
        if size != shard.bytes:
            raise _corrupt(path, f"{size} bytes, the manifest says {shard.bytes}")
        header = read_header(path)
        found = {t.name: (t.dtype, t.shape) for t in header.tensors.values()}
        faults = _shape_faults(found, self.contract.capture, shard)
        stamped = self.contract.digests()
        faults += [f"metadata says {name} {header.metadata.get(name)!r}, contract.json {digest!r}"
                   for name, digest in stamped.items() if header.metadata.get(name) != digest]
        if faults:
            raise _corrupt(path, "; ".join(faults))
        return header

    def _shard(self, index: int) -> dict[str, Tensor]:
        if index not in self._tensors:
            shard, header = self.manifest.shards[index], self._headers[index]
            path = self.folder / shard.file
            if self.verify:
                bad = [t.name for t in shard.tensors if digest_of(header.tensors[t.name], t.digest[0]) != t.digest[1]]
                if bad:
                    raise _corrupt(path, f"the bytes of {', '.join(bad)} are not those whose digest was recorded")
            tensors = {name: map_tensor(info) for name, info in header.tensors.items()}
            ends = torch.tensor([s.tokens for s in shard.samples]).cumsum(0)
            if tensors["sample_offsets"].tolist() != [0, *ends.tolist()]:
                raise _corrupt(path, "sample_offsets that are not the manifest's sample lengths")
            self._tensors[index] = tensors
        return self._tensors[index]


def _shape_faults(found: dict[str, tuple[str, tuple[int, ...]]], capture: CaptureSpec, shard: ShardRecord) -> list[str]:
    """Where a shard's header differs from the contract's tensor table and the manifest's record."""
    sizes = {"T": sum(s.tokens for s in shard.samples), "H": capture.hidden_size, "K*H": capture.aux_width,
             "K": len(capture.aux_layer_ids), "N+1": len(shard.samples) + 1}
    wanted = {t.name: (t.dtype, tuple(sizes[d] if d in sizes else int(d) for d in t.dims)) for t in capture.tensors}
    recorded = {t.name: (t.dtype, t.shape) for t in shard.tensors}
    faults = []
    for name in sorted(set(found) | set(wanted) | set(recorded)):
        values = (found.get(name), wanted.get(name), recorded.get(name))
        if len(set(values)) > 1:
            faults.append(f"{name} is {values[0]} in the shard, {values[1]} by the contract, {values[2]} by the "
                          "manifest")
    return faults


def _corrupt(path: Path, found: str) -> CorruptFile:
    return CorruptFile(str(path), found, "the shard that extraction wrote",
                       "Copy the shard again, or delete it and its line in the manifest by extracting anew.")
