"""Parameters that a quantised draft has beside, or in place of, its weights.

Read in SGLang 0.5.20 `srt/layers/quantization/`: what each method's linear layer registers. SGLang's Llama draft hands
its method to the projections alone (`fc` is a plain torch layer) and loads these parameters by name like any other.
"""

from __future__ import annotations

from typing import Any

from eyas_contract.engines.loaders import FUSED, Loader

_GPTQ, _AWQ = frozenset({"qweight", "qzeros", "scales", "g_idx"}), frozenset({"qweight", "qzeros", "scales"})
_MODELOPT = frozenset({"weight_scale", "weight_scale_2", "input_scale"})
REGISTERED: dict[str, frozenset[str]] = {
    "fp8": frozenset({"weight_scale", "weight_scale_inv", "input_scale"}),
    "w8a8_fp8": frozenset({"weight_scale"}), "w8a8_int8": frozenset({"weight_scale"}),
    "gptq": _GPTQ, "gptq_marlin": _GPTQ, "awq": _AWQ, "awq_marlin": _AWQ,
    "modelopt": _MODELOPT, "modelopt_fp8": _MODELOPT, "modelopt_fp4": _MODELOPT,
    "compressed-tensors": frozenset({"weight_packed", "weight_scale", "weight_zero_point", "weight_shape",
                                     "weight_g_idx", "weight_global_scale", "input_scale", "input_global_scale",
                                     "input_zero_point"}),
}
PACKED = frozenset({"qweight", "weight_packed"})  # in place of `weight`
_ALL = frozenset().union(*REGISTERED.values(), {"k_scale", "v_scale", "pre_quant_scale"})


def method(config: dict[str, Any]) -> str:
    """The draft's own `quant_method`; empty where its config has none."""
    own = config.get("quantization_config")
    return str(own.get("quant_method") or "?") if isinstance(own, dict) and own else ""


def split(name: str, wanted: dict[str, Any]) -> tuple[list[str], str] | None:
    """The weights a quantisation parameter belongs to, and its last word; None for anything else.

    Args:
        name: a parameter in trainer's names.
        wanted: the class's parameters.
    """
    module, _, parameter = name.rpartition(".")
    if parameter not in _ALL:
        return None
    weight = f"{module}.weight"
    fused = next(([f"{weight.removesuffix(key)}{part}" for part in parts] for key, parts in FUSED.items()
                  if weight.endswith(f".{key}")), [weight])
    return (fused, parameter) if all(part in wanted for part in fused) else None


def certain(weight: str, parameter: str, config: dict[str, Any], loader: Loader) -> bool:
    """Whether this class is known to load the parameter of this weight."""
    return loader.engine == "sglang" and loader.kind == "llama" and weight.endswith("_proj.weight") \
        and parameter in REGISTERED.get(method(config), ())


def unquantised(weight: str, loader: Loader) -> bool:
    """Whether the class builds this layer in plain numbers whatever the config says."""
    return loader.engine == "sglang" and loader.kind == "llama" and (weight == "fc.weight" or "norm." in weight)
