"""The store's manifest: the record by which extraction commits shards and training finds them.

A store is a folder with `contract.json`, `manifest.json` and `shard-000000.safetensors`, ... A shard counts only once
the manifest names it; the manifest is replaced atomically after the shard is in place.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from dataclasses import dataclass
from pathlib import Path

from eyas_contract import canonical
from eyas_contract.contract import read_json, write_text_atomic

MANIFEST_NAME = "manifest.json"
REJECTS_NAME = "rejects.jsonl"


@dataclass(frozen=True)
class TensorRecord:
    """One tensor of a shard: safetensors dtype, shape, and one digest (hex) of its bytes.

    Attributes:
        xxh3_128: what is written: it finds any damage, at many times SHA-256's speed.
        sha256: in its place in stores of `schema_version` 1.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str = ""
    xxh3_128: str = ""

    def __post_init__(self) -> None:
        if bool(self.sha256) == bool(self.xxh3_128):
            raise ValueError("one of sha256 and xxh3_128 is wanted")

    @property
    def digest(self) -> tuple[str, str]:
        """Which digest, by its field's name, and its value."""
        return ("sha256", self.sha256) if self.sha256 else ("xxh3_128", self.xxh3_128)


@dataclass(frozen=True)
class SampleRecord:
    """One sample: its id, number of tokens, number of trained tokens (loss mask 1)."""

    id: str
    tokens: int
    trained: int


@dataclass(frozen=True)
class ShardRecord:
    """One committed shard. `samples` are in the order in which they are packed."""

    file: str
    bytes: int
    tensors: tuple[TensorRecord, ...]
    samples: tuple[SampleRecord, ...]

    @functools.cached_property
    def text(self) -> str:
        """As JSON; kept, since a growing store writes all shards' again with every new one."""
        plain = canonical.to_plain(self)
        for tensor, record in zip(plain["tensors"], self.tensors, strict=True):
            del tensor["sha256" if record.xxh3_128 else "xxh3_128"]
        return json.dumps(plain, sort_keys=True)


@dataclass(frozen=True)
class Manifest:
    """All committed shards of a store.

    Attributes:
        contract_digests: section name and digest of the store's contract, sorted by name.
        source_sha256: digest of what was extracted (input rows and settings), so that a resume with other
            input is refused.
        complete: whether every input sample is in a shard or in `rejects.jsonl`.
        shards: in order of writing.
        schema_version: 1 has SHA-256 alone. Read too; what is added to such a store makes it 2.

    Raises:
        ValueError: a version that this eyas-contract does not know.
    """

    contract_digests: tuple[tuple[str, str], ...]
    source_sha256: str
    complete: bool
    shards: tuple[ShardRecord, ...]
    schema_version: int = 2

    def __post_init__(self) -> None:
        if self.schema_version not in (1, 2):
            raise ValueError(f"schema_version {self.schema_version}, but this eyas-contract reads 1 and 2")

    @property
    def num_samples(self) -> int:
        """Samples in all shards."""
        return sum(len(shard.samples) for shard in self.shards)

    @property
    def num_tokens(self) -> int:
        """Tokens in all shards, prompts included."""
        return sum(sample.tokens for shard in self.shards for sample in shard.samples)

    @property
    def num_trained(self) -> int:
        """Tokens with loss mask 1."""
        return sum(sample.trained for shard in self.shards for sample in shard.samples)

    def save(self, store: str | Path) -> None:
        """Write `manifest.json` atomically."""
        whole = json.dumps(canonical.to_plain(dataclasses.replace(self, shards=())), sort_keys=True)
        shards = ", ".join(shard.text for shard in self.shards)
        write_text_atomic(Path(store) / MANIFEST_NAME, whole.replace('"shards": []', f'"shards": [{shards}]') + "\n")

    @classmethod
    def load(cls, store: str | Path) -> Manifest:
        """Read the manifest of a store folder. Raises InvalidInput where it is missing or malformed."""
        path = Path(store) / MANIFEST_NAME
        return canonical.from_plain(cls, read_json(path, "a store's manifest, by eyas-contract"), str(path))
