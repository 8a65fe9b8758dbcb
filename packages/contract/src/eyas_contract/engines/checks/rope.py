"""Rope and positions: two facts apart, what the table covers and what the draft was trained on."""

from __future__ import annotations

import dataclasses
from typing import Any

from eyas_contract.contract import FILE_NAME
from eyas_contract.engines.checks.case import Case
from eyas_contract.engines.findings import Finding
from eyas_contract.target import Rope

_DEFAULT_POSITIONS = 2048  # transformers' LlamaConfig
_DEFAULT_THETA = 10000.0


def check_rope(case: Case) -> list[Finding]:
    """Positions against the served context, rope against training, else against the target."""
    return _positions(case) + _spellings(case) + _share(case) + _meaning(case)


def _positions(case: Case) -> list[Finding]:
    covers = int(case.config.get("max_position_embeddings") or _DEFAULT_POSITIONS)
    of_target = case.spec.max_position_embeddings
    served = case.flags.context_length or of_target
    trained, source = _trained_length(case)
    result = []
    short = [f"{value} ({what})" for what, value in (("served context", served), ("trained length", trained or 0))
             if value > covers]
    if short:
        facts = f"; trained up to {trained} tokens ({source}): past that expect falling acceptance, and measure it, " \
            "whatever the table covers" if trained else ""
        same = _rope(case.config) == _rope(case.target_config)
        remedy = f"Set max_position_embeddings to the target's {of_target}" if same and of_target >= served else \
            f"Set max_position_embeddings to at least {max(served, trained or 0)} with the rope that was trained, or " \
            f"serve with --context-length {covers}"
        result.append(Finding("positions-short", "error", "config.json: max_position_embeddings", str(covers),
                              f"at least {' and '.join(short)}",
                              "the rope table ends before the context does: the server refuses to start, reads outside "
                              f"the table, or accepts nothing past it{facts}", f"{remedy}."))
    if trained and trained < served:
        result.append(Finding("trained-length", "note", source, f"trained on sequences up to {trained} tokens",
                              f"the served context of {served}, if long contexts matter",
                              "acceptance usually falls beyond the trained length, though the table covers it",
                              "Measure acceptance at long contexts, or train on longer sequences."))
    return result


def _trained_length(case: Case) -> tuple[int | None, str]:
    if case.contract is not None:
        # max_length only cuts: a target of fewer positions was never run on so many tokens.
        positions = case.contract.target.max_position_embeddings
        length = case.contract.capture.max_length
        return min(length, positions) if positions else length, FILE_NAME
    return case.record.max_length, case.record.source


def _rope(config: dict[str, Any]) -> Rope:
    """As `Rope.from_config`, with the share of a head that rotates, which older configs write outside of the rope."""
    rope, key = Rope.from_config(config), "partial_rotary_factor"
    share = config.get(key)
    if isinstance(share, bool) or not isinstance(share, int | float) or share == 1 or key in dict(rope.scaling):
        return rope
    return dataclasses.replace(rope, scaling=tuple(sorted([*rope.scaling, (key, share)])))


def _block(config: dict[str, Any]) -> str:
    rope = _rope(config)
    return f"theta {rope.theta:g}" + (" (default, not written)" if _theta_absent(config) else "") + \
        f", {rope.type}" + (f" {dict(rope.scaling)}" if rope.scaling else "")


def _theta_absent(config: dict[str, Any]) -> bool:
    parameters = config.get("rope_parameters") or config.get("rope_scaling") or {}
    return config.get("rope_theta") is None and "rope_theta" not in parameters


def _spellings(case: Case) -> list[Finding]:
    """`rope_parameters` (transformers 5) beside `rope_theta` + `rope_scaling` (older), saying different things."""
    config = case.config
    if not config.get("rope_parameters") or ("rope_theta" not in config and not config.get("rope_scaling")):
        return []
    new = _rope({"rope_parameters": config["rope_parameters"]})
    old = _rope({key: config.get(key) for key in ("rope_theta", "rope_scaling")})
    if new == old or ("rope_theta" not in config and (new.type, new.scaling) == (old.type, old.scaling)):
        return []
    return [Finding("rope-spellings", "error", "config.json: rope_parameters, rope_theta, rope_scaling",
                    f"rope_parameters: {_block({'rope_parameters': config['rope_parameters']})}; the older keys: "
                    f"theta {old.theta:g}, {old.type} {dict(old.scaling)}", "both spellings, agreeing",
                    "which one counts depends on the server's transformers version", "Write both alike.")]


def _share(case: Case) -> list[Finding]:
    """SGLang's Llama class takes the share of a head that rotates from the top level alone (`LlamaAttention`)."""
    key, parameters = "partial_rotary_factor", case.config.get("rope_parameters") or case.config.get("rope_scaling")
    inner = (parameters or {}).get(key)
    outer = case.config.get(key, 1)
    if case.loader is None or case.loader.engine != "sglang" or case.loader.kind != "llama" or case.contract \
            or inner in (None, outer):
        return []
    return [Finding("rope-spellings", "warning", f"config.json: {key}",
                    f"{inner} within the rope, {outer} outside of it",
                    f"the share that training rotated, outside of the rope: {case.server} reads no other",
                    f"the server rotates {outer} of each head: if training rotated {inner}, acceptance falls without a "
                    "message", f"Write {key} at the top level of config.json.")]


def _meaning(case: Case) -> list[Finding]:
    """Serving must use what training used; the target's rope is only the best guess where nothing was recorded."""
    served, target = _rope(case.config), _rope(case.target_config)
    if case.contract is not None and case.contract.draft is not None:
        return _against_training(case, served, case.contract.draft.rope, FILE_NAME)
    if case.record.rope_theta is not None:
        if served.theta != case.record.rope_theta:
            return [_not_as_trained(case, served, f"theta {case.record.rope_theta:g}", case.record.source)]
        if _theta_absent(case.config):
            return [Finding("rope-implicit", "warning", "config.json: rope_theta",
                            f"not written; the default {served.theta:g} is what training used ({case.record.source})",
                            f"rope_theta {served.theta:g}, explicitly, in rope_parameters too",
                            "right today by a default alone; the target's own theta "
                            f"({target.theta:g}) would be wrong for this draft",
                            f"Write rope_theta {served.theta:g}. Do not change it to the target's.")]
        return []
    if served == target:
        return []
    stage = "Before training: take over the target's rope, unless another is meant." if case.template else \
        "Serve with the rope that training used. If that was the target's, write it; if not, leave it as it is."
    return [Finding("rope-differs", "warning", "config.json: rope", f"draft: {_block(case.config)}",
                    f"target: {_block(case.target_config)}; or a record that the draft was trained so",
                    "if training used another rope than this config, positions mean something else when served; "
                    "acceptance falls with position, without a message", stage)]


def _against_training(case: Case, served: Rope, trained: Rope, source: str) -> list[Finding]:
    if served == trained:
        return []
    return [_not_as_trained(case, served, f"theta {trained.theta:g}, {trained.type} {dict(trained.scaling)}", source)]


def _not_as_trained(case: Case, served: Rope, trained: str, source: str) -> Finding:
    return Finding("rope-not-as-trained", "error", "config.json: rope", _block(case.config),
                   f"{trained}, by {source}", "positions mean something else than in training: acceptance falls with "
                   "position, without a message", "Write the rope that training used, in both spellings.")
