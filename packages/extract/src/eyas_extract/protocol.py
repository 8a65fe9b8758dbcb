"""What the extraction loop and the plug-in inside SGLang say to one another. Standard library only.

The loop lays out a shard file of its final size, all but the states filled in, and sends its samples as ordinary
requests whose id names the file and the rows. The plug-in writes the rows there and one line a sample to the
`.rows` file beside it; its first line says who writes.
"""

from __future__ import annotations

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

from eyas_contract.canonical import from_plain

VARIABLE = "EYAS_CAPTURE"
PREFIX = "eyas:"
READY, REFUSED = "capture-", "refused-"  # files in the status folder: a rank that captures, a complaint


@dataclass(frozen=True)
class CaptureSettings:
    """What an engine is told, as JSON in the environment variable `EYAS_CAPTURE`.

    Attributes:
        aux_layer_ids: output of decoder layer k, 0-based.
        root: only files below this folder are ever written.
        status: folder in which each capturing rank writes `capture-<rank>.json`.
        store_dtype: safetensors dtype of the stored states; empty for the model's own.
        slot_mib, slots: size and number of the pinned buffers.
        threads: of the writer process.
    """

    aux_layer_ids: tuple[int, ...]
    root: str
    status: str
    store_dtype: str = ""
    slot_mib: int = 64
    slots: int = 8
    threads: int = 4

    def environment(self) -> dict[str, str]:
        """The variable and its value."""
        return {VARIABLE: json.dumps(asdict(self))}

    @classmethod
    def from_environment(cls) -> CaptureSettings | None:
        """The settings of this process's engine, or None where it is not ours. Raises InvalidInput for bad JSON."""
        text = os.environ.get(VARIABLE)
        return from_plain(cls, json.loads(text), f"${VARIABLE}") if text else None


class Mark(NamedTuple):
    """Where a request's states belong: rows `first` to `first + rows` of the shard file `path`, at this attempt."""

    path: str
    first: int
    rows: int
    attempt: int = 0

    def request_id(self) -> str:
        """The mark as a request id."""
        return f"{PREFIX}{self.path}:{self.first}:{self.rows}:{self.attempt}"

    @classmethod
    def parse(cls, request_id: str) -> Mark | None:
        """The mark in a request id, or None for a request that is not ours."""
        if not request_id.startswith(PREFIX):
            return None
        try:
            path, first, rows, attempt = request_id[len(PREFIX):].rsplit(":", 3)
            return cls(path, int(first), int(rows), int(attempt))
        except ValueError:  # somebody else's words, which must not end the engine
            return None


@dataclass(frozen=True)
class Captor:
    """Who captures; written when the engine is ready, and as the first line of every `.rows` file.

    Attributes:
        engine: version of SGLang.
        target_class: SGLang's class of the target.
        aux_layer_ids: what it captures.
        hidden_size: width of one state.
        model_dtype, store_dtype: safetensors names.
        root: below which it writes.
        rank: which process of the engine.
        gather: what gathers the layers: `eyas_native.cuda`, `eyas_native` or `torch`, with the reason where torch.
        weights: fingerprint of the target's weights, where they lie in a folder.
        proof: what the check of the layers found; empty before the first forward pass.
    """

    engine: str
    target_class: str
    aux_layer_ids: tuple[int, ...]
    hidden_size: int
    model_dtype: str
    store_dtype: str
    root: str
    rank: str
    gather: str
    weights: str = ""
    proof: str = ""


@dataclass(frozen=True)
class RowsDone:
    """One sample of a shard: written whole, or why not (`fault`); `bad` says why its states cannot be used."""

    first: int
    rows: int
    fault: str = ""
    bad: str = ""

    def line(self) -> bytes:
        """As a line of the report."""
        return json.dumps(self.__dict__).encode("ascii") + b"\n"


def rows_file(shard: Path) -> Path:
    """The report beside a shard file."""
    return shard.with_name(shard.name + ".rows")


def read_rows(path: Path, offset: int) -> tuple[list[Captor | RowsDone], int]:
    """Whole lines of a report from a byte offset on, and the offset after them; nothing where there is no file yet."""
    try:
        with path.open("rb") as source:
            source.seek(offset)
            raw = source.read()
    except FileNotFoundError:
        return [], offset
    end = raw.rfind(b"\n") + 1
    lines: list[Captor | RowsDone] = []
    for line in raw[:end].splitlines():
        plain = json.loads(line)
        if "engine" in plain:
            lines.append(from_plain(Captor, plain, str(path)))
        else:
            lines.append(RowsDone(**plain))
    return lines, offset + end
