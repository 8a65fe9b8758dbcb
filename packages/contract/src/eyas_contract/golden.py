"""The golden record: what a draft must receive, compute and propose on a few fixed tokens. Standard library only.

Two files in the draft's folder: `golden.json` (this module's `Golden`, and the digest of the other) and
`golden.values` (a safetensors file under a name that no engine takes for weights). Made where the draft is exported, or
for anybody's draft by `eyas-draft golden`; compared with a running server by `eyas-serve probe`.

Stages, in the order of the draft's computation (K aux states of width E, draft width H):

    aux.0 .. aux.K-1                 target states that the draft is handed, [rows, E] each
    input_norm, aux_norm.0 ..        after the norms before `fc`, where the draft has them
    fused                            output of `fc`, the input of layer 0
    embedding                        row of the token after each position
    embedding_norm, hidden_norm      after layer 0's two input norms, side by side the input of its attention
    attention                        output of layer 0's attention, `o_proj` included
    mlp_norm                         after layer 0's post_attention_layernorm
    layer                            residual stream after the last layer
    norm                             after the final norm, the input of the head
"""

from __future__ import annotations

import hashlib
import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from eyas_contract import canonical
from eyas_contract.contract import read_json, write_text_atomic
from eyas_contract.errors import CorruptFile, InvalidInput
from eyas_contract.floats import FLOATS, read_rows
from eyas_contract.safetensors_copy import literal, write_tensors
from eyas_contract.safetensors_header import TensorInfo, read_header, read_values
from eyas_contract.target import Rope

RECORD_NAME, VALUES_NAME = "golden.json", "golden.values"
LAYERS, ROPE, MAP, PROPOSALS, SCORES = "layers", "rope", "draft_to_target", "proposal_ids", "proposal_scores"
MAX_BYTES = 256 * 1024 * 1024
FRONT = ("input_norm",)
BACK = ("fused", "embedding", "embedding_norm", "hidden_norm", "attention", "mlp_norm", "layer", "norm")


@dataclass(frozen=True)
class StageStatistics:
    """One stage over all positions: shape, dtype it was computed in, mean and standard deviation."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    mean: float
    std: float


@dataclass(frozen=True)
class Golden:
    """What `golden.json` says.

    Attributes:
        made_by: program and version.
        source: where the target's states came from: `target` (run by Hugging Face) or `store`.
        target_architecture, num_layers, hidden_size, target_vocab_size: the target.
        draft_kind: `llama` or `mla`.
        aux_layer_ids: outputs of these target layers (0-based) are the aux states.
        input_ids: the tokens to send, T of them.
        next_id: the target's own greedy choice after them; the draft reads it at the last position.
        positions: the positions (rows) whose values are stored, ascending; the last is T-1.
        layer_positions: the positions at which every layer's output is stored, for naming a wrong one; may be empty.
        norm_output: whether the normed state is handed to the draft's next step, else the residual stream.
        rope: as the draft was trained.
        draft_vocab_size: rows of the head.
        stages: statistics in order.
        values_sha256: digest of the values' file.
    """

    made_by: str
    source: str
    target_architecture: str
    num_layers: int
    hidden_size: int
    target_vocab_size: int
    draft_kind: str
    aux_layer_ids: tuple[int, ...]
    input_ids: tuple[int, ...]
    next_id: int
    positions: tuple[int, ...]
    layer_positions: tuple[int, ...]
    norm_output: bool
    rope: Rope
    draft_vocab_size: int
    stages: tuple[StageStatistics, ...]
    values_sha256: str = ""
    schema_version: int = 1

    def __post_init__(self) -> None:
        faults = []
        if self.schema_version != 1:
            faults.append(f"schema_version {self.schema_version}, but this eyas-contract reads 1")
        last = len(self.input_ids) - 1
        for name, rows in (("positions", self.positions), ("layer_positions", self.layer_positions)):
            if list(rows) != sorted(set(rows)) or any(not 0 <= row <= last for row in rows):
                faults.append(f"{name} {list(rows)} are not ascending positions of {last + 1} tokens")
        if not self.positions or self.positions[-1] != last:
            faults.append("positions do not end with the last token")
        if any(not 0 <= i < self.target_vocab_size for i in (*self.input_ids, self.next_id)):
            faults.append(f"token ids outside 0..{self.target_vocab_size - 1}")
        if not self.aux_layer_ids:
            faults.append("no aux_layer_ids")
        if faults:
            raise ValueError("; ".join(faults))

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the stages, in order."""
        return tuple(stage.name for stage in self.stages)


@dataclass(frozen=True)
class Values:
    """Values to write: safetensors dtype, shape, little-endian bytes."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


@dataclass(frozen=True)
class GoldenRecord:
    """A record as read: its facts, and where its values lie."""

    golden: Golden
    tensors: Mapping[str, TensorInfo]

    def stage(self, name: str) -> list[array[float]]:
        """A stage's rows at `golden.positions`."""
        return read_rows(self.tensors[name])

    def layers(self) -> list[list[array[float]]]:
        """layers()[p][k]: output of target layer k at `layer_positions[p]`; empty where not stored."""
        if LAYERS not in self.tensors:
            return []
        flat, count = read_rows(self.tensors[LAYERS]), self.golden.num_layers
        return [flat[i:i + count] for i in range(0, len(flat), count)]

    def rope(self) -> list[array[float]]:
        """Rows of cosines and then sines at `golden.positions`."""
        return read_rows(self.tensors[ROPE])

    def draft_to_target(self) -> list[int]:
        """Target id of each draft id."""
        return read_values(self.tensors[MAP])

    def proposals(self) -> tuple[list[list[int]], list[array[float]]]:
        """The draft's best tokens (target ids) and their logits at `golden.positions`, best first."""
        width = self.tensors[PROPOSALS].shape[1]
        flat = read_values(self.tensors[PROPOSALS])
        return [flat[i:i + width] for i in range(0, len(flat), width)], read_rows(self.tensors[SCORES])


def stage_order(num_aux: int) -> tuple[str, ...]:
    """Every stage that a draft of K aux states can have, in order."""
    chunks = range(num_aux)
    return (*(f"aux.{i}" for i in chunks), *FRONT, *(f"aux_norm.{i}" for i in chunks), *BACK)


def spread(count: int, wanted: int) -> tuple[int, ...]:
    """About `wanted` of the positions 0 to count-1: the first two, the last, and others evenly between."""
    if count <= wanted:
        return tuple(range(count))
    return tuple(sorted({0, 1, *(round(1 + (count - 2) * i / (wanted - 2)) for i in range(wanted - 1))}))


def save_golden(folder: Path, golden: Golden, values: Mapping[str, Values]) -> Path:
    """Write both files, the record last; returns its path."""
    tensors = {name: literal(name, v.dtype, v.shape, v.data) for name, v in values.items()}
    write_tensors(folder / VALUES_NAME, tensors, {"format": "pt"})
    plain = canonical.to_plain(golden) | {"values_sha256": _sha256(folder / VALUES_NAME)}
    write_text_atomic(folder / RECORD_NAME, json.dumps(plain, sort_keys=True, indent=1) + "\n")
    return folder / RECORD_NAME


def load_golden(folder: Path) -> GoldenRecord:
    """Read and check a draft folder's record.

    Raises:
        InvalidInput: no record, or one that contradicts itself.
        CorruptFile: values that are not those of the record.
    """
    path, values = folder / RECORD_NAME, folder / VALUES_NAME
    wanted = "a golden record, by eyas-serve probe"
    if not path.is_file() or not values.is_file():
        raise InvalidInput(str(folder), f"no {RECORD_NAME} with {VALUES_NAME}", wanted,
                           "Make one with: eyas-draft golden DRAFT --target TARGET")
    golden = canonical.from_plain(Golden, read_json(path, wanted), str(path))
    tensors = read_header(values).tensors
    if values.stat().st_size > MAX_BYTES or _sha256(values) != golden.values_sha256:
        raise CorruptFile(str(values), "other bytes than were written", f"those of {path.name}", "Make it again.")
    faults = _faults(golden, tensors)
    if faults:
        raise InvalidInput(str(values), "; ".join(faults), f"the values that {path.name} describes", "Make it again.")
    return GoldenRecord(golden, tensors)


def _sha256(path: Path) -> str:
    with path.open("rb") as source:
        return hashlib.file_digest(source, "sha256").hexdigest()


def _faults(golden: Golden, tensors: Mapping[str, TensorInfo]) -> list[str]:
    rows = len(golden.positions)
    floats: dict[str, Sequence[int | None]] = {s.name: (rows, *s.shape[-1:]) for s in golden.stages}
    floats |= {ROPE: (rows, None), SCORES: (rows, None)}
    if golden.layer_positions:
        floats[LAYERS] = (len(golden.layer_positions), golden.num_layers, golden.hidden_size)
    result = []
    for name, shape in floats.items():
        info = tensors.get(name)
        if info is None or info.dtype not in FLOATS or not _fits(info.shape, shape):
            result.append(f"{name} is {'absent' if info is None else f'{info.dtype} {list(info.shape)}'}")
    for name, shape in ((MAP, (golden.draft_vocab_size,)), (PROPOSALS, (rows, None))):
        info = tensors.get(name)
        if info is None or info.dtype != "I32" or not _fits(info.shape, shape):
            result.append(f"{name} is {'absent' if info is None else f'{info.dtype} {list(info.shape)}'}")
    unknown = set(golden.names) - set(stage_order(len(golden.aux_layer_ids)))
    return result + [f"unknown stages {sorted(unknown)}"] * bool(unknown)


def _fits(found: tuple[int, ...], wanted: Sequence[int | None]) -> bool:
    return len(found) == len(wanted) and all(w is None or f == w for f, w in zip(found, wanted, strict=True))
