"""Reads an exported draft folder back, in SGLang's names, refusing what SGLang would pass over in silence."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor

from eyas_contract import Contract, InvalidInput, draft_tensors
from eyas_contract.checkpoint_files import read_checkpoint
from eyas_contract.contract import read_json
from eyas_contract.engines import sglang
from eyas_contract.safetensors_header import TensorInfo
from eyas_draft.mapped import map_tensor
from eyas_draft.model import DraftModel


def load_draft(folder: Path, embedding_vh: Tensor) -> tuple[DraftModel, Contract]:
    """The draft of an exported folder, in its stored dtype, and its contract.

    Args:
        folder: written by `eyas-draft export`.
        embedding_vh: the target's embedding.

    Raises:
        InvalidInput: weights missing, unknown or of another shape, `d2t`/`t2d` that are not the contract's vocabulary,
            or a config.json that is not what the contract says (every fault is named).
        CorruptFile: a damaged weight file.
    """
    contract = Contract.load(folder)
    if contract.draft is None or contract.vocab is None:
        raise InvalidInput(str(folder / "contract.json"), "no vocab or draft section", "a trained draft's contract",
                           "Export the draft again.")
    tensors = read_checkpoint(folder)
    faults = _weight_faults(tensors, contract) + vocab_faults(tensors, contract)
    if faults:
        raise InvalidInput(str(folder), "; ".join(faults), "the tensors that the contract describes, by SGLang's names",
                           "Export the draft again; SGLang would serve this one without a word and accept nothing.")
    model = DraftModel(contract.draft, embedding_vh)
    model.load_state_dict({sglang.import_name(name): map_tensor(info) for name, info in tensors.items()
                           if name not in ("d2t", "t2d")}, assign=True)
    return model, contract


def config_faults(folder: Path, contract: Contract, engine: sglang.Version) -> list[str]:
    """Keys of config.json that differ from what the contract gives for this engine."""
    found = read_json(folder / "config.json", "the draft's config, by SGLang")
    wanted = json.loads(json.dumps(sglang.export_config(contract, engine)))
    return [f"config.json: {key} is {found.get(key)!r}, not {wanted.get(key)!r}"
            for key in sorted(set(found) | set(wanted)) if found.get(key) != wanted.get(key)]


def _weight_faults(tensors: dict[str, TensorInfo], contract: Contract) -> list[str]:
    assert contract.draft is not None
    wanted = {sglang.export_name(name): shape for name, shape in draft_tensors(contract.draft).items()}
    found = {name: info.shape for name, info in tensors.items() if name not in ("d2t", "t2d")}
    faults = [f"{name} is missing" for name in sorted(set(wanted) - set(found))]
    faults += [f"{name} is unknown" for name in sorted(set(found) - set(wanted))]
    return faults + [f"{name} is {list(found[name])}, not {list(wanted[name])}"
                     for name in sorted(set(found) & set(wanted)) if found[name] != wanted[name]]


def vocab_faults(tensors: dict[str, TensorInfo], contract: Contract) -> list[str]:
    """Where `d2t` (offsets, int64) and `t2d` (mask, bool) are not those of the contract."""
    assert contract.vocab is not None
    faults = []
    for name, dtype, wanted in (("d2t", torch.int64, contract.vocab.d2t()), ("t2d", torch.bool, contract.vocab.t2d())):
        if name not in tensors:
            faults.append(f"{name} is missing")
            continue
        value = map_tensor(tensors[name])
        if value.dtype != dtype or value.tolist() != wanted:
            faults.append(f"{name} ({value.dtype}) is not that of the contract's vocabulary")
    return faults
