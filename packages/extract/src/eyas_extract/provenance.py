"""Are the tokens in a store those of the input's rows, and is every row somewhere?"""

from __future__ import annotations

import hashlib
from pathlib import Path

from eyas_contract import Contract, CorruptFile, InvalidInput, Manifest
from eyas_contract.safetensors_header import read_header
from eyas_contract.store import REJECTS_NAME
from eyas_extract.check import Damage, read_tensor
from eyas_extract.config import RunConfig
from eyas_extract.conversations import read_rejects
from eyas_extract.pending import settled, shards
from eyas_extract.store import read_source
from eyas_extract.target import stop_ids
from eyas_extract.template import ChatTemplate


def token_faults(store: Path, target: Path, data: Path) -> list[Damage]:
    """Encode the input again and compare each sample's tokens and loss mask with the store's.

    Raises:
        InvalidInput: no store, or no such target or input; or a store that was not made by `run`, whose rows nobody
            can name.
    """
    contract, manifest = Contract.load(store), Manifest.load(store)
    source = read_source(store)
    if "overlong" not in source:
        raise InvalidInput(str(store), "a merged or split store", "one by `eyas-extract run`, with --data",
                           "Check it without --data.")
    config = RunConfig(target, data, store, max_length=contract.capture.max_length, overlong=source["overlong"],
                       shard_tokens=1 << 20)
    template = ChatTemplate(target, sorted(stop_ids(target)))
    wanted: dict[str, bytes] = {}
    lines: dict[str, int] = {}
    for pending in shards(settled(config, template, source), template, 1):
        wanted |= {s.id: _digest(s.input_ids.tobytes(), s.loss_mask) for s in pending.samples}
        lines |= {s.id: s.line for s in pending.samples}
    # By line too: a second row of the same id is rejected under that id, and vouches for nothing.
    rejected = {(reject.line, reject.id) for reject in read_rejects(store / REJECTS_NAME)}
    faults = []
    for shard in manifest.shards:
        try:
            header = read_header(store / shard.file)
            ids, mask = (read_tensor(header.tensors[name]).numpy() for name in ("input_ids", "loss_mask"))
        except (CorruptFile, OSError, KeyError):
            continue  # named by the check of the shards themselves
        start = 0
        for sample in shard.samples:
            rows = slice(start, start + sample.tokens)
            start += sample.tokens
            digest = wanted.pop(sample.id, None)
            if digest is None:
                faults.append(Damage(shard.file, sample.id, "is no sample of the input"))
            elif digest != _digest(ids[rows].tobytes(), mask[rows].tobytes()):
                faults.append(Damage(shard.file, sample.id, "its tokens are not those of the input's row"))
    missing = [name for name in wanted if (lines[name], name) not in rejected]
    if manifest.complete:
        faults += [Damage("manifest.json", name, "is in no shard and not among the rejects") for name in missing]
    return faults


def _digest(ids: bytes, mask: bytes) -> bytes:
    return hashlib.sha256(ids + mask).digest()
