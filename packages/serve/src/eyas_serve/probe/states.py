"""What the target handed over: how many states, of which layers, of which target."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from eyas_contract.engines import Finding
from eyas_contract.golden import GoldenRecord
from eyas_serve.probe.compare import StageResult, tolerance_of
from eyas_serve.probe.measures import distance
from eyas_serve.probe.protocol import STATES
from eyas_serve.probe.record import Record

WHERE = "server, states that the target hands over"


@dataclass(frozen=True)
class Nearest:
    """The target layer whose output is nearest to a chunk, and the error; layer -1 where nothing is known."""

    layer: int
    error: float


def state_findings(record: Record, golden: GoldenRecord, stages: list[StageResult], next_token: int | None
                   ) -> list[Finding]:
    """Wrong width or number, wrong layers, another target."""
    facts = golden.golden
    wanted = f"{len(facts.aux_layer_ids)} states of width {facts.hidden_size}, outputs of layers " \
             f"{list(facts.aux_layer_ids)}"
    if STATES in record.tensors:
        return [_width(record, golden, wanted)]
    chunks = [stage for stage in stages if stage.name.startswith("aux.")]
    if any(stage.verdict in ("absent", "extra", "width") for stage in chunks):
        found = f"{sum(stage.verdict not in ('absent', 'extra') for stage in chunks)} states" if not any(
            stage.verdict == "width" for stage in chunks) else f"states of shape {list(chunks[0].shape)}"
        return [Finding("probe-states-width", "error", WHERE, found, wanted, "fc does not fit.",
                        "Serve the draft with its own target, and its layer ids as trained.")]
    result, fits = [], 0
    for index, stage in enumerate(chunks):
        named = _layer(record, golden, stage, index)
        if named is None:
            fits += 1
        else:
            result.append(named)
    token_differs = next_token is not None and next_token != facts.next_id
    if result and not fits and all("no layer" in finding.found for finding in result):
        return [Finding("probe-target", "error", WHERE, f"none of the {len(chunks)} states is that of any layer"
                        + (", and the target's next token differs" if token_differs else ""),
                        f"the states of {facts.target_architecture} as trained on",
                        "the draft reads states of another target, or of one that computes differently",
                        "Serve the target that the draft was trained for; compare revision and quantisation.")]
    if token_differs and not result:
        result.append(Finding("probe-target", "warning", "server, the target's own next token", str(next_token),
                              f"{facts.next_id}, by the golden record", "a near tie, or a target that differs a little",
                              "Compare the target's revision, dtype and quantisation with those of training."))
    return result


def _width(record: Record, golden: GoldenRecord, wanted: str) -> Finding:
    facts, width = golden.golden, record.width(STATES)
    count, rest = divmod(width, facts.hidden_size)
    found = f"width {width}"
    remedy = "Serve the draft with its own target."
    if not rest:
        found = f"{count} state{'s' if count != 1 else ''} of width {facts.hidden_size}"
        rows = record.rows(STATES, facts.layer_positions or facts.positions)
        which = [nearest(golden, [row[i * facts.hidden_size:(i + 1) * facts.hidden_size] for row in rows])
                 for i in range(count)]
        near = [f"the output of layer {n.layer}" if n.error <= tolerance_of(record) else
                "the output of no layer (the last state after the final norm, as plain EAGLE is fed?)" for n in which
                if n.layer >= 0]
        found += f": {', '.join(near)}" if near else ""
        remedy = ("Start with --speculative-algorithm EAGLE3; set eagle_config.use_aux_hidden_state true; ids must lie "
                  "inside the target's layers; see whether this SGLang's target class captures aux states.")
    skipped = "SGLang skips fc without a word, for its input has the width of its output. " if count == 1 else ""
    return Finding("probe-states-width", "error", WHERE, found, wanted, skipped + "Acceptance falls to about 1.00.",
                   remedy)


def _layer(record: Record, golden: GoldenRecord, stage: StageResult, index: int) -> Finding | None:
    """Whether a chunk is another layer's output; None where it is its own."""
    facts, tolerance = golden.golden, tolerance_of(record)
    own = stage.distance
    if own is None:
        return None
    best = nearest(golden, record.rows(stage.name, facts.layer_positions or facts.positions))
    trained = facts.aux_layer_ids[index]
    another = 0 <= best.layer != trained and best.error <= tolerance and best.error < own.error / 2
    if own.error <= tolerance and not another:
        return None
    if not own.finite:
        found = f"chunk {index} is no layer's output: NaN or infinite values"
    elif another:
        found = f"chunk {index} is the output of layer {best.layer} (relative error {best.error:.2g}; " \
                f"{own.error:.2g} from layer {trained})"
    else:
        found = f"chunk {index} is no layer's output: relative error {own.error:.2g} from layer {trained}, " \
                f"{best.error:.2g} from the nearest, {best.layer}"
    return Finding("probe-states-layer", "error", WHERE, found, f"the output of layer {trained} (0-based), as trained",
                   "fc mixes states that it was not trained on. Acceptance falls.",
                   "Correct eagle_aux_hidden_state_layer_ids for this target class and version (eyas-serve preflight "
                   "says how they are read).")


def nearest(golden: GoldenRecord, rows: list[array[float]]) -> Nearest:
    """The layer nearest to rows at `layer_positions`; without a table of layers, the nearest of the aux layers."""
    table = golden.layers()
    if table:
        candidates = {k: [row[k] for row in table] for k in range(golden.golden.num_layers)}
    else:
        candidates = {k: golden.stage(f"aux.{i}") for i, k in enumerate(golden.golden.aux_layer_ids)}
    errors = [Nearest(k, distance(rows, wanted).error) for k, wanted in candidates.items()
              if len(wanted[0]) == len(rows[0])]
    return min(errors, key=lambda n: n.error, default=Nearest(-1, float("inf")))
