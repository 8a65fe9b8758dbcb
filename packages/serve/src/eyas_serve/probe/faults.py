"""From verdicts to findings: which part of the draft is wrong, named so that it can be mended."""

from __future__ import annotations

from collections.abc import Callable

from eyas_contract.engines import Finding
from eyas_contract.golden import GoldenRecord
from eyas_serve.probe.compare import ALIKE, StageResult, tolerance_of
from eyas_serve.probe.measures import distance, theta_of
from eyas_serve.probe.protocol import BEST_IDS, BEST_SCORES, HANDED_ON, INPUT_IDS, MAP, ROPE
from eyas_serve.probe.record import Record
from eyas_serve.probe.states import state_findings

ONES = 0.002  # how near to 1 the root mean square is after a norm whose weights are ones
LAYER = "midlayer."
LOW = "Acceptance falls, often to 1.00, and nothing else shows it."

# stage -> (code, what it is the output of, what to do)
PARTS: dict[str, tuple[str, str, str]] = {
    "input_norm": ("probe-norm", "input_norm (norm_before_fc)", "Correct norm_before_fc or input_norm.weight."),
    "aux_norm": ("probe-norm", "fc_norm.{i}, the norm of aux state {i}", "Correct fc_norm or fc_norm.{i}.weight."),
    "fused": ("probe-fc", "fc", "Export fc.weight again; its columns go by aux state, in layer order."),
    "embedding": ("probe-embedding", "embed_tokens", "Share the target's embedding, or export the draft's own with "
                  "target_hidden_size; compare the vocabulary's padding."),
    "embedding_norm": ("probe-norm", LAYER + "input_layernorm", "Export input_layernorm.weight again; check eps."),
    "hidden_norm": ("probe-norm", LAYER + "hidden_norm", "Export hidden_norm.weight again; check eps."),
    "attention": ("probe-attention", LAYER + "self_attn", "Export the attention's weights again."),
    "mlp_norm": ("probe-norm", LAYER + "post_attention_layernorm, or the residual before it (norm_before_residual)",
                 "Export post_attention_layernorm.weight again; SGLang always keeps the un-normed residual."),
    "layer": ("probe-layer", LAYER + "mlp, or a layer above", "Export the mlp's weights again."),
    "norm": ("probe-norm", "norm, the final norm", "Export norm.weight again; check rms_norm_eps."),
    HANDED_ON: ("probe-norm", "the state handed to the next step", "Set norm_output as in training.")}


def find_faults(record: Record, golden: GoldenRecord, stages: list[StageResult], next_token: int | None
                ) -> list[Finding]:
    """Findings, causes only: what follows from another stage is left to the table.

    Args:
        record, golden: both sides.
        stages: `compare` of them.
        next_token: the server's own first token after the prompt, where known.
    """
    inputs, rope = _inputs(record, golden, next_token), _rope(record, golden)
    result = [*state_findings(record, golden, stages, next_token), *inputs]
    for stage in stages:
        if stage.name.startswith(("aux.", "states")) or (inputs and stage.name == "embedding"):
            continue
        finding = _stage(stage, stages, bool(rope))
        if finding is not None:
            result.append(finding)
    result += [*rope, *_vocabulary(record, golden), *_head(record, golden, stages)]
    unseen = [stage.name for stage in stages if stage.verdict == "not seen"]
    if unseen:
        result.append(Finding("probe-not-seen", "warning", str(record.facts.get("draft_class")),
                              f"no values of {', '.join(unseen)}" + "".join(
                                  f" ({note})" for note in (record.facts.get("trouble") or ())[:3]),
                              "all stages, by eyas-serve probe", "these stages were not compared",
                              "Report it with SGLang's version."))
    return result


def _stage(stage: StageResult, stages: list[StageResult], rope_differs: bool) -> Finding | None:
    family, _, number = stage.name.partition(".")
    code, part, remedy = (text.replace("{i}", number) for text in PARTS[family])
    where = f"server, output of {part}"
    if stage.verdict == "absent":
        return Finding("probe-norm", "error", where, "the server does not apply it", "as in training",
                       "fc reads states of another size. " + LOW, remedy)
    if stage.verdict == "extra":
        return Finding("probe-norm", "error", where, "the server applies it", "not there in training",
                       "fc reads states of another size. " + LOW, remedy)
    if stage.verdict == "width":
        return Finding(code, "error", where, f"shape {list(stage.shape)}",
                       f"{list(stage.golden[0]) if stage.golden else '?'}, by the golden record", LOW, remedy)
    apart = stage.distance
    if stage.verdict != "differs" or apart is None:
        return None
    found = f"relative error {apart.error:.2g}, cosine {apart.cosine:.3f}, although its input is right"
    if not apart.finite or apart.zero:
        found = f"{'zeros' if apart.finite else 'NaN or infinite values'}, although its input is right"
        return Finding("probe-weights", "error", where, f"{found}: its weights were never set", "the trained weights",
                       LOW, "Name the tensors as the engine knows them (eyas-serve preflight lists them). " + remedy)
    if code == "probe-norm" and family != HANDED_ON and abs(apart.size - 1) < ONES:
        return Finding("probe-weights", "error", where, f"{found}: as after a norm whose weights are ones, never set",
                       "the trained weights", LOW, remedy)
    if family == "attention" and apart.first <= apart.error / 10:
        if rope_differs:
            return None
        return Finding(code, "error", where, f"{found}; right at position 0, where only v_proj and o_proj matter",
                       "the trained values at every position", LOW,
                       "Export q_proj and k_proj again; check the attention backend's causal mask and head_dim.")
    if code not in ("probe-norm", "probe-embedding") and abs(apart.cosine) < ALIKE:
        return Finding("probe-weights", "error", where, f"{found}: unlike the trained weights, random or never set",
                       "the trained weights", LOW, "Name the tensors as the engine knows them (eyas-serve preflight "
                       "lists them). " + remedy)
    return Finding(code, "error", where, found, "the trained values, by the golden record", LOW, remedy)


def _inputs(record: Record, golden: GoldenRecord, next_token: int | None) -> list[Finding]:
    """The draft's own inputs: the token after each position."""
    found, facts = record.integers(INPUT_IDS), golden.golden
    wanted = [*facts.input_ids[1:], facts.next_id if next_token is None else next_token]
    if not found or found == wanted:
        return []
    off = [i for i, pair in enumerate(zip(found, wanted, strict=False)) if pair[0] != pair[1]]
    how = "each token beside its own state, not shifted" if found[:-1] == list(facts.input_ids[:-1]) else \
        f"other tokens at {len(off)} positions, the first {off[:1]}"
    return [Finding("probe-input", "error", "server, tokens that the draft reads", how,
                    "the token after each position", LOW, "Report it with SGLang's version and the server's flags.")]


def _rope(record: Record, golden: GoldenRecord) -> list[Finding]:
    positions = golden.golden.positions
    if not record.has(ROPE) or record.count(ROPE) <= positions[-1]:
        return []
    found, wanted = record.rows(ROPE, positions), golden.rope()
    where = f"server, rotary embedding of {LAYER}self_attn"
    if len(found[0]) != len(wanted[0]):
        return [Finding("probe-rope", "error", where, f"{len(found[0])} dimensions", f"{len(wanted[0])}", LOW,
                        "Correct head_dim (or qk_rope_head_dim) in the draft's config.json.")]
    if distance(found, wanted).error <= 0.01 and max(
            distance([f], [w]).error for f, w in zip(found, wanted, strict=True)) <= 0.02:
        return []
    thetas = theta_of(found, positions), theta_of(wanted, positions)
    text = "other angles than trained"
    if all(thetas) and thetas[0] is not None and thetas[1] is not None and \
            abs(thetas[0] / thetas[1] - 1) > 0.01 and golden.golden.rope.type == "default":
        text += f": theta is about {float(f'{thetas[0]:.2g}'):g}"  # tables in 16 bits tell no more
    rope = golden.golden.rope
    scaling = "".join(f", {key} {value}" for key, value in rope.scaling)
    return [Finding("probe-rope", "error", where, text, f"rope {rope.type}, theta {rope.theta:g}{scaling}, as trained",
                    LOW, "Write the trained rope into the draft's config.json: rope_parameters, and rope_theta with "
                    "rope_scaling for older engines.")]


def _vocabulary(record: Record, golden: GoldenRecord) -> list[Finding]:
    """The map from draft ids to target ids, entry by entry."""
    found, wanted = record.integers(MAP), golden.draft_to_target()
    where, remedy = "server, draft ids to target ids (d2t)", "Write d2t as offsets: target = draft + d2t[draft]."
    if not found or found == wanted:
        return []
    if len(found) != len(wanted):
        return [Finding("probe-vocabulary", "error", where, f"{len(found)} entries", f"{len(wanted)}, as trained",
                        "proposals are other tokens than meant. " + LOW, remedy)]
    off = [i for i, pair in enumerate(zip(found, wanted, strict=True)) if pair[0] != pair[1]]
    how = f"{len(off)} of {len(wanted)} entries lead elsewhere, the first: draft id {off[0]} to {found[off[0]]}"
    if found == list(range(len(found))):
        how = "draft ids are used as target ids: d2t is missing"
    elif all(f == w + i for i, (f, w) in enumerate(zip(found, wanted, strict=True))):
        how = "target ids were taken for offsets"
    return [Finding("probe-vocabulary", "error", where, how,
                    f"draft id {off[0]} is target id {wanted[off[0]]}, as trained",
                    "proposals are other tokens than meant. " + LOW, remedy)]


def same_proposals(record: Record, golden: GoldenRecord) -> tuple[int, int]:
    """At how many positions the server's first proposal, by its own map, is the trained one, and of how many."""
    if BEST_IDS not in record.tensors or MAP not in record.tensors:
        return 0, 0
    count, width = record.tensors[BEST_IDS].shape
    best, to_target, positions = record.integers(BEST_IDS), record.integers(MAP), golden.golden.positions
    wanted = [row[0] for row in golden.proposals()[0]]
    rows = positions if count > positions[-1] else (0,)
    found = [to_target[best[row * width]] for row in rows]
    return sum(a == b for a, b in zip(found, wanted[-len(rows):], strict=True)), len(rows)


def _head(record: Record, golden: GoldenRecord, stages: list[StageResult]) -> list[Finding]:
    """Logits of the trained best tokens: by draft id, so that a wrong map is not taken for a wrong head."""
    normed = next((s for s in stages if s.name == "norm"), None)
    if BEST_IDS not in record.tensors or normed is None or normed.verdict != "ok":
        return []
    shape = record.tensors[BEST_IDS].shape
    positions = golden.golden.positions
    rows = positions if shape[0] > positions[-1] else (0,)
    flat, scores = record.integers(BEST_IDS), record.rows(BEST_SCORES, rows)
    back = {target: draft for draft, target in enumerate(golden.draft_to_target())}
    ids, wanted_scores = golden.proposals()
    pick: Callable[[int], int] = (lambda i: i) if len(rows) > 1 else (lambda _: len(positions) - 1)
    off = 0
    for i, row in enumerate(rows):
        best = dict(zip(flat[row * shape[1]:(row + 1) * shape[1]], scores[i], strict=True))
        target, score = ids[pick(i)][0], wanted_scores[pick(i)][0]
        spread = max(abs(v - score) for v in wanted_scores[pick(i)]) + 1e-6
        draft = back.get(target, -1)
        allowed = max(spread, abs(score)) * tolerance_of(record)
        off += draft not in best or abs(best[draft] - score) > allowed
    if off <= len(rows) // 4:
        return []
    return [Finding("probe-head", "error", "server, output of lm_head", f"at {off} of {len(rows)} positions the "
                    "trained best token has another score, although its input is right: the head is another, random, "
                    "or the target's", "the trained head", LOW,
                    "Export lm_head.weight; draft_vocab_size must be its number of rows.")]
