"""A server's record as the client reads it, trusting nothing in it."""

from __future__ import annotations

import json
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas_contract import EngineFailure
from eyas_contract.floats import FLOATS, read_rows
from eyas_contract.safetensors_header import TensorInfo, read_header, read_values
from eyas_serve.probe.protocol import INPUT_IDS, MAP, METADATA, POSITIONS, VERSION


@dataclass(frozen=True)
class Record:
    """What a server's draft received and computed.

    Attributes:
        tensors: by name, see `protocol`.
        facts: `draft_class`, `dtype`, `num_aux`, `norm_output`, `statistics` (name -> shape, dtype, mean, std), ...
    """

    tensors: Mapping[str, TensorInfo]
    facts: Mapping[str, Any]

    def has(self, name: str) -> bool:
        """Whether there are values of this name."""
        return name in self.tensors and self.tensors[name].dtype in FLOATS

    def width(self, name: str) -> int:
        """Last axis."""
        return self.tensors[name].shape[-1]

    def count(self, name: str) -> int:
        """Rows."""
        shape = self.tensors[name].shape
        return shape[0] if len(shape) == 2 else 0

    def rows(self, name: str, positions: Sequence[int]) -> list[array[float]]:
        """Values at some positions, which must be there."""
        return read_rows(self.tensors[name], positions)

    def integers(self, name: str) -> list[int]:
        """An integer tensor's values, flat; empty where absent."""
        return read_values(self.tensors[name]) if name in self.tensors else []

    def statistics(self, name: str) -> tuple[tuple[int, ...], str, float, float] | None:
        """Shape, dtype, mean and standard deviation over all positions, by the server."""
        found = (self.facts.get("statistics") or {}).get(name)
        if not isinstance(found, list) or len(found) != 4 or not isinstance(found[0], list):
            return None
        return tuple(found[0]), str(found[1]), float(found[2]), float(found[3])


def read_record(path: Path, count: int) -> Record:
    """Read the record of a request of `count` tokens.

    Raises:
        EngineFailure: of another protocol, the recorder failed inside the engine, or rows are missing.
        CorruptFile: no safetensors file.
    """
    header = read_header(path)
    try:
        facts = json.loads(header.metadata.get(METADATA, ""))
    except ValueError:
        facts = None
    if not isinstance(facts, dict) or facts.get("protocol") != VERSION:
        raise EngineFailure("the server's record", "not of this protocol", f"protocol {VERSION}, by eyas-serve probe",
                            "Install the same eyas-serve on both sides.")
    record = Record(header.tensors, facts)
    trouble = "; ".join(map(str, facts.get("trouble") or ()))
    if POSITIONS not in record.tensors and not any(name.startswith(("aux.", "states")) for name in record.tensors):
        raise EngineFailure("the recorder in the engine", trouble or "recorded nothing", "the draft's prefill",
                            f"Report it with SGLang's version ({facts.get('sglang')}).")
    positions = record.integers(POSITIONS)
    if positions and positions != list(range(count)):
        raise EngineFailure("the server's record", f"{len(positions)} rows from {positions[0]} to {positions[-1]}",
                            f"0 to {count - 1}", "A cached prefix hid rows: is a prefix cache of another kind on?")
    for name in (INPUT_IDS, POSITIONS, MAP):
        if name in record.tensors and record.tensors[name].dtype not in ("I32", "I64"):
            raise EngineFailure("the server's record", f"{name} is {record.tensors[name].dtype}", "integers",
                                "Install the same eyas-serve on both sides.")
    return record
