"""Sorts a checkpoint's tensors the way an engine's loader does: which parameter each fills, which fill none."""

from __future__ import annotations

from dataclasses import dataclass, field

from eyas_contract.engines.checks.case import Case
from eyas_contract.engines.loaders import FUSED, Loader
from eyas_contract.engines.quantised import PACKED, certain, method, split, unquantised
from eyas_contract.engines.wanted import Shapes, tensors
from eyas_contract.safetensors_header import TensorInfo

SILENT = "the server says nothing, answers requests, and accepts no draft token (acceptance length 1.00)"
_SPECIAL = ("d2t", "t2d")
_TABLES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")  # engines make them themselves


@dataclass(frozen=True)
class Placed:
    """Stored tensors by the parameter they fill, and those that fill none.

    Attributes:
        wanted: parameters and their shapes, those that stand for several among them where the file has such.
        covered: parameters filled by a tensor that stands for several, or by packed numbers.
        scales: quantisation parameters that the class is known to load; unsure: those of which it is not known.
    """

    wanted: Shapes
    found: dict[str, TensorInfo]
    strangers: list[str] = field(default_factory=list)
    twice: list[str] = field(default_factory=list)
    covered: set[str] = field(default_factory=set)
    scales: list[str] = field(default_factory=list)
    unsure: list[str] = field(default_factory=list)


def place(case: Case, loader: Loader) -> Placed:
    """Sort the stored names as the engine's loader does."""
    wanted = tensors(case.config, loader)
    placed, fused = Placed(wanted, {}), dict[str, list[str]]()
    for name, info in case.tensors.items():
        loaded = loader.place(name)
        if loaded in _SPECIAL or name.endswith(_TABLES):
            continue
        if loaded is not None and loader.kind == "llama":
            prefix, _, rest = loaded.partition(".self_attn.") if ".self_attn." in loaded else loaded.partition(".mlp.")
            inner = loaded[len(prefix) + 1:]
            parts = [f"{prefix}.{part}" for part in FUSED.get(inner, ())]
            if rest and parts and all(part in wanted for part in parts):
                placed.covered.update(parts)
                wanted[loaded] = (sum(wanted[part][0] for part in parts), *wanted[parts[0]][1:])
                fused[loaded] = parts
        if loaded is not None and _quantisation(case, loader, placed, name, loaded):
            continue
        if loaded is None or loaded not in wanted:
            placed.strangers.append(name)
        elif loaded in placed.found:
            placed.twice.append(f"{placed.found[loaded].name} and {name}")
        else:
            placed.found[loaded] = info
    placed.twice.extend(f"{placed.found[part].name} and {placed.found[whole].name}" for whole, parts in fused.items()
                        for part in parts if part in placed.found)
    return placed


def _quantisation(case: Case, loader: Loader, placed: Placed, name: str, loaded: str) -> bool:
    """Sort a parameter of a quantised layer; False for any other tensor."""
    owner = split(loaded, placed.wanted) if method(case.config) else None
    if owner is None or any(unquantised(weight, loader) for weight in owner[0]):
        return False
    weights, parameter = owner
    known = all(certain(weight, parameter, case.config, loader) for weight in weights)
    (placed.scales if known else placed.unsure).append(name)
    if parameter in PACKED:
        placed.covered.update(weights)
    return True
