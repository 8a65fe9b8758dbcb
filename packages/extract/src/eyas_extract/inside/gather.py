"""K layers' rows side by side, in the dtype of the store: by our kernels where they run, else by torch, and it is said.

Shapes: K sources [T, H] -> out [T, K*H], scales [K, T] where the store holds e4m3.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

E4M3_LARGEST = 448.0
SMALLEST = 1e-12  # an all-zero row's largest magnitude, so that its scale is no zero; the CUDA kernel's value
Gather = Callable[[Sequence[torch.Tensor], torch.Tensor, torch.Tensor | None], None]


def pick_gather(device: str, model: torch.dtype, stored: torch.dtype, hidden_size: int) -> tuple[str, Gather]:
    """What gathers here, with the reason where it is torch, and the function."""
    try:
        import eyas_native
    except ImportError as error:
        return f"torch ({error})", by_torch
    if device == "cpu":
        return "eyas_native", _whole_or_scaled(eyas_native.hidden_gather)
    from eyas_native import cuda

    half = (torch.bfloat16, torch.float16)
    if cuda.status() != "available":
        return f"torch ({cuda.status()})", by_torch
    if model not in half or stored not in (*half, torch.float8_e4m3fn) or hidden_size % 8:
        return f"torch (the kernel has no {model} to {stored} of width {hidden_size})", by_torch
    return "eyas_native.cuda", _whole_or_scaled(cuda.hidden_gather)


def _whole_or_scaled(hidden_gather: Callable[..., None]) -> Gather:
    """All layers in one call, or with scales, which are one a token and layer, a call a layer."""

    def gather(sources: Sequence[torch.Tensor], out: torch.Tensor, scales: torch.Tensor | None) -> None:
        if scales is None:
            hidden_gather(list(sources), None, out)
            return
        width = sources[0].shape[1]
        for k, source in enumerate(sources):
            hidden_gather([source], None, out[:, k * width:(k + 1) * width], row_scale=scales[k])

    return gather


def by_torch(sources: Sequence[torch.Tensor], out: torch.Tensor, scales: torch.Tensor | None) -> None:
    """The same in plain torch."""
    width = sources[0].shape[1]
    for k, source in enumerate(sources):
        part = out[:, k * width:(k + 1) * width]
        if scales is None:
            part.copy_(source)
        else:
            largest(source, scales[k])
            scales[k].clamp_(min=SMALLEST).div_(E4M3_LARGEST)
            part.copy_((source.float() / scales[k, :, None]).clamp(-E4M3_LARGEST, E4M3_LARGEST))


def largest(source: torch.Tensor, out: torch.Tensor) -> None:
    """Largest magnitude of each row, or NaN: source [..., H] -> out float32 [...]; a GPU makes no tensor between."""
    if source.device.type == "cpu":
        out.copy_(source.abs().amax(-1))
    else:
        torch.linalg.vector_norm(source, ord=float("inf"), dim=-1, dtype=torch.float32, out=out)
