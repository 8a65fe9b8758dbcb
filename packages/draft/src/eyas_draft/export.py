"""A trained run -> the folder that SGLang serves, and the proof that it is the same draft."""

from __future__ import annotations

import json
import math
import os
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from eyas_contract import Contract, EyasError, InvalidInput
from eyas_contract.commands import save_config
from eyas_contract.contract import read_json, write_text_atomic
from eyas_contract.engines import sglang
from eyas_contract.golden import RECORD_NAME, VALUES_NAME
from eyas_contract.outputs import require_own, require_place, with_temporary
from eyas_draft import checkpoint
from eyas_draft.attention import TttAttention
from eyas_draft.batches import Batch
from eyas_draft.config import ExportConfig, VerifyConfig
from eyas_draft.golden import make_golden
from eyas_draft.golden_config import GoldenConfig
from eyas_draft.loading import config_faults, load_draft
from eyas_draft.model import DraftModel
from eyas_draft.ranges import require_in_range
from eyas_draft.run_folder import COVERAGE
from eyas_draft.setup import require_target
from eyas_draft.store import Store
from eyas_draft.target_weights import TargetWeights

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def export(config: ExportConfig) -> dict[str, object]:
    """Write config.json, model.safetensors, contract.json and the golden record; returns a summary.

    Config, tensor names and ids come from the contract alone; the weights are written last, under a temporary name. An
    earlier export's golden record goes before them: it is of other weights.

    Raises:
        InvalidInput: a run without contract sections or the checkpoint asked for, what SGLang cannot serve, or an
            output folder with anything but an export of this run.
    """
    contract = Contract.load(config.run)
    if contract.draft is None or contract.vocab is None:
        raise InvalidInput(str(config.run), "no vocab or draft section in contract.json", "a run of eyas-draft train",
                           "Give the run's folder.")
    if not _is_of_run(config.out, contract):
        require_own(config.out, with_temporary("contract.json"), "a new or empty folder, or an export of this run")
    engine = _engine(config.engine_version)
    state = checkpoint.require(config.run, config.checkpoint)
    dtype = _dtype(contract.draft.dtype)
    tensors: dict[str, Tensor] = {sglang.export_name(name): value.to(dtype).contiguous()
                                  for name, value in state["model"].items()}
    tensors["d2t"] = torch.tensor(contract.vocab.d2t(), dtype=torch.int64)
    tensors["t2d"] = torch.tensor(contract.vocab.t2d(), dtype=torch.bool)
    require_place(config.out / "config.json", "a folder for the draft, by --out")
    contract.save(config.out)
    write_text_atomic(config.out / "config.json", json.dumps(sglang.export_config(contract, engine), indent=1) + "\n")
    temporary = config.out / ".model.safetensors.tmp"
    save_file(tensors, temporary, metadata={"format": "pt", **contract.digests()})
    with temporary.open("rb") as written:
        os.fsync(written.fileno())  # the library does not
    for name in (RECORD_NAME, VALUES_NAME):
        (config.out / name).unlink(missing_ok=True)
    temporary.replace(config.out / "model.safetensors")
    save_config(config, config.out)
    golden = _golden(config) if config.golden else "not wanted"
    return {"out": str(config.out), "step": state["step"], "tensors": len(tensors),
            "acceptance_length_heldout": checkpoint.measured(config.run, state),
            "parameters": sum(value.numel() for value in state["model"].values()),
            "dtype": contract.draft.dtype, "golden": golden}


def _is_of_run(folder: Path, contract: Contract) -> bool:
    """Whether a folder is an export, whole or interrupted, of the run with this contract; no run, which has it too."""
    try:
        return Contract.load(folder) == contract and not (folder / COVERAGE).exists()
    except EyasError:
        return False


def _golden(config: ExportConfig) -> str:
    """Write the golden record from the store and target that the run names; says why where it cannot."""
    settings = read_json(config.run / "config.resolved.json", "the settings of training")
    store, target = (Path(str(settings.get(name, ""))) for name in ("store", "target"))
    gone = [str(path) for path in (store, target) if not path.is_dir()]
    if gone:
        return f"none: {' and '.join(gone)} not there. Make one with eyas-draft golden {config.out} --target TARGET"
    try:
        return str(make_golden(GoldenConfig(config.out, target, store))["golden"])
    except EyasError as error:  # the draft itself is written and whole
        return f"none: {error}"


@dataclass(frozen=True)
class Verdict:
    """Outcome of `verify`.

    Attributes:
        samples, rows: compared.
        largest_difference: of the logits, relative to the largest logit; None where they are no numbers.
        faults: what is wrong; empty where the export is the trained draft.
    """

    samples: int
    rows: int
    largest_difference: float | None
    faults: tuple[str, ...]


@torch.no_grad()
def verify(config: VerifyConfig) -> Verdict:
    """Load the exported folder afresh and compare its logits, two steps deep, with the trainer's weights.

    The trainer's weights are rounded to the exported dtype, and both sides compute in float32 with their own tensors;
    so equal means equal.

    Raises:
        InvalidInput, ContractMismatch, CorruptFile: an export, store or target that cannot be compared.
    """
    require_in_range(config)
    store = Store(config.store)
    target = require_target(store.contract, config.store, config.target)
    weights = TargetWeights.load(config.target, target)
    embedding = weights.embedding_vh.float()
    exported, contract = load_draft(config.draft, embedding)
    trained_contract = Contract.load(config.run)
    faults = [] if contract == trained_contract else ["contract.json is not the run's"]
    engine = read_json(config.draft / "config.resolved.json", "the settings of the export").get("engine_version", "")
    faults += config_faults(config.draft, contract, _engine(engine))
    assert trained_contract.draft is not None
    trained = DraftModel(trained_contract.draft, embedding)
    dtype = _dtype(trained_contract.draft.dtype)
    state = checkpoint.require(config.run, config.checkpoint)["model"]
    trained.load_state_dict({name: value.to(dtype).float() for name, value in state.items()})
    exported = exported.float()
    differences, rows = list[Tensor](), 0
    for sample in islice((s for s in map(store.sample, range(len(store))) if s.finite), config.samples):
        batch = Batch.pack([sample], torch.device("cpu"))
        mine, theirs = two_steps(trained, batch), two_steps(exported, batch)
        rows += mine.shape[0]
        differences.append((mine - theirs).abs().max() / mine.abs().max().clamp(min=1e-9))
    if not differences:
        raise InvalidInput(str(config.store), "no sample with finite states", "some to compare the logits on",
                           "Give the store that the draft was trained on.")
    worst = float(torch.stack(differences).max())  # NaN where one is
    if not worst <= 1e-5:
        faults.append(f"logits differ from the trainer's by {worst:.2g} of the largest")
    return Verdict(len(differences), rows, worst if math.isfinite(worst) else None, tuple(faults))  # JSON has no NaN


def two_steps(model: DraftModel, batch: Batch) -> Tensor:
    """Logits of step 0 (target's states) and step 1 (own states) side by side: [2T, V]."""
    attend = TttAttention(batch.lengths, model.spec.num_layers, batch.input_ids_t.device)
    ids = batch.input_ids_t.roll(-1)
    first, hidden = model(ids, model.fuse(batch.aux_tke.float()), batch.positions_t, attend)
    second, _ = model(ids.roll(-1), hidden, batch.positions_t + 1, attend)
    logits: Tensor = model.lm_head(torch.cat((first, second)))
    return logits.float()


def _engine(version: str) -> sglang.Version:
    return sglang.parse_version(version) if version else sglang.NEWEST


def _dtype(name: str) -> torch.dtype:
    if name not in DTYPES:
        raise InvalidInput("contract.draft.dtype", name, f"one of {sorted(DTYPES)}, by export",
                           "Train with such a dtype.")
    return DTYPES[name]
