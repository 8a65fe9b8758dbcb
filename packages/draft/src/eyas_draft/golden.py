"""`eyas-draft golden`: the record of what a draft must receive, compute and propose, written beside its weights."""

from __future__ import annotations

from importlib.metadata import version

import torch
from torch import Tensor

from eyas_contract import TargetSpec
from eyas_contract.errors import InvalidInput
from eyas_contract.floats import FLOATS
from eyas_contract.golden import (
    LAYERS,
    MAP,
    PROPOSALS,
    RECORD_NAME,
    ROPE,
    SCORES,
    Golden,
    StageStatistics,
    Values,
    save_golden,
    spread,
    stage_order,
)
from eyas_contract.outputs import require_place
from eyas_draft.convert import ConvertConfig, Source, read_source
from eyas_draft.golden_config import GoldenConfig
from eyas_draft.golden_stages import StagedDraft, Stages
from eyas_draft.golden_target import TargetStates, states_of_store, states_of_target
from eyas_draft.mapped import map_tensor
from eyas_draft.ranks import usable_device
from eyas_draft.target_weights import TargetWeights

ROWS, LAYER_ROWS, TOP = 16, 2, 16
WIDE = 2048  # from this hidden size on values are stored in bfloat16, which keeps the record to a few MB


@torch.no_grad()
def make_golden(config: GoldenConfig) -> dict[str, object]:
    """Make and write a record; returns a summary.

    Raises:
        InvalidInput, CorruptFile: a draft, target or store that cannot be read or does not go together, or a device
            that is not there.
    """
    if not 8 <= config.tokens <= 1024:
        raise InvalidInput("--tokens", str(config.tokens), "8 to 1024", "Choose such a number.")
    usable_device(config.device)
    source = read_source(ConvertConfig(config.draft, config.draft, target=config.target, ids_mean=config.ids_mean,
                                       aux_layer_ids=config.aux_layer_ids, read_as=config.read_as,
                                       vocab_from=config.vocab_from))
    _require_plain(config, source)
    require_place(config.draft / RECORD_NAME, "a file beside the draft's weights, by eyas-draft golden")
    spec = TargetSpec.from_folder(config.target)
    ids = source.ids
    if ids is None:
        raise InvalidInput(str(config.draft / "config.json"), "no aux layer ids", "the layers that the draft was "
                           "trained on", "Name them with --aux-layer-ids (outputs of layers, 0-based).")
    if max(ids) >= spec.num_layers:
        raise InvalidInput("aux layer ids", str(list(ids)), f"layers below {spec.num_layers}, the target's",
                           "Give the draft's own target, or --ids-mean boundary.")
    weights = TargetWeights.load(config.target, spec)
    if config.store is not None:
        states = states_of_store(config.store, config.target, ids, config.tokens, weights)
    else:
        states = states_of_target(config.target, ids, config.tokens, config.text, config.device, config.dtype)
    draft, to_target = staged_draft(source, weights, spec)
    stages = draft.run(torch.cat((states.input_ids_t[1:], torch.tensor([states.next_id]))), states.aux_tke.float())
    golden, values = _record(config, source, spec, states, stages, to_target)
    path = save_golden(config.draft, golden, values)
    return {"golden": str(path), "tokens": len(golden.input_ids), "aux_layer_ids": list(ids), "source": golden.source,
            "bytes": sum(len(v.data) for v in values.values())}


def _require_plain(config: GoldenConfig, source: Source) -> None:
    """Refuse weights that mean nothing without their scales. Raises InvalidInput."""
    codes = [f"{name} in {info.dtype}" for name, info in source.named.items()
             if name not in ("d2t", "t2d") and info.dtype not in FLOATS]
    if codes:
        raise InvalidInput(str(config.draft), ", ".join(sorted(codes)[:5]), f"weights in {', '.join(FLOATS)}, by "
                           "eyas-draft golden", "Make the record of the draft before it was quantised.")


def staged_draft(source: Source, weights: TargetWeights, spec: TargetSpec) -> tuple[StagedDraft, Tensor]:
    """The draft with the embedding and head that it is served with, and the target id of each draft id [V]."""
    named = {name: map_tensor(info) for name, info in source.named.items()}
    base = source.neutral.base
    shared = source.neutral.target_hidden_size in (None, base.get("hidden_size"))
    embedding = weights.embedding_vh if shared else named.get("embed_tokens.weight", weights.embedding_vh)
    head = named.get("lm_head.weight", weights.head_vh).float()
    if embedding.shape[1] != base.get("hidden_size"):
        raise InvalidInput("embed_tokens.weight", f"width {embedding.shape[1]}", f"{base.get('hidden_size')}, the "
                           "draft's hidden_size", "A draft of another width than its target brings its own embedding.")
    if "d2t" in source.extra:
        entry = source.extra["d2t"]
        assert isinstance(entry, tuple)
        offsets = torch.frombuffer(bytearray(entry[1]), dtype=torch.int64)
    elif head.shape[0] != spec.vocab_size and "d2t" in named:
        offsets = named["d2t"].long()
    else:
        offsets = torch.zeros(head.shape[0], dtype=torch.int64)
    return StagedDraft(source.neutral, named, embedding, head), offsets + torch.arange(head.shape[0])


def _record(config: GoldenConfig, source: Source, spec: TargetSpec, states: TargetStates, stages: Stages,
            to_target: Tensor) -> tuple[Golden, dict[str, Values]]:
    count = len(states.input_ids_t)
    rows = spread(count, ROWS)
    order = [name for name in stage_order(len(source.ids or ())) if name in stages.values]
    best = stages.logits_tv[list(rows)].topk(min(TOP, stages.logits_tv.shape[1]), dim=-1)
    narrow = spec.hidden_size >= WIDE
    values = {name: floats(stages.values[name][list(rows)], narrow) for name in order}
    values |= {ROPE: floats(stages.rope[list(rows)], False), SCORES: floats(best.values, False),
               PROPOSALS: integers(to_target[best.indices]), MAP: integers(to_target)}
    if states.layer_positions:
        values[LAYERS] = floats(states.layers_pne, narrow)
    golden = Golden(
        made_by=f"eyas-draft {version('eyas-draft')}", source="store" if config.store else "target",
        target_architecture=spec.architecture, num_layers=spec.num_layers, hidden_size=spec.hidden_size,
        target_vocab_size=spec.vocab_size, draft_kind=source.neutral.kind, aux_layer_ids=source.ids or (),
        input_ids=tuple(states.input_ids_t.tolist()), next_id=states.next_id, positions=rows,
        layer_positions=states.layer_positions, norm_output="norm_output" in source.neutral.norms,
        rope=source.neutral.rope, draft_vocab_size=len(to_target),
        stages=tuple(_statistics(name, stages.values[name], states.dtype) for name in order))
    return golden, values


def _statistics(name: str, value: Tensor, states_dtype: str) -> StageStatistics:
    wide = value.double()
    dtype = states_dtype if name.startswith("aux.") else "float32"
    return StageStatistics(name, tuple(value.shape), dtype, round(float(wide.mean()), 9), round(float(wide.std()), 9))


def floats(value: Tensor, narrow: bool) -> Values:
    """Values in BF16 or F32."""
    dtype, name = (torch.bfloat16, "BF16") if narrow else (torch.float32, "F32")
    return Values(name, tuple(value.shape), value.to(dtype).contiguous().view(torch.uint8).numpy().tobytes())


def integers(value: Tensor) -> Values:
    """Values in I32."""
    return Values("I32", tuple(value.shape), value.to(torch.int32).contiguous().numpy().tobytes())
