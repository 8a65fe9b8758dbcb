"""Every tensor of the draft's checkpoint is used, whole, and every parameter is set, or the engine does not start.

SGLang's EAGLE-3 classes pass over names they do not know and leave parameters that no name filled as they were
allocated (`load_weights` in `models/llama_eagle3.py` and `models/kimi_k25_eagle3.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any

from eyas_contract import EngineFailure
from eyas_serve.guard.shapes import Shapes
from eyas_serve.guard.state import GUARD
from eyas_serve.guard.vocabulary import vocabulary_faults

if TYPE_CHECKING:
    from torch import Tensor
    from torch.nn import Module, Parameter

PAIR = ("q_a_proj", "kv_a_proj_with_mqa")  # MLA fuses the two: the first to come is kept, the second loads both


class Audit:
    """Notes, while a checkpoint streams by, which names ended in no parameter, and which have other shapes."""

    def __init__(self, model: Module, default_loader: Callable[..., Any]) -> None:
        self.model, self.default_loader = model, default_loader
        self.calls = 0
        self.loaded: set[str] = set()
        self.dropped: list[str] = []
        self.shapes, self.misshapen = Shapes(model), list[str]()
        self.waiting: dict[str, str] = {}
        self.t2d: Tensor | None = None
        self.restore: list[Callable[[], None]] = []

    def watch(self) -> None:
        """Count the calls of every parameter's loader until `release`."""
        for name, parameter in self.model.named_parameters():
            own = getattr(parameter, "weight_loader", None)
            counted = self._counted(name, own or self.default_loader)
            attribute = "_weight_loader" if hasattr(parameter, "_weight_loader") else "weight_loader"
            setattr(parameter, attribute, counted)
            self.restore.append(_restorer(parameter, attribute, own))

    def release(self) -> None:
        """Give the parameters their own loaders back."""
        for undo in self.restore:
            undo()

    def _counted(self, name: str, loader: Callable[..., Any]) -> Callable[..., Any]:
        def load(*args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            self.loaded.add(name)
            return loader(*args, **kwargs)

        return load

    def tap(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Hand the weights on; a name after which no loader ran is noted as dropped."""
        for name, tensor in weights:
            if "t2d" in name:
                self.t2d = tensor
            if fault := self.shapes.fault(name, tensor):
                self.misshapen.append(fault)
            calls, hot = self.calls, getattr(self.model, "hot_token_id", None)
            yield name, tensor
            used = self.calls > calls or getattr(self.model, "hot_token_id", None) is not hot or "t2d" in name
            self._account(name, used)
        self.dropped += self.waiting.values()

    def _account(self, name: str, used: bool) -> None:
        part = next((p for p in PAIR if p in name), None)
        if part is not None:
            other = name.replace(part, PAIR[1 - PAIR.index(part)])
            if used:
                self.waiting.pop(other, None)
            else:
                self.waiting[name] = name
        elif not used:
            self.dropped.append(name)

    def unset(self) -> list[str]:
        """Parameters still NaN, or of a type without NaN and never loaded; those shared by the target excepted."""
        import torch

        shared = {"model.embed_tokens.weight"}
        if getattr(self.model, "load_lm_head_from_target", False):
            shared.add("lm_head.weight")
        result = []
        for name, parameter in self.model.named_parameters():
            if name in shared:
                continue
            holds_nan = parameter.dtype in _float_dtypes()
            if bool(torch.isnan(parameter).any()) if holds_nan else name not in self.loaded:
                result.append(name)
        return result


def _restorer(parameter: Parameter, attribute: str, own: Any) -> Callable[[], None]:
    def undo() -> None:
        if own is None:
            delattr(parameter, attribute)
        else:
            setattr(parameter, attribute, own)

    return undo


def _float_dtypes() -> tuple[Any, ...]:
    import torch

    return (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def audit_weights(original: Callable[..., Any], model: Any, weights: Iterable[tuple[str, Tensor]], *args: Any,
                  **kwargs: Any) -> Any:
    """AROUND hook of `load_weights`.

    Only the first load fills the parameters with NaN and demands all of them; later loads (weight updates) may bring a
    part, of which every name must still be known.

    Raises:
        EngineFailure: names dropped, parameters unset, vocabulary map missing or wrong (all at once).
    """
    import torch
    from sglang.srt.model_loader.weight_utils import default_weight_loader

    first = not getattr(model, "_eyas_loaded", False)
    audit = Audit(model, default_weight_loader)
    old: dict[str, Tensor] = {}
    if first:
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.dtype in _float_dtypes():
                    if GUARD.mode == "report":
                        old[name] = parameter.detach().to("cpu", copy=True)
                    parameter.fill_(float("nan"))
    audit.watch()
    try:
        result = original(model, audit.tap(weights), *args, **kwargs)
    finally:
        audit.release()
    faults = _name_faults(audit.dropped, audit.unset() if first else [], audit.misshapen)
    faults += vocabulary_faults(model.hot_token_id, _draft_size(model), model.config.vocab_size, audit.t2d)
    if faults:
        _put_back(model, old)
        GUARD.refuse(EngineFailure(
            "draft checkpoint", "; ".join(faults),
            f"a checkpoint of which {type(model).__name__} uses every tensor whole and misses none, by the guard",
            "Without this the server would answer and accept no draft token (acceptance length 1.00)."))
    model._eyas_loaded, model._eyas_t2d = True, audit.t2d
    GUARD.verified("weights")
    return result


def _put_back(model: Module, old: dict[str, Tensor]) -> None:
    """Where the guard only reports, unset weights hold what the memory held, as they would without it."""
    import torch

    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name in old:
                unset = torch.isnan(parameter)
                parameter[unset] = old[name].to(parameter.device)[unset]


def _draft_size(model: Any) -> int | None:
    return None if getattr(model, "load_lm_head_from_target", False) else model.config.draft_vocab_size


def _name_faults(dropped: list[str], unset: list[str], misshapen: list[str]) -> list[str]:
    faults = []
    if dropped:
        faults.append(f"SGLang drops {_listed(dropped)}: it knows no such names. Rename them; the decoder layer is "
                      "`midlayer.*`, the others `fc`, `norm`, `lm_head`, `d2t`")
    if unset:
        faults.append(f"nothing in it sets {_listed(unset)}, which would keep the memory's old content. Export them")
    if misshapen:
        faults.append(f"other shapes than config.json makes SGLang build, which it cuts or pads without a word: "
                      f"{_listed(misshapen)}. Correct num_attention_heads, num_key_value_heads, head_dim or "
                      "intermediate_size, or export again")
    return faults


def _listed(names: list[str], most: int = 12) -> str:
    rest = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(sorted(names)[:most]) + rest
