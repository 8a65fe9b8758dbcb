"""What is wrong with a layer's states, in the words that rejects and damage reports use."""

from __future__ import annotations

import math

import torch


def layer_fault(values: torch.Tensor, name: str) -> str:
    """Why states [T, H] of the layer `name` cannot be trained on; empty where they can.

    The least and the greatest, found in one pass, show NaN, infinity and nothing but zeros; only then the bad are
    counted.
    """
    if values.element_size() == 1:
        values = values.float()  # torch counts nothing in e4m3
    least, greatest = map(float, torch.aminmax(values)) if values.numel() else (0.0, 0.0)
    if not (math.isfinite(least) and math.isfinite(greatest)):
        return f"{values.numel() - int(torch.isfinite(values).sum())} non-finite values in the states of {name}"
    return f"all states of {name} are zero" if least == greatest == 0 else ""
