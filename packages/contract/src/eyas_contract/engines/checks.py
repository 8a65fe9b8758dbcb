"""Checks a draft folder against a target folder for an engine, from configs and safetensors headers alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eyas_contract.contract import FILE_NAME, Contract, compare
from eyas_contract.draft import DraftSpec, llama_tensors
from eyas_contract.engines import sglang
from eyas_contract.engines.findings import Finding, most_severe_first
from eyas_contract.errors import InvalidInput
from eyas_contract.safetensors_header import TensorInfo, read_checkpoint, read_values
from eyas_contract.target import Rope, TargetSpec, read_config, text_config

_SILENT = "SGLang says nothing, answers requests, and accepts no draft token (acceptance length 1.00)"


def check(draft: str | Path, target: str | Path, engine: str = "sglang", version: str = "0.5.20",
          algorithm: str = "EAGLE3") -> list[Finding]:
    """Everything that would go wrong when `engine` serves `draft` for `target`, most severe first.

    Args:
        draft, target: Hugging Face folders.
        engine: `sglang`.
        version: the engine's version.
        algorithm: value of `--speculative-algorithm`.

    Raises:
        InvalidInput, CorruptFile: a folder that cannot be read at all.
    """
    if engine != "sglang":
        raise InvalidInput("engine", repr(engine), "sglang, by eyas-contract", "Name a supported engine.")
    parsed = sglang.parse_version(version)
    draft, target = Path(draft), Path(target)
    config, target_config = read_config(draft), text_config(read_config(target))
    spec = TargetSpec.from_folder(target)
    tensors = read_checkpoint(draft)
    findings = _check_algorithm(config, algorithm)
    findings += _check_layers(config, spec, draft, parsed)
    findings += _check_tensors(config, target_config, tensors, parsed)
    findings += _check_vocab(config, spec, tensors)
    findings += _check_contract(draft, spec)
    return most_severe_first(findings)


def _check_algorithm(config: dict[str, Any], algorithm: str) -> list[Finding]:
    result = []
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in sglang.DRAFT_CLASSES.values():
        result.append(Finding("draft-architecture", "error", "config.json: architectures", str(architecture),
                              f"one of {sorted(sglang.DRAFT_CLASSES.values())}",
                              "the file is opened with another model class and its weights do not fit",
                              "Write the EAGLE-3 class into `architectures`."))
    if algorithm != "EAGLE3":
        result.append(Finding("algorithm", "error", "--speculative-algorithm", algorithm,
                              "EAGLE3 for this architecture",
                              "the server hands the draft one state instead of several, skips `fc` where the widths "
                              "happen to match, ignores d2t and substitutes the target's head; " + _SILENT,
                              "Launch with --speculative-algorithm EAGLE3."))
    return result


def _check_layers(config: dict[str, Any], spec: TargetSpec, draft: Path, version: sglang.Version) -> list[Finding]:
    eagle = config.get("eagle_config")
    eagle = eagle if isinstance(eagle, dict) else {}
    where, result = "config.json: eagle_config", []
    if eagle.get("use_aux_hidden_state", True) is not True:
        result.append(Finding("aux-disabled", "error", f"{where}.use_aux_hidden_state",
                              str(eagle["use_aux_hidden_state"]), "true for an EAGLE-3 draft",
                              "the server hands over one state and the draft skips `fc`; " + _SILENT,
                              "Set use_aux_hidden_state to true."))
    written = eagle.get("eagle_aux_hidden_state_layer_ids")
    if written is not None and not (isinstance(written, list) and all(type(i) is int for i in written)):
        return [*result, Finding("aux-layer-ids", "error", f"{where}.eagle_aux_hidden_state_layer_ids", str(written),
                                 "a list of layer numbers", "the server cannot start", "Write the layer numbers.")]
    captured = sglang.layer_ids_from_engine(tuple(written) if written is not None else None, spec.architecture,
                                            spec.num_layers, version)
    if (draft / FILE_NAME).is_file():
        trained = Contract.load(draft).capture.aux_layer_ids
        if captured != trained:
            result.append(Finding("aux-layer-ids", "error", f"{where}.eagle_aux_hidden_state_layer_ids",
                                  f"{written}, read here as outputs of layers {list(captured)}",
                                  f"outputs of layers {list(trained)}, by {FILE_NAME}",
                                  "the draft is fed the states of other layers; acceptance falls without a message",
                                  "Export again for this engine version and target class."))
    bad = [i for i in captured if not 0 <= i < spec.num_layers]
    if bad or list(captured) != sorted(set(captured)):
        result.append(Finding("aux-layer-range", "error", f"{where}.eagle_aux_hidden_state_layer_ids",
                              f"{written}, read here as outputs of layers {list(captured)}",
                              f"ascending, distinct layers of 0..{spec.num_layers - 1}",
                              "layers are captured in order and fewer states come back than `fc` wants",
                              "Correct the ids."))
    return result


def draft_spec_from_config(config: dict[str, Any], target: dict[str, Any]) -> DraftSpec:
    """The DraftSpec that SGLang derives from a draft's config (defaults as in its class)."""
    eagle = config.get("eagle_config") if isinstance(config.get("eagle_config"), dict) else {}
    assert isinstance(eagle, dict)
    ids = eagle.get("eagle_aux_hidden_state_layer_ids") or (0, 0, 0)
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    vocab = int(config.get("vocab_size", target["vocab_size"]))
    wide = config.get("target_hidden_size", hidden) != hidden
    return DraftSpec(
        kind="llama", num_layers=int(config.get("num_hidden_layers", 1)), hidden_size=hidden,
        intermediate_size=int(config["intermediate_size"]), num_heads=heads,
        num_kv_heads=int(config.get("num_key_value_heads") or heads),
        head_dim=int(config.get("head_dim") or hidden // heads),
        target_hidden_size=int(config.get("target_hidden_size", hidden)),
        num_aux=int(config.get("num_aux_hidden_states") or len(ids)),
        draft_vocab_size=int(config.get("draft_vocab_size") or vocab), target_vocab_size=vocab,
        max_position_embeddings=int(config.get("max_position_embeddings", 2048)), rope=Rope.from_config(config),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)), hidden_act=str(config.get("hidden_act", "silu")),
        fc_norm=bool(config.get("fc_norm") or config.get("use_aux_norm")),
        norm_output=bool(config.get("norm_output", False)), own_embedding=bool(wide),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "bfloat16"))


def loaded_name(name: str, version: sglang.Version) -> str | None:
    """The trainer name a checkpoint tensor is loaded as, or None where SGLang drops it (Llama class)."""
    name = name.removeprefix("model.")
    if name.startswith("layers.0.") and version < (0, 5, 12):
        return None
    return sglang.import_name(name)


def _check_tensors(config: dict[str, Any], target: dict[str, Any], tensors: dict[str, TensorInfo],
                   version: sglang.Version) -> list[Finding]:
    missing_keys = [k for k in ("hidden_size", "num_attention_heads", "intermediate_size") if k not in config]
    if missing_keys:
        return [Finding("config-keys", "error", "config.json", f"no {', '.join(missing_keys)}", "the draft's sizes",
                        "the server takes its class's defaults and the weights do not fit", "Write the sizes.")]
    wanted = llama_tensors(draft_spec_from_config(config, target))
    head_from_target = "draft_vocab_size" in config and config["draft_vocab_size"] is None
    found: dict[str, tuple[str, TensorInfo]] = {}
    dropped = []
    for name, info in tensors.items():
        loaded = loaded_name(name, version)
        if loaded in ("d2t", "t2d"):
            continue
        if loaded is None or (loaded not in wanted and loaded != "embed_tokens.weight"):
            dropped.append(name)
        else:
            found[loaded] = (name, info)
    missing = sorted(set(wanted) - set(found) - ({"lm_head.weight"} if head_from_target else set()))
    result = []
    if dropped:
        result.append(Finding("tensor-dropped", "error", "model.safetensors", ", ".join(sorted(dropped)),
                              f"names that SGLang {'.'.join(map(str, version))} accepts: midlayer.*, fc, norm, lm_head",
                              "the server drops them without a word and serves random weights; " + _SILENT,
                              "Rename them: the decoder layer is `midlayer.*`."))
    if missing:
        spelled = ", ".join(sglang.export_name(name) for name in missing)
        result.append(Finding("tensor-missing", "error", "model.safetensors", f"no {spelled}",
                              "every weight of the draft class", "they keep their uninitialised values; " + _SILENT,
                              "Export them. For a head shared with the target set draft_vocab_size to null."))
    wrong = [f"{name} {list(info.shape)}, not {list(wanted[loaded])}" for loaded, (name, info) in found.items()
             if loaded in wanted and info.shape != wanted[loaded]]
    if wrong:
        result.append(Finding("tensor-shape", "error", "model.safetensors", "; ".join(wrong),
                              "the shapes that config.json describes", "the server fails while loading",
                              "Correct config.json or export again."))
    return result


def _check_vocab(config: dict[str, Any], spec: TargetSpec, tensors: dict[str, TensorInfo]) -> list[Finding]:
    size = config.get("draft_vocab_size")
    if size is None or (size == spec.vocab_size and "d2t" not in tensors):
        return []
    if "d2t" not in tensors:
        return [Finding("d2t-missing", "error", "model.safetensors: d2t", "absent",
                        f"offsets for a draft vocabulary of {size} in {spec.vocab_size}",
                        "draft ids are taken for target ids; nearly every proposal is a wrong token, without a message",
                        "Write d2t (int64 offsets, target = draft + d2t[draft]) into the checkpoint.")]
    info = tensors["d2t"]
    if info.dtype not in ("I64", "I32") or info.shape != (size,):
        return [Finding("d2t-shape", "error", "model.safetensors: d2t", f"{info.dtype} {list(info.shape)}",
                        f"I64 [{size}]", "the server fails or maps ids wrongly", "Write d2t again.")]
    values = read_values(info)
    mapped = [i + offset for i, offset in enumerate(values)]
    if mapped == sorted(set(mapped)) and mapped[0] >= 0 and mapped[-1] < spec.vocab_size:
        return _check_t2d(mapped, spec, tensors)
    absolute = values == sorted(set(values)) and values[0] >= 0 and values[-1] < spec.vocab_size
    outside = sum(not 0 <= m < spec.vocab_size for m in mapped)
    found = f"{outside} of {size} targets outside 0..{spec.vocab_size - 1}, {size - len(set(mapped))} duplicates"
    return [Finding("d2t-absolute" if absolute else "d2t-values", "error", "model.safetensors: d2t",
                    found + ("; the values themselves are ascending target ids" if absolute else ""),
                    "offsets: target id = draft id + d2t[draft id]",
                    "proposals are mapped to wrong tokens or out of the vocabulary",
                    "Subtract 0, 1, 2, ... from d2t." if absolute else "Rebuild d2t from the training vocabulary.")]


def _check_t2d(mapped: list[int], spec: TargetSpec, tensors: dict[str, TensorInfo]) -> list[Finding]:
    info = tensors.get("t2d")
    if info is None or info.dtype not in ("BOOL", "U8"):
        return []
    marked = [i for i, value in enumerate(read_values(info)) if value]
    if marked == mapped:
        return []
    agree = len(set(marked) & set(mapped))
    return [Finding("t2d-disagrees", "error", "model.safetensors: t2d",
                    f"{len(marked)} tokens marked, {agree} of the {len(mapped)} in d2t among them",
                    f"exactly the tokens of d2t, in {spec.vocab_size}",
                    "SGLang reads d2t alone: one of the two is not what was trained",
                    "Rebuild both from the training vocabulary.")]


def _check_contract(draft: Path, spec: TargetSpec) -> list[Finding]:
    if not (draft / FILE_NAME).is_file():
        return []
    contract = Contract.load(draft)
    found = Contract(spec, contract.capture, contract.vocab) if spec.hidden_size == contract.target.hidden_size \
        and spec.vocab_size == contract.target.vocab_size and spec.num_layers == contract.target.num_layers else None
    if found is None:
        differing = [f"{name} {getattr(spec, name)}, not {getattr(contract.target, name)}"
                     for name in ("num_layers", "hidden_size", "vocab_size")
                     if getattr(spec, name) != getattr(contract.target, name)]
    else:
        differing = [f"{m.field} {m.found}, not {m.wanted}" for m in
                     compare(found, contract, "target", "contract", ("target",))]
    if not differing:
        return []
    return [Finding("other-target", "error", "target", "; ".join(differing), f"the target of {FILE_NAME}",
                    "the draft was trained on the states of another target", "Serve it with its own target.")]
