"""The target at hand against the one of training: sizes, weights, tokenizer and chat template."""

from __future__ import annotations

import dataclasses
from typing import Any

from eyas_contract.contract import FILE_NAME
from eyas_contract.engines.checks.case import Case
from eyas_contract.engines.checks.config_values import value_faults
from eyas_contract.engines.findings import Finding
from eyas_contract.engines.wanted import num_layers, sizes_beside

_SIZES = ("architecture", "num_layers", "hidden_size", "vocab_size")
_TEXTS = {"tokenizer_sha256": ("tokenizer-differs", "tokenizer", "token ids mean other text than in training"),
          "chat_template_sha256": ("template-differs", "chat template", "prompts are laid out otherwise than in "
                                   "training; acceptance falls at the start of answers")}
_QUIET = ("rope", "max_position_embeddings", "tie_word_embeddings", "model_type", "rms_norm_eps")


def check_training(case: Case) -> list[Finding]:
    """Against `contract.json`, or another tool's record; nothing where neither says anything."""
    if case.contract_fault:
        return [Finding("contract-unreadable", "error", FILE_NAME, case.contract_fault[:300], "eyas's contract",
                        "what the draft was trained on cannot be told", "Restore the file from the training run.")]
    result = _texts(case) + _draft(case)
    if case.contract is None:
        return result
    trained, found = case.contract.target, case.spec
    sizes = [f"{name} {getattr(found, name)}, not {getattr(trained, name)}" for name in _SIZES
             if getattr(found, name) != getattr(trained, name)]
    if sizes:
        return [*result, Finding("other-target", "error", "target", "; ".join(sizes), f"the target of {FILE_NAME}",
                                 "the draft was trained on the states of another target",
                                 "Serve it with its own target.")]
    fingerprints = (found.weights_fingerprint, trained.weights_fingerprint)
    if all(fingerprints) and fingerprints[0] != fingerprints[1]:
        result.append(Finding("target-weights", "warning", "target: weights", f"fingerprint {fingerprints[0][:12]}",
                              f"{fingerprints[1][:12]}, by {FILE_NAME}",
                              "the draft learned from other weights of this model (fine-tuned or quantised since): "
                              "acceptance falls", "Serve the weights of training, or measure acceptance and retrain."))
    rest = [f"{f.name} {getattr(found, f.name)}, not {getattr(trained, f.name)}" for f in dataclasses.fields(found)
            if f.name in _QUIET and getattr(found, f.name) != getattr(trained, f.name)]
    if rest:
        result.append(Finding("target-config", "warning", "target: config.json", "; ".join(rest),
                              f"the target of {FILE_NAME}", "the target computes other states than in training",
                              "Restore the target's config, or measure acceptance."))
    return result


def _draft(case: Case) -> list[Finding]:
    """The draft's config against the contract beside it: what shapes of weights do not tell, at least not all of it."""
    trained = case.contract.draft if case.contract else None
    config, loader = case.config, case.loader
    if trained is None or loader is None or value_faults(config) \
            or any(config.get(key) is None for key in ("hidden_size", "num_attention_heads")):
        return []
    pairs: dict[str, tuple[Any, Any]] = {
        "kind": (loader.kind, trained.kind),
        "num_hidden_layers": (num_layers(config, loader), trained.num_layers),
        **sizes_beside(config, trained),
        # What the config asks for: a version that reads no such key is told of by `norm-ignored`.
        "norm_output": (bool(config.get("norm_output")), trained.norm_output),
        "fc_norm": (bool(config.get("fc_norm") or config.get("use_aux_norm")), trained.fc_norm)}
    wrong = [name for name, (found, wanted) in pairs.items() if found != wanted]
    if not wrong:
        return []
    return [Finding("config-not-as-trained", "error", "config.json",
                    "; ".join(f"{name} {pairs[name][0]}" for name in wrong),
                    f"{'; '.join(f'{name} {pairs[name][1]}' for name in wrong)}, by {FILE_NAME}",
                    "the draft computes another function than the one trained: acceptance falls without a message",
                    "Write these values into config.json, or restore the contract.json that belongs to these weights.")]


def _texts(case: Case) -> list[Finding]:
    result = []
    for name, (code, label, consequence) in _TEXTS.items():
        trained = getattr(case.contract.target, name) if case.contract else getattr(case.record, name)
        found = getattr(case.spec, name)
        source = FILE_NAME if case.contract else case.record.source
        if trained and found and trained != found:
            result.append(Finding(code, "error" if name.startswith("tok") else "warning", f"target: {label}",
                                  f"sha256 {found[:12]}", f"{trained[:12]}, by {source}", consequence,
                                  f"Serve with the {label} of training, or regenerate the data and retrain."))
    return result
