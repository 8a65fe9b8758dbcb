"""`eyas-draft eval`: prompts through the reference decoder, and a report of what was accepted."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, TextIO

import torch
from transformers import AutoTokenizer

from eyas_contract import Contract, InvalidInput
from eyas_contract.commands import Progress
from eyas_draft.config import EvalConfig
from eyas_draft.decode import Answer, Decoder
from eyas_draft.loading import load_draft
from eyas_draft.ops import get_ops
from eyas_draft.prompts import read_prompts
from eyas_draft.ranges import require_in_range
from eyas_draft.ranks import usable_device
from eyas_draft.rounds import TreeShape
from eyas_draft.setup import draft_ids, require_target
from eyas_draft.target_model import TargetModel
from eyas_draft.target_weights import TargetWeights
from eyas_draft.walk import Walk


def evaluate(config: EvalConfig, stream: TextIO | None = None) -> dict[str, Any]:
    """Decode all prompts and report.

    Returns:
        `acceptance_length` (tokens per round over all rounds, bonus counted, the prompt pass's token not),
        `acceptance_length_mean_of_prompts`, `position_rates`, `histogram` (rounds by accepted draft tokens),
        `rounds`, `tokens`, `seconds`, the shape, `outputs` (answer ids); with compare_greedy also `outputs_identical`
        and `different` (indices of prompts whose answers differ).

    Raises:
        ContractMismatch: the draft belongs to another target.
        InvalidInput, CorruptFile: see `require_in_range`, `usable_device`, `load_draft`, `read_prompts`, `check_shape`.
    """
    require_in_range(config)
    device, dtype = usable_device(config.device), getattr(torch, config.dtype)
    if config.ops == "native" and device.type != "cpu":
        raise InvalidInput("--ops", f"native on {config.device}", "native on the cpu, or torch on any device",
                           "Give --ops torch.")
    spec = require_target(Contract.load(config.draft), config.draft, config.target)
    prompts = read_prompts(config.prompts, AutoTokenizer.from_pretrained(config.target), config.limit)  # before weights
    weights = TargetWeights.load(config.target, spec)
    draft, contract = load_draft(config.draft, weights.embedding_vh)
    target = TargetModel(config.target, contract.capture.aux_layer_ids, dtype, device)
    shape = TreeShape(config.steps, config.topk, config.num_draft_tokens or config.steps + 1)
    decoder = Decoder(target, draft.to(device, dtype), draft_ids(contract), shape, get_ops(config.ops),
                      config.max_new_tokens)
    return run(decoder, prompts, config, stream)


def run(decoder: Decoder, prompts: Sequence[list[int]], config: EvalConfig,
        stream: TextIO | None = None) -> dict[str, Any]:
    """Decode prompts of similar length together and sum up, in the prompts' order."""
    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    parts = [order[start:start + config.batch_size] for start in range(0, len(order), config.batch_size)]
    answers: dict[int, Answer] = {}
    progress, made = Progress(len(prompts), "prompts", "eval", stream=stream), 0
    begun = time.monotonic()

    def count(tokens: int, prompts_done: int = 0) -> None:
        nonlocal made
        made += tokens
        progress.update(prompts_done, f"{made / (time.monotonic() - begun):,.0f} tokens/s")

    for part in parts:
        done = decoder.decode([prompts[i] for i in part], count)
        answers |= dict(zip(part, done, strict=True))
        count(0, len(part))
    seconds = time.monotonic() - begun
    ordered = [answers[i] for i in range(len(prompts))]
    report = summary(ordered, decoder.shape, seconds)
    progress.close(f"{report['tokens_per_second']:,.0f} tokens/s, acceptance length {report['acceptance_length']:.3f} "
                   "(bonus counted)")
    if config.compare_greedy:
        plain: dict[int, list[int]] = {}
        progress = Progress(len(prompts), "prompts", "without the draft", stream=stream)
        for part in parts:
            plain |= dict(zip(part, decoder.greedy([prompts[i] for i in part]), strict=True))
            progress.update(len(part))
        progress.close()
        different = [i for i in range(len(prompts)) if plain[i] != ordered[i].tokens]
        report |= {"outputs_identical": not different, "different": different}
    return report


def summary(answers: Sequence[Answer], shape: TreeShape, seconds: float) -> dict[str, Any]:
    """The report's numbers."""
    histogram = [0] * (shape.steps + 1)
    for answer in answers:
        for count in answer.accepted:
            histogram[count] += 1
    walked = Walk(tuple(histogram))
    each = [1 + sum(a.accepted) / len(a.accepted) for a in answers if a.accepted]
    tokens = sum(len(a.tokens) for a in answers)
    return {"acceptance_length": walked.acceptance_length,
            "acceptance_length_mean_of_prompts": sum(each) / len(each) if each else 1.0,
            "position_rates": list(walked.rates), "histogram": histogram, "rounds": walked.rounds,
            "prompts": len(answers), "tokens": tokens, "seconds": round(seconds, 3),
            "tokens_per_second": round(tokens / seconds, 2) if seconds else 0.0,
            "steps": shape.steps, "topk": shape.topk, "num_draft_tokens": shape.num_nodes,
            "outputs": [a.tokens for a in answers]}
