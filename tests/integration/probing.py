"""Records as a server would write them, computed by the reference stages with one part of the draft spoilt."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eyas_contract import TargetSpec
from eyas_contract.golden import GoldenRecord, load_golden
from eyas_contract.target import Rope
from eyas_draft.convert import ConvertConfig, read_source
from eyas_draft.golden import staged_draft
from eyas_draft.golden_stages import StagedDraft
from eyas_draft.golden_target import TargetStates, states_of_target
from eyas_draft.target_weights import TargetWeights
from eyas_serve.probe.protocol import METADATA, VERSION
from eyas_serve.probe.record import Record, read_record

PREFIX = "layers.0."


@dataclass
class Served:
    """What a server holds; tests spoil it.

    Attributes:
        weights: of the draft, by trainer's name.
        embedding, head, map: as served.
        layers: outputs of these target layers are handed over; `only` one state instead.
        states: replaces the target's states.
        shift: whether the draft's tokens are shifted by one.
        changes: of the draft's config.
        after: spoils the finished tensors.
    """

    weights: dict[str, Tensor]
    embedding: Tensor
    head: Tensor
    map: Tensor
    layers: tuple[int, ...]
    only: bool = False
    states: Tensor | None = None
    shift: bool = True
    next_token: int | None = None
    changes: dict[str, Any] = field(default_factory=dict)
    after: Callable[[dict[str, Tensor]], None] = lambda tensors: None


class Bench:
    """A draft with its golden record, and servers of it."""

    def __init__(self, draft: Path, target: Path) -> None:
        self.golden: GoldenRecord = load_golden(draft)
        self.source = read_source(ConvertConfig(draft, draft, target=target))
        spec = TargetSpec.from_folder(target)
        self.staged, self.map = staged_draft(self.source, TargetWeights.load(target, spec), spec)
        every = tuple(range(spec.num_layers))
        count = len(self.golden.golden.input_ids)
        self.states: TargetStates = states_of_target(target, every, count, "", "cpu", "float32")
        assert tuple(self.states.input_ids_t.tolist()) == self.golden.golden.input_ids

    def served(self) -> Served:
        """A right server."""
        weights = {name: value.clone() for name, value in self.staged.weights.items()}
        return Served(weights, self.staged.embedding_vh.clone(), self.staged.head_vh.clone(), self.map.clone(),
                      self.golden.golden.aux_layer_ids)

    def record(self, served: Served, path: Path, dtype: torch.dtype = torch.float32) -> tuple[Record, int]:
        """What such a server records, in the arithmetic of `dtype` (values rounded to it)."""
        facts = self.golden.golden
        ids = self.states.input_ids_t
        next_token = facts.next_id if served.next_token is None else served.next_token
        following = torch.cat((ids[1:], torch.tensor([next_token]))) if served.shift else ids
        chunks = self.states.aux_tke.float().chunk(facts.num_layers, dim=-1)
        aux = torch.cat([chunks[k] for k in served.layers], dim=-1) if served.states is None else served.states
        neutral = dataclasses.replace(self.source.neutral, **served.changes)
        draft = StagedDraft(neutral, served.weights, served.embedding, served.head)
        stages = draft.run(following, aux)
        tensors = {name: value.to(dtype) for name, value in stages.values.items()}
        if served.only:
            tensors = {name: value for name, value in tensors.items() if not name.startswith(("aux", "fused"))}
            tensors["states"] = tensors["fused"] = chunks[-1].to(dtype)
        handed_on = "norm" if "norm_output" in neutral.norms else "layer"
        best = stages.logits_tv.topk(32, dim=-1)
        tensors |= {"handed_on": tensors[handed_on], "positions": torch.arange(len(ids)), "input_ids": following,
                    "map": served.map.to(torch.int32), "rope": stages.rope, "best_ids": best.indices.to(torch.int32),
                    "best_scores": best.values}
        served.after(tensors)
        plain = {"protocol": VERSION, "sglang": "0.5.20", "draft_class": "LlamaForCausalLMEagle3", "trouble": [],
                 "num_aux": len(served.layers), "dtype": str(dtype).removeprefix("torch."),
                 "norm_output": "norm_output" in neutral.norms, "statistics": {
                     name: [list(v.shape), str(v.dtype), float(v.float().mean()), float(v.float().std())]
                     for name, v in tensors.items() if v.is_floating_point()}}
        apart = {name: value.contiguous().clone() for name, value in tensors.items()}
        save_file(apart, path, {METADATA: json.dumps(plain)})
        return read_record(path, len(ids)), next_token


def theta(value: float) -> Callable[[Served], None]:
    """Another base frequency."""
    def spoil(served: Served) -> None:
        served.changes["rope"] = Rope("default", value)
    return spoil
