"""Sorts a checkpoint's tensors the way an engine's loader does: which parameter each fills, which fill none."""

from __future__ import annotations

from dataclasses import dataclass

from eyas_contract.engines.checks.case import Case
from eyas_contract.engines.loaders import FUSED, Loader
from eyas_contract.engines.wanted import Shapes, tensors
from eyas_contract.safetensors_header import TensorInfo

SILENT = "the server says nothing, answers requests, and accepts no draft token (acceptance length 1.00)"
_SPECIAL = ("d2t", "t2d")


@dataclass(frozen=True)
class Placed:
    """Stored tensors by the parameter they fill, and those that fill none."""

    wanted: Shapes
    found: dict[str, TensorInfo]
    strangers: list[str]
    twice: list[str]
    covered: set[str]


def place(case: Case, loader: Loader) -> Placed:
    """Sort the stored names as the engine's loader does."""
    wanted = tensors(case.config, loader)
    placed = Placed(wanted, {}, [], [], set())
    for name, info in case.tensors.items():
        loaded = loader.place(name)
        if loaded in _SPECIAL:
            continue
        if loaded is not None and loader.kind == "llama":
            prefix, _, rest = loaded.partition(".self_attn.") if ".self_attn." in loaded else loaded.partition(".mlp.")
            inner = loaded[len(prefix) + 1:]
            parts = [f"{prefix}.{part}" for part in FUSED.get(inner, ())]
            if rest and parts and all(part in wanted for part in parts):
                placed.covered.update(parts)
                continue
        if loaded is None or loaded not in wanted:
            placed.strangers.append(name)
        elif loaded in placed.found:
            placed.twice.append(f"{placed.found[loaded].name} and {name}")
        else:
            placed.found[loaded] = info
    return placed
