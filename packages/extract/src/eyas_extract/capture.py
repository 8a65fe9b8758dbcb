"""Token ids -> hidden states, by hooks on the target's decoder layers; and the check that they are the right ones.

Shapes: B rows, L positions, H hidden, K aux layers, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch

from eyas_contract import InvalidInput
from eyas_extract.target import Target

CHECK_TOKENS = 256
# Relative error allowed between head(norm(last)) and the model's logits: rounding of a few operations, each dtype.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 3e-2}


@dataclass(frozen=True)
class States:
    """Outputs of the aux layers, each [B, L, H], and of the last layer before the final norm, [B, L, H]."""

    aux: tuple[torch.Tensor, ...]
    last: torch.Tensor


class Capture:
    """Hooks on the aux layers and the last; use as a context manager.

    Args:
        target: the loaded target.
        aux_layer_ids: output of decoder layer k, 0-based.
    """

    def __init__(self, target: Target, aux_layer_ids: Sequence[int]) -> None:
        self.target, self.aux_layer_ids = target, tuple(aux_layer_ids)
        self.outputs: dict[int, torch.Tensor] = {}
        self.handles: list[Any] = []

    def __enter__(self) -> Capture:
        for k in {*self.aux_layer_ids, len(self.target.layers) - 1}:
            self.handles.append(self.target.layers[k].register_forward_hook(self._hook(k)))
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        for handle in self.handles:
            handle.remove()
        self.handles.clear()

    def _hook(self, k: int) -> Any:
        def keep(module: torch.nn.Module, arguments: Any, output: Any) -> None:
            self.outputs[k] = output[0] if isinstance(output, tuple) else output
        return keep

    @torch.inference_mode()
    def states(self, rows: Sequence[Sequence[int]]) -> States:
        """States of rows of token ids, padded on the right to the longest.

        Attention is causal, so padding changes no state of a row's own tokens and needs no mask.
        """
        width = max(map(len, rows))
        ids = torch.tensor([[*row, *[0] * (width - len(row))] for row in rows], device=self.target.model.device)
        self.outputs.clear()
        self.target.decoder(input_ids=ids, use_cache=False)
        return self._taken()

    def _taken(self) -> States:
        missing = [k for k in (*self.aux_layer_ids, len(self.target.layers) - 1) if k not in self.outputs]
        if missing:
            raise self._refusal([f"no output of layers {missing}"])
        return States(tuple(self.outputs[k] for k in self.aux_layer_ids), self.outputs[len(self.target.layers) - 1])

    def _refusal(self, faults: list[str]) -> InvalidInput:
        kind = type(self.target.model).__name__
        return InvalidInput(f"{kind} of {self.target.folder}", "; ".join(faults),
                            "aux states equal to hidden_states[k+1], and logits equal to head(norm(last state)), "
                            "by training", "Nothing was stored; this model class cannot be captured this way.")

    @torch.inference_mode()
    def check(self, row: Sequence[int]) -> str:
        """Prove on one row that the states are what the contract says; returns what was found.

        Raises:
            InvalidInput: they are not (every fault named).
        """
        target, row = self.target, list(row)[:CHECK_TOKENS]
        ids = torch.tensor([row], device=target.model.device)
        self.outputs.clear()
        full = target.model(input_ids=ids, use_cache=False, output_hidden_states=True)
        inside = self._taken()
        alone = self.states([row])
        tolerance = TOLERANCE.get(full.logits.dtype, 1e-4)
        faults, shape = [], (1, len(row), target.spec.hidden_size)
        finite = torch.isfinite(inside.last).all(-1)  # a sample with bad values is rejected later, by itself
        if len(full.hidden_states) != target.spec.num_layers + 1:
            faults.append(f"{len(full.hidden_states)} hidden states, not {target.spec.num_layers + 1}")
        for k, seen, again in zip(self.aux_layer_ids, inside.aux, alone.aux, strict=True):
            if tuple(seen.shape) != shape:
                faults.append(f"layer {k} gives {tuple(seen.shape)}, not {shape}")
            elif not faults and not torch.equal(seen[finite], full.hidden_states[k + 1][finite]):
                faults.append(f"layer {k} differs from hidden_states[{k + 1}]")
            elif not relative_error(again[finite], seen[finite]) <= tolerance:
                faults.append(f"layer {k} gives other states when run without the head")
        logits, wanted = target.head(target.norm(alone.last))[finite], full.logits[finite]
        agree, error = int((logits.argmax(-1) == wanted.argmax(-1)).sum()), relative_error(logits, wanted)
        found = f"head(norm(last)) picks the model's token on {agree}/{len(wanted)} rows, relative error {error:.2g}"
        if not len(wanted) or not error <= tolerance:
            faults.append(f"{found}, above {tolerance:.0e}")
        if faults:
            raise self._refusal(faults)
        return f"{len(self.aux_layer_ids)} aux states equal hidden_states[k+1]; {found}"


def relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """Norm of the difference over the norm of what was wanted; infinite where the shapes differ."""
    if found.shape != wanted.shape:
        return float("inf")
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())
