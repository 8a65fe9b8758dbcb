"""The case that every room looks at: both folders read once, hostile or not, and what the user said of the server."""

from __future__ import annotations

import json
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from eyas_contract.checkpoint_files import has_weights, read_checkpoint, require_inside, weight_sizes
from eyas_contract.contract import FILE_NAME, Contract
from eyas_contract.engines import vllm
from eyas_contract.engines.checks.config_values import value_faults
from eyas_contract.engines.draft_types import with_defaults
from eyas_contract.engines.flags import ServerFlags
from eyas_contract.engines.hardware import Gpu
from eyas_contract.engines.loaders import Loader, Version
from eyas_contract.engines.sglang import DRAFT_CLASSES, version_text
from eyas_contract.errors import InvalidInput
from eyas_contract.safetensors_header import TensorInfo
from eyas_contract.target import TargetSpec, read_config, text_config

MAX_JSON_BYTES = 64 * 1024 * 1024
RECORD_NAMES = ("train_meta.json", "training_record.json")


@dataclass(frozen=True)
class Record:
    """What training wrote down beside a draft of another tool; None where it says nothing.

    Attributes:
        source: the file's name.
        max_length: longest sequence trained on, in tokens.
        rope_theta: base frequency used.
        aux_layer_ids: outputs of layers (0-based) trained on.
        tokenizer_sha256, chat_template_sha256: hex digests.
    """

    source: str = ""
    max_length: int | None = None
    rope_theta: float | None = None
    aux_layer_ids: tuple[int, ...] | None = None
    tokenizer_sha256: str = ""
    chat_template_sha256: str = ""


@dataclass(frozen=True)
class Case:
    """One draft, one target, one engine version, one way of launching.

    Attributes:
        draft, target: folders.
        raw: the draft's config as written; `config` flat, as the engine's class sees it, with its type's defaults.
        target_config: the target's config, its text model's part.
        spec: the target.
        tensors: the draft's tensors by stored name; empty where the folder has no weights.
        draft_bytes, target_bytes: sizes of the weight files that engines read; 0 where there are none.
        loader: the class that opens the draft; None where this version has none.
        contract: the draft's `contract.json`; record: other tools' training record.
    """

    draft: Path
    target: Path
    raw: dict[str, Any]
    config: dict[str, Any]
    target_config: dict[str, Any]
    spec: TargetSpec
    tensors: dict[str, TensorInfo]
    draft_bytes: int
    target_bytes: int
    engine: str
    version: Version
    loader: Loader | None
    contract: Contract | None
    contract_fault: str
    record: Record
    flags: ServerFlags
    gpu_name: str
    gpu: Gpu | None
    tp: int
    template: bool = field(default=False)

    @property
    def weights(self) -> str:
        """Name of the weights, for `where`."""
        files = {info.file.name for info in self.tensors.values()}
        return next(iter(files)) if len(files) == 1 else "the safetensors files" if files else "model.safetensors"

    @property
    def server(self) -> str:
        """`SGLang 0.5.20`."""
        return f"{'SGLang' if self.engine == 'sglang' else 'vLLM'} {version_text(self.version)}"

    def at(self, version: Version, loader: Loader | None) -> Case:
        """The same case in another version."""
        return replace(self, version=version, loader=loader)


def read_case(draft: Path, target: Path, engine: str, record: Path | None) -> Case:
    """Read both folders; the engine's version and the flags are filled in by the caller.

    Raises:
        InvalidInput, CorruptFile: a folder that cannot be read, or whose files lead out of it.
    """
    for folder in (draft, target):
        _guard(folder)
    raw = read_config(draft)
    _require_sound(target)
    spec = TargetSpec.from_folder(target)
    contract, fault = None, ""
    if (draft / FILE_NAME).is_file():
        try:
            contract = Contract.load(draft)
        except InvalidInput as error:
            fault = error.found
    config = raw
    if vllm.is_speculators(raw):
        config = vllm.flatten_speculators(raw)
        if engine == "sglang":  # said once, as config-nested; the rest is judged as if converted
            config["architectures"] = [DRAFT_CLASSES["llama"]]
    weights = has_weights(draft)
    return Case(
        draft=draft, target=target, raw=raw, config=with_defaults(config),
        target_config=text_config(read_config(target)), spec=spec,
        tensors=read_checkpoint(draft) if weights else {}, draft_bytes=sum(weight_sizes(draft)),
        target_bytes=sum(weight_sizes(target)), engine=engine, version=(0, 0, 0), loader=None,
        contract=contract, contract_fault=fault, record=_record(draft, record), flags=ServerFlags(), gpu_name="",
        gpu=None, tp=1, template=not weights and contract is None and not fault)


def _require_sound(target: Path) -> None:
    """Refuse a target's config whose values cannot be those of a model."""
    config = read_config(target)
    text = text_config(config)
    wrong = value_faults(text) + [f"{key} null" for key in ("max_position_embeddings", "rms_norm_eps")
                                  if key in text and text[key] is None]
    names = config.get("architectures")
    if names is not None and not (isinstance(names, list) and all(isinstance(name, str) for name in names)):
        wrong.append("architectures is no list of names")
    wrong += [f"{key} is no object" for key in ("quantization_config",)
              for place in (config, text) if not isinstance(place.get(key), dict | None)]
    if wrong:
        raise InvalidInput(str(target / "config.json"), "; ".join(wrong), "a model's config, by eyas-contract",
                           "Restore the file.")


def _guard(folder: Path) -> None:
    """Refuse what should not be opened: special files, links out of the folder, JSON too large to be a config."""
    if not folder.is_dir():
        raise InvalidInput(str(folder), "no such folder", "a model's folder, by eyas-contract", "Check the path.")
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".jinja", ".safetensors", ".bin", ".model", ".txt"):
            require_inside(path, folder)
            if path.suffix in (".json", ".jinja") and path.stat().st_size > MAX_JSON_BYTES:
                raise InvalidInput(str(path), f"{path.stat().st_size} bytes",
                                   f"at most {MAX_JSON_BYTES}, by eyas-contract", "Check that this is a model folder.")


def _record(draft: Path, given: Path | None) -> Record:
    candidates = [given] if given else [folder / name for folder in (draft, draft.resolve().parent)
                                        for name in RECORD_NAMES]
    path = next((p for p in candidates if p.is_file() and p.stat().st_size < MAX_JSON_BYTES), None)
    if path is None:
        if given:
            raise InvalidInput(str(given), "no such file", "a training record", "Check --training-record.")
        return Record()
    wanted = "a JSON object with max_length, rope_theta, aux_layer_ids (outputs of layers), ..., by eyas-contract"
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidInput(str(path), f"not JSON ({error})", wanted, "Restore the file.") from error
    if not isinstance(plain, dict):
        raise InvalidInput(str(path), f"a JSON {type(plain).__name__}", wanted, "Restore the file.")
    length, theta = plain.get("max_length"), plain.get("rope_theta_used", plain.get("rope_theta"))
    ids = plain.get("aux_layer_ids")
    return Record(
        source=path.name, max_length=length if type(length) is int else None,
        rope_theta=float(theta) if isinstance(theta, int | float) and not isinstance(theta, bool) else None,
        aux_layer_ids=tuple(ids) if isinstance(ids, list) and all(type(i) is int for i in ids) else None,
        tokenizer_sha256=str(plain.get("tokenizer_sha256", "")),
        chat_template_sha256=str(plain.get("chat_template_sha256", "")))
