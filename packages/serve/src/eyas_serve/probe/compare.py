"""Stage by stage: the server's values beside the golden ones, each with a verdict. What differs first is the cause."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from eyas_contract.golden import GoldenRecord, stage_order
from eyas_serve.probe.measures import Distance, distance
from eyas_serve.probe.protocol import HANDED_ON, STATES
from eyas_serve.probe.record import Record

Verdict = Literal["ok", "differs", "follows", "width", "absent", "extra", "not seen"]
TOLERANCE = {"float32": 0.01, "float64": 0.01}
HALF = 0.15  # in 16 bits, or with a quantised target, states differ by some percent between two right engines

ALIKE = 0.3  # a cosine below this is not the wanted value slightly off: it has nothing to do with it
NEAR = 0.9
WRONG = ("differs", "follows", "width", "absent", "extra")

# A stage -> the stages it is computed from.
FEEDS: dict[str, tuple[str, ...]] = {
    "input_norm": ("aux.",), "aux_norm.": ("aux.", "input_norm"), "fused": ("aux.", "input_norm", "aux_norm."),
    "embedding": (), "embedding_norm": ("embedding",), "hidden_norm": ("fused",),
    "attention": ("embedding_norm", "hidden_norm"), "mlp_norm": ("attention", "fused"),
    "layer": ("mlp_norm", "attention", "fused"), "norm": ("layer",), HANDED_ON: ("norm", "layer")}


@dataclass(frozen=True)
class StageResult:
    """One line of the table.

    Attributes:
        name: the stage.
        shape, dtype, mean, std: of the server's values over all positions; empty where it has none.
        golden: shape, mean and std of the golden ones; None where training has no such stage.
        distance: at the golden positions, where both are there and of one width.
        verdict: `differs` with right inputs, `follows` from another stage that differs.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    mean: float | None
    std: float | None
    golden: tuple[tuple[int, ...], float, float] | None
    distance: Distance | None
    verdict: Verdict


def compare(record: Record, golden: GoldenRecord) -> list[StageResult]:
    """Every stage of either side, in the order of computation."""
    tolerance = tolerance_of(record)
    num_aux = max(len(golden.golden.aux_layer_ids), int(record.facts.get("num_aux") or 0))
    names = [name for name in (STATES, *stage_order(num_aux), HANDED_ON)
             if name in record.tensors or name in golden.golden.names]
    results: dict[str, StageResult] = {}
    for name in names:
        apart, verdict = _judge(name, record, golden, tolerance)
        inputs = [result for feeding in FEEDS.get(_family(name), ()) for result in results.values()
                  if _is(result.name, feeding)]
        if verdict in ("differs", "width") and any(result.verdict in WRONG for result in inputs) and not (
                apart is not None and _unlike(apart, inputs)):
            verdict = "follows"
        if verdict == "absent" and STATES in record.tensors and name != STATES:
            verdict = "follows"
        results[name] = _line(name, record, golden, apart, verdict)
    return list(results.values())


def _unlike(apart: Distance, inputs: list[StageResult]) -> bool:
    """Whether values have nothing to do with the wanted ones, though the inputs nearly are: a fault of its own."""
    near = all(result.distance is not None and result.distance.cosine > NEAR for result in inputs)
    return near and abs(apart.cosine) < ALIKE


def tolerance_of(record: Record) -> float:
    """The largest relative error that two right engines show, by the arithmetic of the server's draft."""
    return TOLERANCE.get(str(record.facts.get("dtype")), HALF)


def _judge(name: str, record: Record, golden: GoldenRecord, tolerance: float) -> tuple[Distance | None, Verdict]:
    if name == STATES:
        return None, "width"
    wanted_name = name
    if name == HANDED_ON:
        wanted_name = "norm" if golden.golden.norm_output else "layer"
    if wanted_name not in golden.golden.names:
        return None, "extra"
    if not record.has(name):
        seen = record.has("fused") or name.startswith("aux.")
        return None, "absent" if seen else "not seen"
    wanted = golden.stage(wanted_name)
    if record.width(name) != len(wanted[0]) or record.count(name) <= golden.golden.positions[-1]:
        return None, "width"
    apart = distance(record.rows(name, golden.golden.positions), wanted)
    return apart, "ok" if apart.error <= tolerance else "differs"


def _family(name: str) -> str:
    head, dot, _ = name.partition(".")
    return head + dot


def _is(name: str, feeding: str) -> bool:
    return name.startswith(feeding) if feeding.endswith(".") else name == feeding or (
        feeding == "fused" and name == STATES)


def _line(name: str, record: Record, golden: GoldenRecord, apart: Distance | None, verdict: Verdict) -> StageResult:
    wanted = next((s for s in golden.golden.stages if s.name == name), None)
    found = record.statistics(name)
    shape, dtype, mean, std = found or ((), "", None, None)
    return StageResult(name, shape, dtype, mean, std,
                       (wanted.shape, wanted.mean, wanted.std) if wanted is not None else None, apart, verdict)
