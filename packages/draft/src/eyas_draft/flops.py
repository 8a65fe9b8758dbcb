"""Floating-point operations that training needs: those of matrix products, a multiply-add being two."""

from __future__ import annotations

from collections.abc import Sequence

from eyas_contract import DraftSpec, draft_tensors

PEAK = {"H200 NVL": 835e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12, "H100": 989e12, "A100": 312e12,
        "GB200": 2500e12, "B200": 2250e12, "RTX PRO 6000": 503.8e12}
"""Dense bf16 operations a second by the vendors' datasheets, by words of the device's name, the first that fit."""


def layer_weights(spec: DraftSpec) -> int:
    """Weights that a row meets at every TTT step (head apart)."""
    return sum(shape[0] * shape[1] for name, shape in draft_tensors(spec).items()
               if name.startswith("layers.") and len(shape) == 2)


def step_flops(spec: DraftSpec, lengths: Sequence[int], scored: int, ttt_steps: int) -> float:
    """Of one forward and backward pass over a batch.

    Args:
        lengths: tokens per document.
        scored: rows whose prediction counts at step 0.
        ttt_steps: unrolled steps.
    """
    tokens = sum(lengths)
    # A row further back scores at each step what the one before scored, unless that lies too near the beginning.
    rows = [min(scored, sum(max(0, n - 2 - i) for n in lengths)) for i in range(ttt_steps)]
    forward = 2.0 * ttt_steps * tokens * layer_weights(spec)
    fuse = 2.0 * tokens * spec.num_aux * spec.target_hidden_size * spec.hidden_size
    forward += 2.0 * sum(rows) * spec.hidden_size * spec.draft_vocab_size
    width = spec.num_heads * (spec.head_dim + spec.value_dim) * spec.num_layers
    forward += 2.0 * width * (ttt_steps * sum(n * (n + 1) / 2 for n in lengths)  # the causal prefix
                              + tokens * sum(range(ttt_steps)))  # and the diagonals
    seen = spec.draft_vocab_size + (0 if spec.draft_vocab_size == spec.target_vocab_size else spec.target_vocab_size)
    fuse *= 3 if spec.fc_norm else 2  # nothing before `fc` but its norms has a gradient
    return 3 * forward + fuse + 2.0 * scored * spec.target_hidden_size * seen  # the target's head is not trained


def peak_flops(device_name: str) -> float | None:
    """Of a device by its name, None where it is not known."""
    return next((value for word, value in PEAK.items() if word in device_name), None)
