"""A batch of prompts -> the target's own answers: left padding, a KV cache that is written in place, rows that leave.

Faster than `generate` on a CPU for three reasons: the cache is never concatenated, grouped-query attention runs
without copying keys for each query head, and finished rows leave the batch. A batch's result depends on the batch
alone, so the same batch decodes to the same tokens again.

Shapes: B rows, S positions, V vocabulary, G query heads per key head, D head width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.cache_utils import Cache, DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from eyas_contract import InvalidInput

ATTENTION = "eyas_grouped"
COMPACT_BELOW = 0.75  # share of rows still running below which the finished ones are dropped from the cache


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
        temperature: 0 is greedy.
        top_p: smallest set of tokens with this probability, 1 keeps all.
        top_k: the k likeliest tokens, 0 keeps all.
        seed: of the random numbers; each batch has its own stream.
    """

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < float("inf") or not 0 < self.top_p <= 1 or self.top_k < 0:
            raise InvalidInput("sampling", f"temperature {self.temperature}, top_p {self.top_p}, top_k {self.top_k}",
                               "a finite temperature >= 0, 0 < top_p <= 1, top_k >= 0", "Correct the flags.")


class PreallocatedLayer(DynamicLayer):  # type: ignore[misc]  # transformers has no types
    """One layer's keys and values in buffers that double when full, so a step writes only its own tokens."""

    keys: torch.Tensor
    values: torch.Tensor

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any,
               **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """Append states [B, H, q, D]; returns views of all so far [B, H, S, D]."""
        past = self.get_seq_length()
        end = past + key_states.shape[-2]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
            self.buffers = [state.new_empty(*state.shape[:2], end + 32, state.shape[3])
                            for state in (key_states, value_states)]
        if end > self.buffers[0].shape[2]:
            self.buffers = [torch.cat([b, torch.empty_like(b)], dim=2) for b in self.buffers]
        self.keys, self.values = (b[:, :, :end] for b in self.buffers)
        self.keys[:, :, past:] = key_states
        self.values[:, :, past:] = value_states
        return self.keys, self.values

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep these rows."""
        end = self.get_seq_length()
        self.buffers = [b[indices] for b in self.buffers]
        self.keys, self.values = (b[:, :, :end] for b in self.buffers)


def grouped_attention(module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
                      attention_mask: torch.Tensor | None, dropout: float = 0.0, scaling: float | None = None,
                      **kwargs: Any) -> tuple[torch.Tensor, None]:
    """Attention of Hugging Face's interface; for one new token, the G queries of a key head act as G positions."""
    batch, heads, length, _ = query.shape
    if length != 1 or attention_mask is None:
        result: tuple[torch.Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs)
        return result
    grouped = query.view(batch, key.shape[1], heads // key.shape[1], query.shape[3])
    out = F.scaled_dot_product_attention(grouped, key, value, attn_mask=attention_mask, scale=scaling)
    return out.reshape(batch, 1, heads, value.shape[3]), None


AttentionInterface.register(ATTENTION, grouped_attention)
AttentionMaskInterface.register(ATTENTION, sdpa_mask)


def choose(logits: torch.Tensor, sampling: Sampling, generator: torch.Generator | None) -> torch.Tensor:
    """Next token of each row, int64 [B], from logits [B, V]."""
    if sampling.temperature == 0:
        return _argmax(logits)
    scores = logits.float() / sampling.temperature
    if sampling.top_k:
        floor = scores.topk(min(sampling.top_k, scores.shape[-1]), dim=-1).values[:, -1:]
        scores = scores.masked_fill(scores < floor, -torch.inf)
    if sampling.top_p < 1:
        ordered, index = scores.sort(dim=-1, descending=True)
        before = ordered.softmax(-1).cumsum(-1) - ordered.softmax(-1)
        ordered = ordered.masked_fill(before >= sampling.top_p, -torch.inf)
        scores = torch.empty_like(scores).scatter_(-1, index, ordered)
    return torch.multinomial(scores.softmax(-1), 1, generator=generator)[:, 0]


def _argmax(logits: torch.Tensor) -> torch.Tensor:
    """First index of each row's maximum; in two passes, since one is slow on a CPU."""
    rows, width = logits.shape
    block = 64
    if width % block:
        return logits.argmax(-1)
    blocks = logits.view(rows, width // block, block)
    best = blocks.amax(-1).argmax(-1)
    inside = blocks[torch.arange(rows, device=logits.device), best].argmax(-1)
    return best * block + inside


@torch.inference_mode()
def decode(model: Any, prompts: Sequence[Sequence[int]], *, stop_ids: frozenset[int], max_new_tokens: int,
           sampling: Sampling, stream: int = 0, on_tokens: Callable[[int], None] = lambda count: None
           ) -> list[list[int]]:
    """Answers of a batch of prompts, each ending with its stop token unless `max_new_tokens` came first.

    Args:
        model: causal language model with attention `ATTENTION` set.
        prompts: token ids of each prompt, none empty.
        stop_ids: tokens that end an answer.
        stream: number of the batch; with the seed it fixes the random numbers.
        on_tokens: told the number of tokens made at each step.
    """
    device = model.device
    width = max(map(len, prompts))
    ids = torch.tensor([[0] * (width - len(p)) + list(p) for p in prompts], device=device)
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts], device=device)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    generator = None
    if sampling.temperature > 0:
        generator = torch.Generator(device=device).manual_seed((sampling.seed * 1_000_003 + stream) % 2**63)
    cache = Cache(layer_class_to_replicate=PreallocatedLayer)
    answers: list[list[int]] = [[] for _ in prompts]
    rows = list(range(len(prompts)))
    running = [True] * len(rows)
    for _ in range(max_new_tokens):
        logits = model(input_ids=ids, attention_mask=mask, position_ids=positions, past_key_values=cache,
                       use_cache=True, logits_to_keep=1).logits[:, -1]
        chosen = choose(logits, sampling, generator)
        made = 0
        for at, token in enumerate(chosen.tolist()):
            if running[at]:
                answers[rows[at]].append(token)
                running[at] = token not in stop_ids
                made += 1
        on_tokens(made)
        if not any(running):
            break
        positions = positions[:, -1:] + 1
        if sum(running) < COMPACT_BELOW * len(rows):
            keep = [at for at, alive in enumerate(running) if alive]
            index = torch.tensor(keep, device=device)
            cache.batch_select_indices(index)
            chosen, mask, positions = chosen[index], mask[index], positions[index]
            rows, running = [rows[at] for at in keep], [True] * len(keep)
        ids = chosen[:, None]
        mask = F.pad(mask, (0, 1), value=1)
    return answers
