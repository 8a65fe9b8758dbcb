"""Turns a store into one as older versions wrote it."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from eyas_contract.safetensors_header import read_header


def as_version_1(folder: Path) -> None:
    """The manifest in its first version: SHA-256 of every tensor."""
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())
    for shard in manifest["shards"]:
        raw, header = (folder / shard["file"]).read_bytes(), read_header(folder / shard["file"])
        for tensor in shard["tensors"]:
            info = header.tensors[tensor["name"]]
            del tensor["xxh3_128"]
            tensor["sha256"] = hashlib.sha256(raw[info.start:info.end]).hexdigest()
    path.write_text(json.dumps(manifest | {"schema_version": 1}))
