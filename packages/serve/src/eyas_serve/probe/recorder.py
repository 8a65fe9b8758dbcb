"""Records what the draft receives and computes for a marked request. Runs inside every rank of SGLang."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eyas_serve.guard.forward import fc_width
from eyas_serve.guard.state import GUARD
from eyas_serve.probe.protocol import (
    BEST_IDS,
    BEST_SCORES,
    KEPT,
    MAP,
    MAX_TOKENS,
    METADATA,
    NUM_BEST,
    POSITIONS,
    PREFIX,
    ROPE,
    STATES,
    VERSION,
    is_probe,
    record_path,
)
from eyas_serve.probe.taps import TROUBLE, Taps

if TYPE_CHECKING:
    from torch import Tensor

PARTS: dict[str, list[dict[str, Tensor]]] = {}
"""Chunks of prompts whose prefill is not done, by request id."""


def record_prefill(original: Callable[..., Any], worker: Any, batch: Any, target_hidden_states: Any,
                   *args: Any, **kwargs: Any) -> Any:
    """AROUND hook of `EagleDraftWorker._draft_extend_for_prefill`: records the marked requests of the batch."""
    marked = [(i, request) for i, request in enumerate(getattr(batch, "reqs", None) or ()) if is_probe(request.rid)]
    if not marked:
        return original(worker, batch, target_hidden_states, *args, **kwargs)
    lengths = list(batch.extend_lens)
    states = target_hidden_states.detach().clone()
    taps, runner = Taps(), worker.draft_runner
    graph, runner.prefill_cuda_graph_runner = getattr(runner, "prefill_cuda_graph_runner", None), None
    try:
        with taps.on(runner.model):  # eagerly: a replayed graph runs no hooks
            result = original(worker, batch, target_hidden_states, *args, **kwargs)
    finally:
        runner.prefill_cuda_graph_runner = graph
    for index, request in marked:
        start = sum(lengths[:index])
        try:
            _take(worker, request, taps, states, index, start, start + lengths[index])
        except TROUBLE as error:
            PARTS.pop(request.rid, None)
            taps.trouble.append(f"record: {type(error).__name__}: {error}")
            _write_text_record(request.rid, taps.trouble)
    return result


def _take(worker: Any, request: Any, taps: Taps, states: Tensor, index: int, start: int, stop: int) -> None:
    """Keep one chunk's rows; write the record with the last one."""
    if len(request.origin_input_ids) > MAX_TOKENS:
        return
    rows = {STATES: states[start:stop].cpu()}
    for name, value in taps.values.items():
        if name != "logits" and value.shape[0] >= stop:
            rows[name] = value[start:stop].cpu()
    parts = PARTS.setdefault(request.rid, [])
    parts.append(rows)
    begun = int(parts[0][POSITIONS][0]) if POSITIONS in parts[0] else 0
    if begun + sum(part[STATES].shape[0] for part in parts) < len(request.origin_input_ids):
        return
    import torch

    parts = PARTS.pop(request.rid)
    tensors = {name: torch.cat([part[name] for part in parts]) for name in parts[0]
               if all(name in part for part in parts)}
    model = worker.draft_runner.model
    logits = taps.values.get("logits")
    last = logits[index:index + 1].float().cpu() if logits is not None and logits.shape[0] > index else None
    tensors |= _extras(model, worker, tensors, last)
    _split_states(model, tensors)
    _write(request.rid, tensors, _facts(worker, model, tensors, taps.trouble))


def _split_states(model: Any, tensors: dict[str, Tensor]) -> None:
    """The states as `aux.i` where they are as wide as `fc` reads; else they stay one tensor."""
    if tensors[STATES].shape[-1] == fc_width(model.model):
        chunks = tensors.pop(STATES).chunk(model.model.num_aux_hidden_states, dim=-1)
        tensors |= {f"aux.{i}": chunk.contiguous() for i, chunk in enumerate(chunks)}


def _extras(model: Any, worker: Any, tensors: dict[str, Tensor], last: Tensor | None) -> dict[str, Tensor]:
    """The vocabulary map, the best proposals, the rotary table at the positions seen."""
    import torch

    size, result = int(model.config.draft_vocab_size or model.config.vocab_size), {}
    hot = worker.hot_token_id
    result[MAP] = (torch.arange(size) if hot is None else hot.detach().cpu()).to(torch.int32)
    head, normed = getattr(model.lm_head, "weight", None), tensors.get("norm")
    if head is not None and normed is not None and head.is_floating_point() and head.shape[0] >= size:
        scores = (normed.to(head.device, head.dtype) @ head[:size].T).float().cpu()
        if last is not None and last.shape[-1] >= size:
            scores[-1] = last[0, :size]  # what the server itself computed
    else:
        scores = last[:, :size] if last is not None else None
    if scores is not None:
        best = scores.nan_to_num(-3e38).topk(min(NUM_BEST, scores.shape[-1]), dim=-1)
        result |= {BEST_IDS: best.indices.to(torch.int32), BEST_SCORES: best.values}
    inner = model.model
    layer = inner.layers[0] if hasattr(inner, "layers") else inner.midlayer
    table = getattr(getattr(layer.self_attn, "rotary_emb", None), "cos_sin_cache", None)
    if table is not None and POSITIONS in tensors and int(tensors[POSITIONS].max()) < table.shape[0]:
        result[ROPE] = table[tensors[POSITIONS].to(table.device)].float().cpu()
    return result


def _facts(worker: Any, model: Any, tensors: dict[str, Tensor], trouble: list[str]) -> dict[str, Any]:
    inner = model.model
    statistics = {}
    for name, value in tensors.items():
        if value.is_floating_point() and value.dim() == 2:
            wide = value.double()
            statistics[name] = [list(value.shape), str(value.dtype).removeprefix("torch."), float(wide.mean()),
                                float(wide.std()) if wide.numel() > 1 else 0.0]
    return {"protocol": VERSION, "sglang": version("sglang"), "draft_class": type(model).__name__,
            "rank": GUARD.status.rank, "num_aux": inner.num_aux_hidden_states, "trouble": trouble,
            "norm_output": bool(getattr(inner, "norm_output", False)), "guard": GUARD.mode,
            "dtype": str(next(model.parameters()).dtype).removeprefix("torch."), "statistics": statistics}


def _write(rid: str, tensors: dict[str, Tensor], facts: dict[str, Any]) -> None:
    from safetensors.torch import save

    path = record_path(rid)
    if path is None:
        return
    raw = save({name: value.contiguous() for name, value in tensors.items()}, {METADATA: json.dumps(facts)})
    _place(path, raw)


def _write_text_record(rid: str, trouble: list[str]) -> None:
    path = record_path(rid)
    if path is not None:
        import torch
        from safetensors.torch import save

        facts = {"protocol": VERSION, "sglang": version("sglang"), "trouble": trouble}
        _place(path, save({"nothing": torch.zeros(1)}, {METADATA: json.dumps(facts)}))


def _place(path: Path, raw: bytes) -> None:
    """Ranks of one tensor-parallel group write the same record: the last replaces the others, always whole."""
    temporary = path.with_suffix(f".{os.getpid()}.tmp")
    temporary.write_bytes(raw)
    temporary.replace(path)
    old = sorted(path.parent.glob(f"{PREFIX}*.safetensors"), key=lambda file: file.stat().st_mtime)
    for file in old[:-KEPT]:
        file.unlink(missing_ok=True)
