"""`eyas-draft convert`: a draft from one tool's dialect to another's, by meaning, with every change listed."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from eyas_contract.checkpoint_files import read_checkpoint
from eyas_contract.contract import FILE_NAME, Contract, write_text_atomic
from eyas_contract.dialects import (
    Goal,
    Neutral,
    emit,
    goal_name,
    meaning_of_ids,
    neutral_name,
    parse,
    refusals,
    with_head,
)
from eyas_contract.engines import sglang, vllm
from eyas_contract.engines.checks.config_values import value_faults
from eyas_contract.engines.checks.vocab_map import target_ids_in
from eyas_contract.errors import InvalidInput
from eyas_contract.outputs import require_own
from eyas_contract.safetensors_copy import booleans, int64, write_tensors
from eyas_contract.safetensors_header import TensorInfo, read_header, read_values
from eyas_contract.target import read_config
from eyas_contract.vocab import VocabMap

_CARRIED = (FILE_NAME, "golden.json", "golden.values", "train_meta.json", "README.md", "LICENSE",
            "generation_config.json")
_OFFSETS = ("I64", "I32")
_MARKS = ("BOOL", "U8", *_OFFSETS)
Entry = TensorInfo | tuple[TensorInfo, bytes]


@dataclass(frozen=True)
class ConvertConfig:
    """Rewrite a draft for another engine or tool: names, layer ids, norms, rope and vocabulary map, by meaning."""

    draft: tyro.conf.Positional[Path]
    """The draft's folder."""
    out: tyro.conf.Positional[Path]
    """Folder to write; must not exist, or be empty."""
    to: Goal = "sglang"
    """Whose dialect; "sglang,vllm" writes one folder that both read right, "hf" is speculators' format."""
    target: Path | None = None
    """The target's folder: its class decides how SGLang's layer ids are spelled, its vocabulary bounds the map."""
    engine_version: str = "0.5.20"
    """SGLang version to write the layer ids for."""
    ids_mean: Literal["auto", "output", "boundary"] = "auto"
    """What the ids in the draft's eagle_config mean, where no contract says so."""
    aux_layer_ids: tuple[int, ...] = ()
    """The trained layers as outputs (0-based), where the draft does not say."""
    read_as: Literal["auto", "sglang", "vllm"] = "auto"
    """Whose norms the names above layer 0 mean, for drafts of several layers."""
    vocab_from: str = ""
    """JSON file (in the draft's folder, or a path) with the draft's target ids, to write d2t and t2d from."""


@dataclass(frozen=True)
class Conversion:
    """What was written, and every change: `renamed` pairs, `dropped` names, `made` names, `keys` changed, `remarks`."""

    out: Path
    renamed: tuple[tuple[str, str], ...]
    dropped: tuple[str, ...]
    made: tuple[str, ...]
    keys: tuple[str, ...]
    remarks: tuple[str, ...]

    def lines(self) -> list[str]:
        """The account, for people."""
        return [*self.remarks, *(f"renamed  {a} -> {b}" for a, b in self.renamed),
                *(f"dropped  {name}" for name in self.dropped), *(f"made     {name}" for name in self.made),
                *(f"config   {key}" for key in self.keys), f"written  {self.out}"]


@dataclass(frozen=True)
class Source:
    """A draft of any dialect as read.

    Attributes:
        written: its config as it stands.
        neutral: what it is.
        ids, why: the trained layers as outputs (None where nothing tells), and how that is known.
        contract: its contract.json, where it has one.
        named: tensors by trainer's name; `strangers`: names that no dialect has.
        extra: `d2t` and `t2d` made from what is known, `made` their names.
        remarks: for people.
    """

    written: dict[str, Any]
    neutral: Neutral
    ids: tuple[int, ...] | None
    why: str
    contract: Contract | None
    named: dict[str, TensorInfo]
    strangers: list[str]
    extra: dict[str, Entry]
    made: tuple[str, ...]
    remarks: tuple[str, ...]


def read_source(config: ConvertConfig) -> Source:
    """Read a draft of any dialect by meaning.

    Raises:
        InvalidInput, CorruptFile: impossible values, ids whose meaning is not told, no usable vocabulary map, damaged
            files.
    """
    written = read_config(config.draft)
    _require_sound(config.draft, written)
    tensors = read_checkpoint(config.draft)
    contract = Contract.load(config.draft) if (config.draft / FILE_NAME).is_file() else None
    ids, why = _ids(config, written, contract)
    neutral = parse(written, ids)
    named, strangers = _names(config, neutral, written, tensors)
    neutral, extra, made, remarks = _vocabulary(config, neutral, named, contract)
    return Source(written, neutral, ids, why, contract, named, strangers, extra, made, remarks)


def _require_sound(folder: Path, written: dict[str, Any]) -> None:
    """Refuse a config whose values cannot be those of a draft. Raises InvalidInput."""
    wrong = value_faults(vllm.flatten_speculators(written) if vllm.is_speculators(written) else written)
    names = written.get("architectures") or []
    if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
        wrong.append("architectures is no list of names")
    if wrong:
        raise InvalidInput(str(folder / "config.json"), "; ".join(wrong), "a draft's config, by eyas-draft",
                           "Correct the values.")


def convert(config: ConvertConfig) -> Conversion:
    """Convert one draft.

    Raises:
        InvalidInput: the goal cannot express the draft, ids whose meaning is not told, unknown tensors, an output
            folder that is not empty; every reason named. Nothing is written then.
        CorruptFile: damaged weights.
    """
    require_own(config.out, (), "a new or empty folder")
    source = read_source(config)
    neutral = source.neutral
    reasons = refusals(neutral, config.to) + [f"tensor {name}: no dialect has this name" for name in source.strangers]
    architecture = _architecture(config, source.contract, neutral)
    if reasons:
        raise InvalidInput(str(config.draft), "; ".join(reasons), f"what {config.to} can express",
                           "Choose another goal, or train without these.")
    result = emit(neutral, config.to, architecture, sglang.parse_version(config.engine_version))
    out, renamed, dropped = _place(config.to, neutral, source.named, source.extra)
    _write(config, result, out)
    layers = f"layers   {source.why}: outputs of {list(source.ids)}" if source.ids else f"layers   {source.why}"
    return Conversion(config.out, renamed, dropped, source.made, _changed(source.written, result),
                      (layers, *source.remarks))


def _ids(config: ConvertConfig, written: dict[str, Any], contract: Contract | None
         ) -> tuple[tuple[int, ...] | None, str]:
    if config.aux_layer_ids:
        return config.aux_layer_ids, "by --aux-layer-ids"
    if contract is not None:
        return contract.capture.aux_layer_ids, f"by {FILE_NAME}"
    return meaning_of_ids(written, config.ids_mean)


def _architecture(config: ConvertConfig, contract: Contract | None, neutral: Neutral) -> str:
    """The target's class; it decides only how SGLang spells the ids."""
    if config.target is not None:
        return str((read_config(config.target).get("architectures") or ["unknown"])[0])
    if contract is not None:
        return contract.target.architecture
    if "sglang" in config.to and neutral.aux_layer_ids is not None and neutral.aux_layer_ids[0] != 1:
        raise InvalidInput("--target", "not given", "the target's folder: its class decides how SGLang reads ids "
                           f"such as {list(neutral.aux_layer_ids)}", "Add --target.")
    return "LlamaForCausalLM"


def _names(config: ConvertConfig, neutral: Neutral, written: dict[str, Any], tensors: dict[str, TensorInfo]
           ) -> tuple[dict[str, TensorInfo], list[str]]:
    """Tensors by trainer's name, and the names that no dialect has."""
    layers = int(neutral.base.get("num_hidden_layers") or 1)
    read_as = config.read_as
    if read_as == "auto":
        names_midlayer = any(name.removeprefix("model.").startswith("midlayer.") for name in tensors)
        read_as = "sglang" if names_midlayer and not vllm.is_speculators(written) else "vllm"
    named, strangers = {}, []
    for name, info in tensors.items():
        plain = neutral_name(name, read_as, layers)
        if plain is None or plain in named:
            strangers.append(name)
        else:
            named[plain] = info
    return named, strangers


def _vocabulary(config: ConvertConfig, neutral: Neutral, named: dict[str, TensorInfo], contract: Contract | None
                ) -> tuple[Neutral, dict[str, Entry], tuple[str, ...], tuple[str, ...]]:
    """The map rebuilt from d2t, a side file or the contract; `t2d` wherever it is missing."""
    head, full = named.get("lm_head.weight"), int(neutral.base.get("vocab_size") or 0)
    size = head.shape[0] if head is not None and head.shape else neutral.draft_vocab_size
    neutral = with_head(neutral, head.shape[0] if head is not None and head.shape else None)
    if not size or size == full:
        return neutral, {}, (), ()
    if not full:
        raise InvalidInput("config.json: vocab_size", "absent", "the target's vocabulary, which the map leads into",
                           "Write vocab_size.")
    source, ids = _target_ids(config, named, contract, size, full)
    vocab = VocabMap(full, ids)
    d2t, t2d = named.get("d2t"), named.get("t2d")
    extra: dict[str, Entry] = {}
    if d2t is None or d2t.dtype not in _OFFSETS or read_values(d2t) != vocab.d2t():
        extra["d2t"] = int64("d2t", vocab.d2t())
    if t2d is None or t2d.dtype not in _MARKS or t2d.shape != (full,) \
            or [bool(v) for v in read_values(t2d)] != vocab.t2d():
        extra["t2d"] = booleans("t2d", vocab.t2d())
    remarks = (f"vocab    {len(ids)} of {full} target ids, from {source}",) if extra else ()
    return neutral, extra, tuple(sorted(extra)), remarks


def _target_ids(config: ConvertConfig, named: dict[str, TensorInfo], contract: Contract | None, size: int, full: int
                ) -> tuple[str, tuple[int, ...]]:
    wanted = f"{size} distinct, ascending target ids below {full}"
    if config.vocab_from:
        path = Path(config.vocab_from)
        path = path if path.is_file() else config.draft / config.vocab_from
        ids = target_ids_in(path, size, full) if path.is_file() else []
        if not ids:
            raise InvalidInput(str(path), "no such list", wanted, "Name the file that training kept.")
        return path.name, tuple(ids)
    if contract is not None and contract.vocab is not None \
            and (contract.vocab.size, contract.vocab.target_vocab_size) == (size, full):
        return FILE_NAME, contract.vocab.target_ids
    info = named.get("d2t")
    if info is None or info.shape != (size,) or info.dtype not in _OFFSETS:
        raise InvalidInput("d2t", "absent, or of another length or dtype", wanted,
                           "Name the side file that holds them with --vocab-from.")
    mapped = tuple(i + offset for i, offset in enumerate(read_values(info)))
    if list(mapped) != sorted(set(mapped)) or mapped[0] < 0 or mapped[-1] >= full:
        raise InvalidInput("d2t", "no offsets of " + wanted, wanted,
                           "Check it with eyas-serve preflight; absolute ids are no offsets.")
    return "d2t", mapped


def _place(goal: Goal, neutral: Neutral, named: dict[str, TensorInfo], extra: dict[str, Entry]
           ) -> tuple[dict[str, Entry], tuple[tuple[str, str], ...], tuple[str, ...]]:
    """Tensors under the goal's names, the renames, and what the goal must not or need not have."""
    full = neutral.draft_vocab_size in (None, neutral.base.get("vocab_size"))
    shared = neutral.target_hidden_size in (None, neutral.base.get("hidden_size"))
    result: dict[str, Entry] = {}
    renamed, dropped = [], []
    for name, entry in {**named, **extra}.items():
        info = entry[0] if isinstance(entry, tuple) else entry
        unneeded = (name in ("d2t", "t2d") and full) or \
            (name == "embed_tokens.weight" and shared and goal in ("sglang", "specforge"))
        if unneeded:
            dropped.append(info.name)
            continue
        new = goal_name(name, goal)
        result[new] = entry
        if new != info.name:
            renamed.append((info.name, new))
    return result, tuple(sorted(renamed)), tuple(sorted(dropped))


def _write(config: ConvertConfig, result: dict[str, Any], tensors: dict[str, Entry]) -> None:
    config.out.mkdir(parents=True, exist_ok=True)
    for name in _CARRIED:
        if (config.draft / name).is_file():
            shutil.copyfile(config.draft / name, config.out / name)
    metadata = {key: value for file in sorted({info.file for info in read_checkpoint(config.draft).values()})
                if file.suffix == ".safetensors" for key, value in read_header(file).metadata.items()} \
        or {"format": "pt"}
    write_tensors(config.out / "model.safetensors", tensors, metadata)
    write_text_atomic(config.out / "config.json", json.dumps(result, indent=1, sort_keys=True) + "\n")


def _changed(before: dict[str, Any], after: dict[str, Any]) -> tuple[str, ...]:
    result = []
    for key in sorted(set(before) | set(after)):
        if key not in after:
            result.append(f"{key}: dropped ({json.dumps(before[key])[:80]})")
        elif key not in before:
            result.append(f"{key}: {json.dumps(after[key])[:80]}")
        elif before[key] != after[key]:
            result.append(f"{key}: {json.dumps(before[key])[:80]} -> {json.dumps(after[key])[:80]}")
    return tuple(result)
