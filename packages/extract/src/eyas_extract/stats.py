"""What a store holds, from its manifest and headers alone."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from eyas_contract import Contract, Manifest
from eyas_contract.store import REJECTS_NAME
from eyas_extract.conversations import read_rejects


@dataclass(frozen=True)
class Stats:
    """The numbers.

    Attributes:
        target: architecture and number of layers.
        aux_layer_ids, store_dtype: of the states.
        complete: whether its run came to its end.
        shards, samples, tokens, trained_tokens, bytes: in all.
        bytes_per_token: of the shards.
        lengths: tokens of a sample: least, median, 90 % and most.
        rejected: reason (numbers as N) and how often.
    """

    target: str
    aux_layer_ids: tuple[int, ...]
    store_dtype: str
    complete: bool
    shards: int
    samples: int
    tokens: int
    trained_tokens: int
    bytes: int
    bytes_per_token: float
    lengths: tuple[int, ...]
    rejected: dict[str, int]


def stats(store: Path) -> Stats:
    """Read a store's numbers. Raises InvalidInput where it is no store."""
    contract, manifest = Contract.load(store), Manifest.load(store)
    lengths = sorted(sample.tokens for shard in manifest.shards for sample in shard.samples) or [0]
    size = sum(shard.bytes for shard in manifest.shards)
    reasons = Counter(re.sub(r"\d+", "N", reject.reason)[:160] for reject in read_rejects(store / REJECTS_NAME))
    return Stats(f"{contract.target.architecture}, {contract.target.num_layers} layers", contract.capture.aux_layer_ids,
                 next(t.dtype for t in contract.capture.tensors if t.name == "aux_hidden_states"), manifest.complete,
                 len(manifest.shards), manifest.num_samples, manifest.num_tokens, manifest.num_trained, size,
                 round(size / max(manifest.num_tokens, 1), 1),
                 (lengths[0], lengths[len(lengths) // 2], lengths[len(lengths) * 9 // 10], lengths[-1]),
                 dict(reasons.most_common()))
