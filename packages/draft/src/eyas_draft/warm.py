"""First weights from a published draft, in any dialect that `eyas-draft convert` reads.

The draft vocabulary is always that of the run, chosen from its own data: the head's rows go over by the target token
that they stand for, whatever the published map was, and a token that was not in it begins as the run's `--init` says.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from eyas_contract import Contract, InvalidInput, default_aux_layer_ids
from eyas_contract.engines.wanted import sizes_beside
from eyas_draft.convert import ConvertConfig, Source, read_source
from eyas_draft.mapped import map_tensor
from eyas_draft.model import DraftModel

BESIDE = ("d2t", "t2d", "embed_tokens.weight")  # not weights of the trained draft: the embedding is the target's


def warm_start(folder: Path, model: DraftModel, contract: Contract) -> int:
    """Copy a published draft's weights into `model`; returns how many rows of the head it had.

    Raises:
        InvalidInput: a draft of another shape, kind, recurrence, rope, other heads, another epsilon of its norms or of
            other layers (every difference is named).
        CorruptFile: a damaged weight file.
    """
    source = read_source(ConvertConfig(folder, folder))
    faults = _faults(source, model, contract)
    if faults:
        raise InvalidInput(str(folder), "; ".join(faults), "a draft like the one to be trained, by --warm-start",
                           "Match the run's settings to it, or start without.")
    assert contract.vocab is not None
    head = map_tensor(source.named["lm_head.weight"])
    row_of = {token: row for row, token in enumerate(_target_ids(source, head.shape[0]).tolist())}
    pairs = [(new, row_of[token]) for new, token in enumerate(contract.vocab.target_ids) if token in row_of]
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name != "lm_head.weight":
                parameter.copy_(map_tensor(source.named[name]))
        here, there = torch.tensor(pairs).view(-1, 2).unbind(1)
        model.lm_head.weight[here] = head[there].to(model.lm_head.weight.dtype)
    return len(pairs)


def _faults(source: Source, model: DraftModel, contract: Contract) -> list[str]:
    """Every way in which the published draft is another one."""
    spec, capture = model.spec, contract.capture
    faults = [f"tensors that no dialect has: {', '.join(source.strangers)}"] if source.strangers else []
    if source.neutral.kind != spec.kind:
        faults.append(f"kind {source.neutral.kind}, not {spec.kind}")
    ids, named = source.ids, ""
    if ids is None:
        ids, named = _usual_layers(contract), " (it names none, and engines take these)"
    if ids != capture.aux_layer_ids:
        faults.append(f"outputs of layers {list(ids)}{named}, not {list(capture.aux_layer_ids)}")
    faults += [f"{key} {found}, not {wanted}" for key, (found, wanted) in sorted(
        sizes_beside(source.neutral.base, spec).items()) if found != wanted]
    if source.neutral.rope != spec.rope:
        faults.append(f"rope {source.neutral.rope}, not {spec.rope}")
    wanted_norms = {name for name, on in (("fc_norm", spec.fc_norm), ("norm_output", spec.norm_output)) if on}
    if {"fc_norm" if n == "use_aux_norm" else n for n in source.neutral.norms} != wanted_norms:
        faults.append(f"norms {sorted(source.neutral.norms)}, not {sorted(wanted_norms)}")
    shapes = {name: tuple(parameter.shape) for name, parameter in model.named_parameters()}
    found = {name: info.shape for name, info in source.named.items() if name not in BESIDE}
    faults += [f"{name} is missing" for name in sorted(set(shapes) - set(found))]
    faults += [f"{name} has no place" for name in sorted(set(found) - set(shapes))]
    for name in sorted(set(shapes) & set(found)):
        ours, theirs = shapes[name], found[name]
        if (ours[1:] if name == "lm_head.weight" else ours) != (theirs[1:] if name == "lm_head.weight" else theirs):
            faults.append(f"{name} is {list(theirs)}, not {list(ours)}")
    return faults


def _usual_layers(contract: Contract) -> tuple[int, ...]:
    """What engines take for a draft that names no layers; none of a target too shallow for it."""
    return default_aux_layer_ids(contract.target.num_layers) if contract.target.num_layers >= 6 else ()


def _target_ids(source: Source, rows: int) -> Tensor:
    """int64 [rows]: the target token of each row of the published head."""
    if source.contract is not None and source.contract.vocab is not None and source.contract.vocab.size == rows:
        return torch.tensor(source.contract.vocab.target_ids)
    own = torch.arange(rows)
    return own + map_tensor(source.named["d2t"]).long() if "d2t" in source.named else own
