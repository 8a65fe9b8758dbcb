"""The target inside SGLang made to hand out its states: the aux layers by the engine's own hook, the last by its norm.

The states leave the decoder as part of its result, so that they are there too when SGLang replays the decoder as a
CUDA graph and no Python inside it runs.

Shapes: N tokens, H hidden, K aux layers.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

from eyas_contract import EngineFailure
from eyas_contract.engines.capture_probe import check_captured
from eyas_contract.engines.findings import render
from eyas_contract.engines.sglang import layer_ids_to_engine, parse_version

HOOK = "set_eagle3_layers_to_capture"


class Tap:
    """On the target of one rank.

    Args:
        model: SGLang's target.
        aux_layer_ids: output of decoder layer k, 0-based.
        num_layers, hidden_size: of the target.
        engine: SGLang's version.

    Attributes:
        proof: what the comparison with the layers' own outputs found; empty until it was made.

    Raises:
        EngineFailure: a class without the hook, or whose decoder is not where SGLang puts it.
    """

    def __init__(self, model: Any, aux_layer_ids: Sequence[int], num_layers: int, hidden_size: int,
                 engine: str) -> None:
        self.name, self.engine = type(model).__name__, engine
        self.aux_layer_ids, self.hidden_size = tuple(aux_layer_ids), hidden_size
        self.proof = ""
        self._last: Any = None
        self._outputs: dict[int, Any] = {}
        if not hasattr(model, HOOK):
            self._require(False, [], 0)
        getattr(model, HOOK)(list(layer_ids_to_engine(self.aux_layer_ids, self.name, parse_version(engine))))
        decoder = find_decoder(model)
        if decoder is None or len(decoder.layers) != num_layers:
            raise self._failure("no decoder of " + f"{num_layers} layers with a final norm", "`layers` and `norm`")
        self._norm = decoder.norm
        decoder.norm.register_forward_hook(self._keep_last)
        self._handles = []
        for k in self._watched(num_layers):
            self._handles.append(decoder.layers[k].register_forward_hook(self._keep(k)))
            if k + 1 < num_layers and (norm := getattr(decoder.layers[k + 1], "input_layernorm", None)) is not None:
                self._handles.append(norm.register_forward_hook(self._keep_sum(k)))
        decoder.forward = self._wrapped(decoder.forward)

    def _watched(self, num_layers: int) -> list[int]:
        return sorted({k + d for k in self.aux_layer_ids for d in (-1, 0, 1) if 0 <= k + d < num_layers})

    def _keep_last(self, module: Any, arguments: Any, output: Any) -> None:
        # A fused norm returns the sum it normalised, the last layer's output, beside the result.
        self._last = output[1] if isinstance(output, tuple) else arguments[0]

    def _keep(self, k: int) -> Any:
        def keep(module: Any, arguments: Any, output: Any) -> None:
            # A copy: the next fused norm writes its sum over the residual.
            both = output if isinstance(output, tuple) else (output,)
            self._outputs[k] = both[0] + both[1] if len(both) > 1 and both[1] is not None else both[0].clone()
        return keep

    def _keep_sum(self, k: int) -> Any:
        """The sum that the next layer's norm read is this layer's output, also where the layer hands on a part of it
        (SGLang 0.5.23 keeps the residual elsewhere)."""
        def keep(module: Any, arguments: Any, output: Any) -> None:
            if isinstance(output, tuple):
                self._outputs[k] = output[1].clone()
        return keep

    def _wrapped(self, forward: Any) -> Any:
        @functools.wraps(forward)
        def decoder_forward(*args: Any, **kwargs: Any) -> Any:
            self._last = None
            self._outputs.clear()
            result = forward(*args, **kwargs)
            if self._last is None:  # an idle batch
                return result
            aux = self._parts(result)
            if not self.proof:
                self._prove(aux)
            return result[0], [*aux, self._last]
        return decoder_forward

    def _parts(self, result: Any) -> list[Any]:
        """The aux states of a decoder's result, each [N, H]."""
        aux = result[1] if isinstance(result, tuple) and len(result) == 2 else []
        if not isinstance(aux, list | tuple):  # packed side by side
            aux = aux.split(self.hidden_size, dim=-1)
        rows = result[0].shape[0] if isinstance(result, tuple) else result.shape[0]
        self._require(True, [tuple(state.shape) for state in aux], rows)
        return list(aux)

    def _require(self, has_hook: bool, shapes: Sequence[tuple[int, ...]], rows: int) -> None:
        findings = check_captured(self.name, has_hook, shapes, len(self.aux_layer_ids), rows, self.hidden_size)
        if findings:
            raise self._failure(render(findings), f"the states of layers {list(self.aux_layer_ids)}")

    def _failure(self, found: str, wanted: str) -> EngineFailure:
        return EngineFailure(f"{self.name} in SGLang {self.engine}", found, f"{wanted}, by extraction",
                             "Nothing was stored. This class cannot be captured in this version of SGLang.")

    def _prove(self, aux: Sequence[Any]) -> None:
        """Compare each aux state with its layer's own output and the neighbours'; then let the layers be."""
        import torch

        device = aux[0].device
        if len(aux[0]) < 2 or (device.type == "cuda" and torch.cuda.is_current_stream_capturing()):
            return
        found, faults = [], []
        for k, state in zip(self.aux_layer_ids, aux, strict=True):
            errors = {j: _error(state, self._outputs[j]) for j in (k, k - 1, k + 1) if j in self._outputs}
            if not all(map(math.isfinite, errors.values())):
                return  # a warm-up's states; the next batch's will do
            best = min(errors, key=lambda j: errors[j])
            found.append(f"layer {k}: {errors.get(k, float('nan')):.1e} of its output, next best "
                         f"{min((e for j, e in errors.items() if j != k), default=float('nan')):.1e}")
            if best != k:
                faults.append(f"the state asked of layer {k} is the output of layer {best}")
        if faults:
            raise self._failure("; ".join([*faults, *found]), "each state the output of its layer")
        for handle in self._handles:
            handle.remove()
        self._outputs.clear()
        self.proof = "; ".join(found)


def _error(found: Any, wanted: Any) -> float:
    """Norm of the difference over the norm of what was wanted."""
    return float((found.float() - wanted.float()).norm() / wanted.float().norm().clamp(min=1e-30))


def find_decoder(model: Any) -> Any:
    """The module with `layers` and the final `norm`, where SGLang's graph runner looks for it; or None."""
    language = getattr(model, "language_model", model)
    for module in (getattr(language, "model", None), language):
        if module is not None and hasattr(module, "layers") and hasattr(module, "norm"):
            return module
    return None
