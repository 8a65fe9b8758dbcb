"""A draft's config and names in a neutral form, read from and written to each tool's dialect, by meaning.

Dialects: `sglang` and `specforge` (flat config, `midlayer.*`, layer ids in `eagle_config`), `vllm` (flat,
`layers.N.*`, boundary ids on top), `hf` (speculators: nested `transformer_layer_config`, `layers.N.*`, boundary ids),
and `sglang,vllm` (one flat folder that both read right). Sources: `engines.loaders`, `engines.vllm`; speculators'
`Eagle3SpeculatorConfig`; SpecForge's `export/to_sglang.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any, Literal

from eyas_contract.engines import sglang, vllm
from eyas_contract.engines.loaders import eagle_config
from eyas_contract.errors import InvalidInput
from eyas_contract.target import Rope

Goal = Literal["sglang", "vllm", "specforge", "hf", "sglang,vllm"]
GOALS: tuple[Goal, ...] = ("sglang", "vllm", "specforge", "hf", "sglang,vllm")
_KEY = "eagle_aux_hidden_state_layer_ids"
_NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
_OWN = (*_NORMS, "use_aux_norm", "architectures", "draft_vocab_size", "target_hidden_size", "num_aux_hidden_states",
        "eagle_config", _KEY, "rope_parameters", "rope_theta", "rope_scaling")
_SPECULATORS = ("speculators_config", "speculators_model_type", "speculators_version", "transformer_layer_config")


@dataclass(frozen=True)
class Neutral:
    """What a draft is, whoever wrote it.

    Attributes:
        base: flat Llama or MLA config keys that every dialect shares.
        kind: `llama` or `mla`.
        aux_layer_ids: outputs of layers (0-based); None where the config leaves the choice to the engine's default.
        draft_vocab_size: rows of the head; None where the target's head is shared.
        target_hidden_size: None where equal to the draft's.
        rope: as served.
        norms: the norm flags that are on.
        eagle_rest: further keys of `eagle_config`.
        speculators: further keys of speculators' config (verifier, algorithm), kept for the way back.
    """

    base: dict[str, Any]
    kind: Literal["llama", "mla"]
    aux_layer_ids: tuple[int, ...] | None
    draft_vocab_size: int | None
    target_hidden_size: int | None
    rope: Rope
    norms: tuple[str, ...]
    eagle_rest: dict[str, Any]
    speculators: dict[str, Any]


def parse(config: dict[str, Any], aux_layer_ids: tuple[int, ...] | None) -> Neutral:
    """Read any dialect's config.

    Args:
        config: as written.
        aux_layer_ids: its layers by meaning, which the config alone does not tell (`meaning_of_ids` finds it).
    """
    nested = vllm.is_speculators(config)
    flat = vllm.flatten_speculators(config) if nested else config
    names = flat.get("architectures") or ["none"]
    kind = sglang.DRAFT_CLASSES["mla"] == names[0] or vllm.DRAFT_CLASSES.get(names[0]) == "mla"
    eagle = eagle_config(flat)
    on = tuple(name for name in _NORMS if flat.get(name) or eagle.get(name) or
               (name == "fc_norm" and flat.get("use_aux_norm")))
    rest = {k: v for k, v in eagle.items() if k not in (_KEY, "use_aux_hidden_state", *_NORMS)}
    extra = {k: v for k, v in config.items() if nested and k not in (*_OWN, "transformer_layer_config")}
    base = {k: v for k, v in flat.items() if k not in _OWN and k not in _SPECULATORS}
    return Neutral(base, "mla" if kind else "llama", aux_layer_ids, flat.get("draft_vocab_size"),
                   flat.get("target_hidden_size"), Rope.from_config(flat), on, rest, extra)


def refusals(neutral: Neutral, goal: Goal) -> list[str]:
    """What the goal cannot express; empty where it can express everything."""
    result = []
    layers = int(neutral.base.get("num_hidden_layers") or 1)
    parts = goal.split(",")
    if "norm_before_residual" in neutral.norms and {"sglang", "specforge"} & set(parts):
        result.append("norm_before_residual true: SGLang and SpecForge always take the un-normed state as residual")
    if neutral.kind == "mla" and "hf" in parts:
        result.append("an MLA draft: speculators has none")
    if neutral.kind == "mla" and "specforge" in parts:
        result.append("an MLA draft: SpecForge has none")
    if neutral.kind == "mla" and "norm_before_fc" in neutral.norms:
        result.append("norm_before_fc in an MLA draft: neither engine's MLA class reads it")
    if "specforge" in parts and "norm_output" in neutral.norms:
        result.append("norm_output true: SpecForge means the norm before its head by it, not the state handed on")
    if "specforge" in parts and (layers > 1 or "norm_before_fc" in neutral.norms):
        result.append("more than one layer, or norm_before_fc: SpecForge builds neither")
    if neutral.kind == "mla" and layers > 1 and "sglang" in parts:
        result.append("an MLA draft of several layers: SGLang builds one")
    if layers > 1 and goal == "sglang,vllm":
        result.append("several layers in one folder for both: above layer 0 they apply different norm weights")
    if neutral.aux_layer_ids is None and goal in ("vllm", "hf", "sglang,vllm", "specforge"):
        result.append("no layer ids: name the trained layers with --aux-layer-ids")
    return result


def emit(neutral: Neutral, goal: Goal, architecture: str, version: sglang.Version) -> dict[str, Any]:
    """The config in the goal's dialect.

    Args:
        neutral: without `refusals` for this goal.
        goal: the dialect.
        architecture, version: target class and SGLang version, which decide how SGLang's ids are spelled.
    """
    boundaries = [i + 1 for i in neutral.aux_layer_ids] if neutral.aux_layer_ids else None
    if goal == "hf":
        return _speculators(neutral, boundaries)
    config = dict(neutral.base)
    config["architectures"] = [sglang.DRAFT_CLASSES[neutral.kind]]
    config["draft_vocab_size"] = neutral.draft_vocab_size
    if goal == "vllm" and neutral.draft_vocab_size is None:
        config["draft_vocab_size"] = neutral.base.get("vocab_size")
    if neutral.target_hidden_size is not None:
        config["target_hidden_size"] = neutral.target_hidden_size
    config |= {name: name in neutral.norms for name in ("fc_norm", "norm_output")} | _rope(neutral.rope)
    config |= dict.fromkeys(neutral.norms, True)
    eagle = dict(neutral.eagle_rest) | {"use_aux_hidden_state": True}
    if neutral.aux_layer_ids:
        config["num_aux_hidden_states"] = len(neutral.aux_layer_ids)
        if goal != "vllm":
            meant = neutral.aux_layer_ids
            eagle[_KEY] = list(meant if goal == "specforge" else
                               sglang.layer_ids_to_engine(meant, architecture, version))
        if goal in ("vllm", "sglang,vllm"):
            config[_KEY] = boundaries
    config["eagle_config"] = eagle
    return config


def _rope(rope: Rope) -> dict[str, Any]:
    parameters = rope.to_config()
    scaling = None if rope.type == "default" else {k: v for k, v in parameters.items() if k != "rope_theta"}
    return {"rope_parameters": parameters, "rope_theta": rope.theta, "rope_scaling": scaling}


def _speculators(neutral: Neutral, boundaries: list[int] | None) -> dict[str, Any]:
    layer = dict(neutral.base) | _rope(neutral.rope)
    config: dict[str, Any] = {
        "architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
        "speculators_config": {"algorithm": "eagle3"}, **neutral.speculators,
        "draft_vocab_size": neutral.draft_vocab_size or neutral.base.get("vocab_size"),
        "transformer_layer_config": layer, _KEY: boundaries, **{name: name in neutral.norms for name in _NORMS}}
    if neutral.target_hidden_size is not None:
        config["target_hidden_size"] = neutral.target_hidden_size
    if neutral.eagle_rest:
        config["eagle_config"] = neutral.eagle_rest
    return config


def meaning_of_ids(config: dict[str, Any], assumed: str) -> tuple[tuple[int, ...] | None, str]:
    """The layers a config means, as outputs (0-based), and why they are read so.

    Args:
        config: any dialect.
        assumed: `output` or `boundary` for the ids in `eagle_config`; `auto` decides by the field's habit (first id
            1: outputs; first id 2: boundaries).

    Raises:
        InvalidInput: the two spellings disagree, or the habit does not decide.
    """
    top, nested = config.get(_KEY), eagle_config(config).get(_KEY)
    lists = [value for value in (top, nested) if value is not None]
    if any(not isinstance(v, list) or not v or not all(type(i) is int for i in v) for v in lists):
        raise InvalidInput(f"config.json: {_KEY}", f"{top!r}, {nested!r}"[:200], "lists of layer numbers",
                           "Correct the config.")
    from_top = tuple(i - 1 for i in top) if top else None
    readings = {"output": tuple(nested), "boundary": tuple(i - 1 for i in nested)} if nested else {}
    if from_top is not None:
        if readings and from_top not in readings.values():
            raise InvalidInput(f"config.json: {_KEY}", f"on top {top}, in eagle_config {nested}",
                               "the same layers in both (on top: boundaries)", "Correct the one that is wrong.")
        return from_top, f"top-level {_KEY} {top} are boundaries"
    if not readings or nested is None:
        return None, "no ids written"
    how = assumed if assumed != "auto" else {1: "output", 2: "boundary"}.get(nested[0], "")
    if not how:
        raise InvalidInput(f"config.json: eagle_config.{_KEY}", str(nested),
                           "ids that begin with 1 (outputs) or 2 (boundaries), where nothing else says what they mean",
                           "Say it with --ids-mean output or --ids-mean boundary.")
    why = "by --ids-mean" if assumed != "auto" else f"since the first is {nested[0]}"
    return readings[how], f"eagle_config ids {nested} are {how} ids, {why}"


def neutral_name(name: str, read_as: str, layers: int) -> str | None:
    """A stored tensor's name in trainer's spelling; None for a name that no dialect has.

    Args:
        name: as stored.
        read_as: `sglang` or `vllm`: whose norm above layer 0 the names mean.
        layers: number of draft layers.
    """
    plain = name.removeprefix("model.")
    for old, new in (("midlayer.", "layers.0."), ("aux_norm_low.", "fc_norm.0."), ("aux_norm_mid.", "fc_norm.1."),
                     ("aux_norm_high.", "fc_norm.2.")):
        plain = plain.replace(old, new)
    known = (r"(fc\.(weight|bias)|(input_norm|norm|lm_head|embed_tokens)\.weight|fc_norm\.\d+\.weight|d2t|t2d|"
             r"layers\.\d+\.(self_attn\.\w+|mlp\.(gate|up|down)_proj|\w*norm)\.(weight|bias))$")
    if not re.match(known, plain):
        return None
    return _swap_upper_norms(plain) if read_as == "vllm" and layers > 1 else plain


def goal_name(name: str, goal: Goal) -> str:
    """Trainer's spelling -> the goal's."""
    if goal in ("vllm", "hf"):
        return _swap_upper_norms(name)
    return sglang.export_name(name)


def _swap_upper_norms(name: str) -> str:
    """Above layer 0 SGLang norms its input with hidden_norm, vLLM with input_layernorm: the same weight by meaning."""
    match = re.match(r"(layers\.[1-9]\d*\.)(input_layernorm|hidden_norm)(\.weight)$", name)
    if not match:
        return name
    return match[1] + ("hidden_norm" if match[2] == "input_layernorm" else "input_layernorm") + match[3]


def with_head(neutral: Neutral, rows: int | None) -> Neutral:
    """The same draft, its head described as the weights have it.

    Args:
        neutral: as the config says.
        rows: of `lm_head.weight`; None where the file has none: a draft of the full vocabulary then shares the
            target's head.
    """
    if rows is not None:
        return replace(neutral, draft_vocab_size=rows, base=neutral.base | {"tie_word_embeddings": False})
    full = neutral.draft_vocab_size in (None, neutral.base.get("vocab_size"))
    return replace(neutral, draft_vocab_size=None) if full else neutral
