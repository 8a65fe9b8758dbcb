"""Norm flags that an engine ignores, or reads as something else than the trainer meant."""

from __future__ import annotations

from eyas_contract.engines.checks.case import Case
from eyas_contract.engines.findings import Finding
from eyas_contract.engines.loaders import Loader, eagle_config
from eyas_contract.engines.wanted import norm_before_fc

_WRONG = "the draft computes another function than the one trained: acceptance falls without a message"


def check_norms(case: Case, loader: Loader) -> list[Finding]:
    """`norm_before_residual`, `norm_before_fc`, `fc_norm` / `use_aux_norm`, `norm_output`."""
    config, result = case.config, []
    if config.get("norm_before_residual") and not loader.norm_before_residual:
        result.append(Finding("norm-before-residual", "error", "config.json: norm_before_residual", "true",
                              f"false: {loader.name} always takes the un-normed state as residual", _WRONG,
                              "Serve it with vLLM, or train with norm_before_residual false."))
    asked = {"norm_before_fc": norm_before_fc(config), "fc_norm": bool(config.get("fc_norm")),
             "use_aux_norm": bool(config.get("use_aux_norm")) and not config.get("fc_norm"),
             "norm_output": bool(config.get("norm_output"))}
    honoured = {"norm_before_fc": loader.norm_before_fc, "fc_norm": loader.fc_norm,
                "use_aux_norm": loader.use_aux_norm, "norm_output": loader.norm_output}
    since = {"norm_before_fc": "0.5.17 (Llama drafts only)", "fc_norm": "0.5.12 (MLA: 0.5.13)",
             "use_aux_norm": "0.5.12 (MLA: 0.5.13)", "norm_output": "0.5.12 (MLA: 0.5.13)"}
    for key, wanted in asked.items():
        if wanted and not honoured[key]:
            remedy = f"Use SGLang {since[key]} or later." if loader.engine == "sglang" else \
                "Write it as fc_norm." if key == "use_aux_norm" else "Serve it with SGLang."
            result.append(Finding("norm-ignored", "error", f"config.json: {key}", "true",
                                  f"a key that {loader.name} reads", f"the norm is left out; {_WRONG}", remedy))
    result += _unflagged(case, loader)
    if config.get("num_hidden_layers") not in (None, 1) and loader.multi_layer:
        result.append(Finding(
            "multi-layer-norms", "warning", "config.json: num_hidden_layers", str(config["num_hidden_layers"]),
            "layers above 0 trained with the norm that this engine applies",
            "above layer 0 SGLang norms with hidden_norm, vLLM with input_layernorm; the other weight is not used",
            "Convert with eyas-draft convert, which carries the norm over by meaning."))
    return result


def _unflagged(case: Case, loader: Loader) -> list[Finding]:
    """Norm weights in the file whose config key is off: the engine leaves them out."""
    result = []
    names = {loader.place(name) or "" for name in case.tensors}
    flags = (("input_norm.weight", "norm_before_fc", norm_before_fc(case.config)),
             ("fc_norm.0.weight", "fc_norm", bool(case.config.get("fc_norm") or case.config.get("use_aux_norm"))))
    for tensor, key, on in flags:
        if tensor in names and not on:
            written = eagle_config(case.config).get(key, case.config.get(key))
            result.append(Finding("norm-flag-missing", "error", f"config.json: {key}", str(written),
                                  f"true: the file has {tensor}", f"the norm is left out; {_WRONG}",
                                  f"Set {key} to true, if training used it."))
    return result
