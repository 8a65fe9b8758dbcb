"""What a run will need, from configs alone: memory of a GPU, hours, checkpoints. Nothing is loaded or written.

Weights, gradients, moments, tables and states are counted exactly; activations are estimated from the tensors that one
TTT step keeps for its backward pass (said to be an estimate). Hours come from the operations of `flops.py` and a rate:
a measured one, or a share of the device's peak.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from eyas_contract import Contract, DraftSpec, InvalidInput, Manifest, TargetSpec, draft_tensors
from eyas_draft.config import PlanConfig
from eyas_draft.flops import peak_flops, step_flops
from eyas_draft.ranges import require_in_range
from eyas_draft.sizes import draft_sizes

FP32, BF16, I64 = 4, 2, 8
GIB = 2 ** 30
NUM_AUX = 3  # states of a token, as long as no store says otherwise


@dataclass(frozen=True)
class Needs:
    """Of a run; memory in GiB on each GPU.

    Attributes:
        parameters: of the draft.
        memory: part -> GiB, exact but for `activations`.
        total: their sum.
        steps: optimiser steps; `tokens` in all; `flops` of all steps.
        hours: at `rate` operations a second on each of `gpus`; None where the device's peak is not known.
        checkpoint: GiB of one checkpoint, `export` of the exported draft, `states` of the store on disk.
    """

    parameters: int
    memory: dict[str, float]
    total: float
    steps: int
    tokens: int
    flops: float
    rate: float | None
    hours: float | None
    checkpoint: float
    export: float
    states: float


def plan(config: PlanConfig) -> Needs:
    """Work out what a run needs.

    Raises:
        InvalidInput: no target, neither a store nor a number of tokens, or settings out of their ranges.
    """
    require_in_range(config)
    target = TargetSpec.from_folder(config.target)
    tokens, trained, mean, aux = _data(config, target)
    spec = draft_sizes(config, target, aux, min(config.vocab_size or target.vocab_size, target.vocab_size))
    parameters = sum(math.prod(shape) for shape in draft_tensors(spec).values())
    documents = max(1, round(config.tokens_per_batch / mean))
    scored = max(1, round(config.tokens_per_batch * trained / tokens))
    batches = config.epochs * max(1, math.ceil(tokens / config.tokens_per_batch))
    steps = max(1, batches // config.accumulate)
    flops = batches * step_flops(spec, [config.tokens_per_batch // documents] * documents, scored, config.ttt_steps)
    states = tokens * ((aux + 1) * target.hidden_size * BF16 + 5)
    memory = _memory(config, spec, parameters, scored, states)
    peak = peak_flops(config.gpu)
    rate = config.flops_per_second or (config.mfu * peak if peak else None)
    return Needs(parameters, memory, round(sum(memory.values()), 2), steps, tokens * config.epochs, flops, rate,
                 round(flops / rate / config.gpus / 3600, 3) if rate else None,
                 round(parameters * 3 * FP32 / GIB, 3), round(parameters * BF16 / GIB, 3), round(states / GIB, 2))


def _data(config: PlanConfig, target: TargetSpec) -> tuple[int, int, float, int]:
    """Tokens, trained ones, mean length of a sample, number of aux states."""
    if config.store is not None:
        manifest, contract = Manifest.load(config.store), Contract.load(config.store)
        if not manifest.num_tokens:
            raise InvalidInput(str(config.store), "no tokens", "a store with samples", "Extract first.")
        return (manifest.num_tokens, manifest.num_trained, manifest.num_tokens / manifest.num_samples,
                len(contract.capture.aux_layer_ids))
    if config.tokens < 1:
        raise InvalidInput("--tokens", str(config.tokens), "a --store, or a number of tokens", "Give one of them.")
    return (config.tokens, round(config.tokens * config.trained_share), float(config.mean_length),
            NUM_AUX)


def _memory(config: PlanConfig, spec: DraftSpec, parameters: int, scored: int, states: float) -> dict[str, float]:
    """GiB by part on each GPU."""
    held = parameters / config.gpus
    rows, widths = config.tokens_per_batch, spec.head_dim + spec.value_dim
    latents = spec.mla.q_lora_rank + spec.mla.kv_lora_rank + spec.mla.qk_rope_head_dim if spec.mla else 0
    step = BF16 * rows * (9 * spec.hidden_size + 2 * widths * (spec.num_heads + spec.num_kv_heads) + 3 * latents
                          + 3 * spec.intermediate_size)
    head_gradients = config.ttt_steps * spec.draft_vocab_size * spec.hidden_size * BF16
    logits = scored * (2 * spec.draft_vocab_size * (FP32 + BF16) + spec.target_vocab_size * BF16)
    parts = {
        "weights, gradients, moments (fp32)": 4.0 * FP32 * held,
        "whole weights during a pass": FP32 * parameters if config.gpus > 1 else 0.0,
        "weights in bf16 during a pass": float(BF16 * parameters),
        "embedding (fp32)": float(FP32 * spec.target_vocab_size * spec.hidden_size),
        "target's head, whole and draft rows": float(BF16 * (spec.target_vocab_size + spec.draft_vocab_size)
                                                     * spec.target_hidden_size),
        "batch of states": float(BF16 * rows * (spec.num_aux + 1) * spec.target_hidden_size),
        "store on the device": states if config.resident else 0.0,
        "activations (estimate)": float(step * config.ttt_steps * spec.num_layers + head_gradients + logits),
    }
    return {name: round(value / GIB, 3) for name, value in parts.items() if value}


def render(needs: Needs, config: PlanConfig) -> str:
    """Plain text for a terminal."""
    lines = [f"draft of {needs.parameters / 1e6:,.1f} M parameters; {needs.tokens:,} tokens in {needs.steps:,} steps, "
             f"{needs.flops:.2e} operations", f"GPU memory, each of {config.gpus}: {needs.total:.2f} GiB"]
    lines += [f"  {value:9.2f}  {name}" for name, value in needs.memory.items()]
    lines.append(f"checkpoint {needs.checkpoint:.2f} GiB, exported draft {needs.export:.2f} GiB, states on disk "
                 f"{needs.states:.1f} GiB")
    lines.append("hours: unknown, name a known --gpu or give --flops-per-second" if needs.hours is None else
                 f"hours: {needs.hours:.2f} at {(needs.rate or 0) / 1e12:,.0f} T operations/s on each of {config.gpus}")
    return "\n".join(lines)

