"""The aux layer ids: what they will mean to this engine, version and target class, and whether that was trained."""

from __future__ import annotations

import re
from typing import Any

from eyas_contract.contract import FILE_NAME
from eyas_contract.engines import sglang, sglang_targets, vllm
from eyas_contract.engines.checks.case import Case
from eyas_contract.engines.findings import Finding
from eyas_contract.engines.loaders import eagle_config

_KEY = "eagle_aux_hidden_state_layer_ids"
_LIKE_IDS = re.compile(r"(aux|capture|eagle|target).*layer|^layer_ids$")
_SILENT = "the draft is fed the states of other layers; acceptance falls without a message"


def check_aux_layers(case: Case) -> list[Finding]:
    """Hook of the target class, form, reading, range and meaning of the ids."""
    result = _hook(case) + _disabled(case)
    ill = [f"{name} {value!r}" for name, value in _written(case.config).items() if not _is_ids(value)]
    if ill:
        return [*result, Finding("aux-layer-ids", "error", "config.json", "; ".join(ill)[:200],
                                 "a list of layer numbers", "the server cannot start, or takes its default layers",
                                 "Write the layer numbers.")]
    readings = readings_of(case)
    trained, source = _trained(case)
    bad = {where: ids for where, ids in readings.items() if _range_faults(case, ids)}
    for where, ids in bad.items():
        result.append(Finding(
            "aux-layer-range", "error", where, f"{_shown(case)}, read as outputs of layers {list(ids)}",
            f"ascending, distinct layers of 0..{_last(case)} of {case.spec.num_layers}",
            "layers are captured in layer order and each once: fewer states, or states in another order, than `fc` "
            "was trained on", "Correct the ids."))
    for where, ids in readings.items():
        if trained is not None and ids != trained:
            result.append(Finding(
                "aux-layer-ids", "error", where, f"{_shown(case)}, read as outputs of layers {list(ids)}",
                f"outputs of layers {list(trained)}, by {source}", _SILENT, _remedy(case, trained)))
    if trained is None and not bad:
        result += _unread(case, readings) or _convention(case, readings)
    return result + _count(case, readings)


def _count(case: Case, readings: dict[str, tuple[int, ...]]) -> list[Finding]:
    """As many layers captured as `fc` is built for; what the file's `fc` was made for is told from its width."""
    if case.engine != "sglang" or case.loader is None or case.version < (0, 5, 12):
        return []
    built = case.loader.num_aux(case.config)
    return [Finding("aux-layer-count", "error", where, f"{len(ids)} layers captured: {_shown(case)}",
                    f"{built}, which config.json makes {case.server} build `fc` for",
                    "the states do not fit `fc`: the server fails at the first prompt",
                    "Write as many layer ids as num_aux_hidden_states.")
            for where, ids in readings.items() if len(ids) != built]


def _written(config: dict[str, Any]) -> dict[str, Any]:
    both = {f"eagle_config.{_KEY}": eagle_config(config).get(_KEY), _KEY: config.get(_KEY)}
    return {name: value for name, value in both.items() if value is not None}


def _is_ids(value: Any) -> bool:
    return isinstance(value, list) and 0 < len(value) <= 64 and all(type(i) is int for i in value)


def _shown(case: Case) -> str:
    written = _written(case.config)
    return ", ".join(f"{name} {value}" for name, value in written.items()) or "no ids written"


def readings_of(case: Case) -> dict[str, tuple[int, ...]]:
    """Where the ids are read -> the layers (0-based) whose outputs will be captured."""
    if case.engine == "vllm":
        both = vllm.layer_ids_from_config(case.config, case.spec.num_layers)
        first, second = both.values()
        return {"config.json": first} if first == second else {f"config.json, as {name} reads it": ids
                                                               for name, ids in both.items()}
    ids = eagle_config(case.config).get(_KEY)
    captured = sglang.layer_ids_from_engine(tuple(ids) if ids is not None else None, case.spec.architecture,
                                            case.spec.num_layers, case.version)
    return {f"config.json: eagle_config.{_KEY}": captured}


def _last(case: Case) -> int:
    if case.engine == "vllm":
        return case.spec.num_layers - 1
    return sglang_targets.captures(case.spec.architecture, case.spec.num_layers, case.version)


def _range_faults(case: Case, ids: tuple[int, ...]) -> bool:
    return list(ids) != sorted(set(ids)) or not all(0 <= i <= _last(case) for i in ids)


def _trained(case: Case) -> tuple[tuple[int, ...] | None, str]:
    if case.contract is not None:
        return case.contract.capture.aux_layer_ids, FILE_NAME
    return case.record.aux_layer_ids, case.record.source


def _remedy(case: Case, trained: tuple[int, ...]) -> str:
    if case.engine == "vllm":
        return f"Write {[i + 1 for i in trained]} into the top-level {_KEY} (boundaries)."
    try:
        ids = sglang.layer_ids_to_engine(trained, case.spec.architecture, case.version)
    except ValueError as error:
        return str(error)
    return f"Write {list(ids)} into eagle_config.{_KEY} for {case.server} and {case.spec.architecture}."


def _convention(case: Case, readings: dict[str, tuple[int, ...]]) -> list[Finding]:
    """No record says what was trained: say which meaning is assumed, warn where the spelling says otherwise."""
    n, result = case.spec.num_layers, []
    boundaries = [2, n // 2, n - 3]
    for where, ids in readings.items():
        written = _read_first(case)
        raw_is_boundary = written == boundaries and n >= 6
        raw_is_output = written == [i - 1 for i in boundaries] and n >= 6
        as_output = written is not None and list(ids) == written
        if (raw_is_boundary and as_output) or (raw_is_output and written is not None and not as_output):
            meant = [i - 1 for i in boundaries]
            result.append(Finding(
                "aux-layer-convention", "warning", where,
                f"{_shown(case)}: the usual layers, {'states before layers' if raw_is_boundary else 'outputs of'} "
                f"{written}, so outputs of {meant}; {case.server} with {case.spec.architecture} reads outputs of "
                f"{list(ids)}", f"ids that are read as outputs of {meant}, if those were trained on",
                "all three states are off by one layer: acceptance falls a little, without a message",
                _remedy(case, tuple(meant))))
        elif written is None and (case.engine == "sglang" or len(readings) == 1):
            result.append(Finding("aux-layer-reading", "note", where, "no ids written",
                                  "the default layers, if the draft was trained on them",
                                  f"{case.server} captures the outputs of layers {list(ids)} (0-based)",
                                  "Write the ids, so that no default decides."))
        else:
            how = "ids as outputs of layers" if as_output else "ids as states before layers"
            result.append(Finding("aux-layer-reading", "note", where, _shown(case),
                                  "the layers that the draft was trained on (no record of them was found)",
                                  f"{case.server} with {case.spec.architecture} takes the {how}: the states after "
                                  f"layers {', '.join(map(str, ids))} (0-based), which are the boundaries "
                                  f"{[i + 1 for i in ids]}", "Nothing, if those were trained on."))
    return result


def _unread(case: Case, readings: dict[str, tuple[int, ...]]) -> list[Finding]:
    """Layers named where this engine does not read them, and does not happen to capture them."""
    top = case.config.get(_KEY)
    if case.engine != "sglang":
        return []
    if not top:
        return [] if _read_first(case) else _elsewhere(case, readings)
    meant = tuple(i - 1 for i in top)
    return [Finding("aux-layer-ids", "error", where,
                    f"{_shown(case)}: SGLang does not read the one on top, and captures the outputs of {list(ids)}",
                    f"outputs of layers {list(meant)}, which the top-level key names as boundaries (vLLM's convention)",
                    _SILENT, _remedy(case, meant)) for where, ids in readings.items() if ids != meant]


def _elsewhere(case: Case, readings: dict[str, tuple[int, ...]]) -> list[Finding]:
    """No ids where the engine looks, but a list of layers under another name: another tool's, or misspelt."""
    named = {prefix + key: value for part, prefix in ((case.config, ""), (eagle_config(case.config), "eagle_config."))
             for key, value in part.items()
             if _LIKE_IDS.search(key) and _is_ids(value) and len(value) > 1}
    return [Finding("aux-layer-convention", "warning", f"config.json: {name}",
                    f"{value}, which {case.server} does not read: it takes its default, outputs of {list(ids)}",
                    f"the layers in {where.removeprefix('config.json: ')}, in {case.server}'s numbers", _SILENT,
                    "Write them there if the draft was trained on them; remove the key if not.")
            for name, value in named.items() for where, ids in readings.items()
            if list(ids) not in (value, [i - 1 for i in value])]


def _read_first(case: Case) -> list[int] | None:
    """The ids as written in the place that this engine looks at first."""
    places = [eagle_config(case.config).get(_KEY)]
    if case.engine == "vllm":
        places.insert(0, case.config.get(_KEY))
    return next((ids for ids in places if ids), None)


def _disabled(case: Case) -> list[Finding]:
    eagle = eagle_config(case.config)
    if eagle.get("use_aux_hidden_state", True) is True:
        return []
    return [Finding("aux-disabled", "error", "config.json: eagle_config.use_aux_hidden_state",
                    str(eagle["use_aux_hidden_state"]), "true for an EAGLE-3 draft",
                    "the server hands over one state and the draft skips `fc`; it says nothing and accepts hardly a "
                    "draft token", "Set use_aux_hidden_state to true.")]


def _hook(case: Case) -> list[Finding]:
    name = case.spec.architecture
    if case.engine == "vllm":
        if name in vllm.TARGETS:
            return []
        return [Finding("target-class-unknown", "warning", "target: architectures", name,
                        "a class in eyas's table of vLLM 0.33 targets (SupportsEagle3)",
                        "whether vLLM can capture its states is not known here",
                        "Ask vLLM for aux states on one short input before trusting it.")]
    how = sglang_targets.rule(name, case.version)
    if how is None:
        return [Finding("target-class-unknown", "warning", "target: architectures", name,
                        f"a target class known in SGLang {sglang.version_text(sglang.OLDEST)} to "
                        f"{sglang.version_text(sglang.NEWEST)}", "whether and how it hands over aux states is not "
                        "known here; the ids are read as most classes do",
                        "Ask the server for the states of one short input, and count and measure them.")]
    since = sglang_targets.hook_since(name)
    advice = f"Use SGLang {sglang.version_text(since)} or later." if since else \
        "Serve this target without EAGLE-3, or with another engine."
    if how == sglang_targets.NO_HOOK:
        return [Finding("target-without-hook", "error", "target: architectures", name,
                        f"a class that hands over aux states in {case.server}",
                        "this class cannot serve an EAGLE-3 draft in this build: the server stops at start, or hands "
                        "over nothing", advice)]
    if how == sglang_targets.MARKS_NOTHING:
        return [Finding("hook-marks-nothing", "error", "target: architectures", name,
                        f"a class that marks its layers in {case.server}",
                        "the hook stores the layer list, but 0 states come back: the draft skips `fc`", advice)]
    return []
