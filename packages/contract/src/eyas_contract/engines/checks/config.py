"""Whether the draft's config can be understood at all, and which class opens it under which algorithm."""

from __future__ import annotations

from typing import Any

from eyas_contract.engines import sglang, vllm
from eyas_contract.engines.checks.case import Case
from eyas_contract.engines.checks.config_values import REQUIRED, SWITCHES, value_faults
from eyas_contract.engines.findings import Finding
from eyas_contract.engines.loaders import draft_kind
from eyas_contract.engines.wanted import MLA_KEYS

_SILENT = "the server says nothing, answers requests, and accepts hardly a draft token (acceptance length 1.00)"


def check_config(case: Case) -> list[Finding]:
    """Missing or impossible values; with an error here the other rooms have nothing to stand on."""
    config, result = case.config, []
    needed = ["model_type", *REQUIRED, *(MLA_KEYS if case.loader and case.loader.kind == "mla" else ())]
    if case.loader and (case.loader.multi_layer or case.loader.kind == "mla"):
        needed.append("num_hidden_layers")  # the config classes' own number is a whole model's: 32, 61
    missing = [key for key in needed if config.get(key) is None]
    if missing:
        result.append(Finding("config-keys", "error", "config.json", f"no {', '.join(missing)}",
                              "the draft's type and sizes",
                              "the server takes its class's defaults and the weights do not fit", "Write the sizes."))
    wrong = value_faults(config) + [f"{key} {config[key]!r}"[:80] for key in SWITCHES
                                    if isinstance(config.get(key), str | list | dict)]
    if wrong:
        result.append(Finding("config-value", "error", "config.json", "; ".join(wrong),
                              "positive whole numbers for sizes, positive numbers for theta and eps, objects, true or "
                              "false (a text counts as true)",
                              "the server cannot start, or builds another model", "Correct the values."))
    return result


def _has_fc(case: Case) -> bool:
    """Whether any tensor joins states, as in every EAGLE-3 draft: a whole model has none, perhaps the target itself."""
    return any("fc" in name.split(".") for name in case.tensors)


def check_class(case: Case) -> list[Finding]:
    """Architecture, algorithm, dialect and number of layers."""
    result = []
    architecture = architecture_of(case.config)
    known = vllm.DRAFT_CLASSES if case.engine == "vllm" else sglang.DRAFT_CLASSES.values()
    if draft_kind(case.engine, architecture) is None:
        result.append(Finding(
            "draft-architecture", "error", "config.json: architectures", architecture + _recognised(case),
            f"one of {sorted(known)}", "the file is opened with another model class: `fc` and `hidden_norm` are "
            "unknown to it, and its attention reads one hidden size where the draft's reads two",
            "Write the EAGLE-3 class into `architectures`; change no weight." if not case.tensors or _has_fc(case) else
            "Nothing here is called `fc`: give an EAGLE-3 draft, and the model that it drafts for as --target."))
    elif case.loader is None:
        result.append(Finding(
            "draft-architecture", "error", "config.json: architectures", architecture,
            f"a class that {case.server} has (Eagle3DeepseekV2ForCausalLM came with 0.5.12)",
            "the server cannot start", "Use SGLang 0.5.12 or later for an MLA draft."))
    algorithm = case.flags.speculative_algorithm or "EAGLE3"
    if case.engine == "sglang" and algorithm.upper() != "EAGLE3":
        result.append(Finding(
            "algorithm", "error", "--speculative-algorithm", algorithm, "EAGLE3 for this architecture",
            "the server hands the draft one state instead of several, skips `fc` where the widths happen to match, "
            "ignores d2t and substitutes the target's head; " + _SILENT, "Launch with --speculative-algorithm EAGLE3."))
    if case.engine == "sglang" and vllm.is_speculators(case.raw):
        result.append(Finding(
            "config-nested", "error", "config.json: transformer_layer_config, speculators_config",
            "speculators' nested config", "a flat config: SGLang reads nothing of the nested keys",
            "the server cannot open the folder, or builds a model of default sizes",
            "Convert it: eyas-draft convert DRAFT OUT --to sglang."))
    activation = case.config.get("hidden_act", "silu")
    if activation != "silu":
        result.append(Finding("config-value", "error", "config.json: hidden_act", str(activation)[:60],
                              f"silu, by {case.server}'s draft layers", "the server stops while it builds the layer",
                              "Write silu if the draft was trained with it; else train it again."))
    layers = case.config.get("num_hidden_layers")
    if case.loader and not case.loader.multi_layer and type(layers) is int and layers != 1:
        result.append(Finding("num-layers", "error", "config.json: num_hidden_layers", str(layers),
                              f"1, by {case.server}'s {architecture}", "the server refuses to start",
                              "Serve with SGLang 0.5.12 or later." if case.loader.kind == "llama"
                              else "Train an MLA draft of one layer."))
    if not case.tensors:
        result.append(_absent(case))
    return result


def _recognised(case: Case) -> str:
    """What makes these weights an EAGLE-3 draft's, whatever class the config names."""
    q = next((i for n, i in case.tensors.items() if n.endswith(("self_attn.q_proj.weight", "q_a_proj.weight"))), None)
    hidden = case.config.get("hidden_size")
    if "fc.weight" in case.tensors and any("hidden_norm" in name for name in case.tensors) and q is not None \
            and type(hidden) is int and q.shape[-1:] == (2 * hidden,):
        return f"; the weights are an EAGLE-3 draft's: fc, hidden_norm, attention input {q.shape[-1]} = 2 x {hidden}"
    return ""


def _absent(case: Case) -> Finding:
    if case.template:
        return Finding("weights-absent", "warning", str(case.draft.name), "a config and no weights",
                       "weights, once it is trained", "checked as a template before training, from its config alone",
                       "Train with it, then check the exported folder.")
    return Finding("weights-absent", "error", str(case.draft.name), "no *.safetensors file", "the draft's weights",
                   "there is nothing to serve", "Copy the weights into the folder, or export again.")


def architecture_of(config: dict[str, Any]) -> str:
    """The first entry of `architectures`, or `none`."""
    names = config.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else "none"
