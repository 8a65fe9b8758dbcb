"""The optimiser's moments before the first step."""

from __future__ import annotations

import torch
from torch import Tensor


def start_moments(optimizer: torch.optim.Optimizer) -> None:
    """Make the state exist where it does not: a step of rate zero over gradients of zero, not counted."""
    if optimizer.state:
        return
    groups = optimizer.param_groups
    rates = [group["lr"] for group in groups]
    for group in groups:
        group["lr"] = torch.zeros_like(group["lr"]) if isinstance(group["lr"], Tensor) else 0.0
        for parameter in group["params"]:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    for group, rate in zip(groups, rates, strict=True):
        group["lr"] = rate
    for state in optimizer.state.values():
        state["step"].zero_()
