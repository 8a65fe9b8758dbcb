"""What a run starts from: the checked store and target, the draft vocabulary, the draft's shape and first weights."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path

import torch
from torch import Tensor

from eyas_contract import Contract, ContractMismatch, DraftSpec, InvalidInput, Mismatch, TargetSpec, VocabMap
from eyas_contract.contract import read_json
from eyas_contract.target import read_config, text_config
from eyas_draft.config import TrainConfig
from eyas_draft.model import DraftModel, check_supported
from eyas_draft.sizes import draft_sizes
from eyas_draft.store import Store
from eyas_draft.target_weights import TargetWeights, initial_from_target
from eyas_draft.vocab import Coverage, choose_vocab, coverage
from eyas_draft.warm import warm_start


@dataclass(frozen=True)
class Setup:
    """Everything fixed before the first step.

    Attributes:
        store: the checked store.
        contract: all four sections.
        weights: the target's few weights.
        model: the draft with its first weights, float32, on the CPU.
        coverage: of the draft vocabulary.
    """

    store: Store
    contract: Contract
    weights: TargetWeights
    model: DraftModel
    coverage: Coverage


def prepare(config: TrainConfig) -> Setup:
    """Check store against target, choose the vocabulary, build the draft.

    Raises:
        ContractMismatch: the store is of another target (every difference is listed).
        InvalidInput: a store whose extraction has not come to its end.
        InvalidInput, CorruptFile: see `Store`, `choose_vocab`, `check_supported`, `TargetWeights.load`.
    """
    store = Store(config.store, verify=config.verify_store)
    require_complete(store)
    require_target(store.contract, config.store, config.target)
    counts = store.token_counts()
    vocab = choose_vocab(counts, config.vocab_size, special_ids_seen(config.target, counts))
    spec = draft_spec(config, store.contract, vocab)
    check_supported(spec)
    weights = TargetWeights.load(config.target, store.contract.target)
    contract = store.contract.with_sections(vocab=vocab, draft=spec)
    model = new_model(contract, weights, config.init, config.seed)
    if config.warm_start:
        warm_start(config.warm_start, model, contract)
    return Setup(store, contract, weights, model, coverage(counts, vocab, config.chain))


def require_complete(store: Store) -> None:
    """Raise InvalidInput where extraction still adds to the store: a run could not be continued on what it grows to."""
    if not store.manifest.complete:
        raise InvalidInput(str(store.folder), f"not complete: {len(store)} samples so far, more are to come",
                           "a store whose extraction has come to its end, by training",
                           "Finish the extraction with the same command; to train on less, extract fewer rows.")


def require_target(contract: Contract, found_in: Path, target: Path) -> TargetSpec:
    """The TargetSpec of `target`, if it is the contract's. Raises ContractMismatch otherwise."""
    spec = TargetSpec.from_folder(target)
    differences = tuple(
        Mismatch(f"target.{f.name}", str(getattr(contract.target, f.name)), str(getattr(spec, f.name)), str(found_in),
                 str(target))
        for f in fields(TargetSpec) if getattr(contract.target, f.name) != getattr(spec, f.name))
    if differences:
        raise ContractMismatch(differences, "a draft trained on another target's states accepts nothing",
                               "Give the target from which the states were extracted, or extract again.")
    return spec


def special_ids_seen(target: Path, counts_v: Tensor) -> tuple[int, ...]:
    """Ids of the tokenizer's special tokens and of the configured end of sequence that occur among trained tokens."""
    config = text_config(read_config(target))
    eos = config.get("eos_token_id")
    ids = set(eos if isinstance(eos, list) else [] if eos is None else [eos])
    tokenizer = target / "tokenizer.json"
    if tokenizer.is_file():
        added = read_json(tokenizer, "a tokenizer, by eyas-draft").get("added_tokens", [])
        ids |= {token["id"] for token in added if token.get("special")}
    return tuple(sorted(i for i in ids if i < counts_v.numel() and counts_v[i] > 0))


def draft_spec(config: TrainConfig, contract: Contract, vocab: VocabMap) -> DraftSpec:
    """The draft's shape: the target's own sizes where the settings leave them open."""
    return draft_sizes(config, contract.target, len(contract.capture.aux_layer_ids), vocab.size)


def draft_ids(contract: Contract) -> Tensor:
    """int64 [V_draft]: target id of each draft id."""
    assert contract.vocab is not None
    return torch.tensor(contract.vocab.target_ids)


def new_model(contract: Contract, weights: TargetWeights, init: str, seed: int) -> DraftModel:
    """The draft with its first weights, float32: normal of width 0.02, or the target's where shapes allow."""
    assert contract.draft is not None
    model = DraftModel(contract.draft, weights.embedding_vh.float())
    generator = torch.Generator().manual_seed(seed)
    start = initial_from_target(weights, contract.draft, draft_ids(contract)) if init == "target" else {}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in start and start[name].shape == parameter.shape:
                parameter.copy_(start[name])
            elif parameter.dim() == 2:
                parameter.normal_(0.0, 0.02, generator=generator)
    return model
