"""Which target classes are captured and which refused, on small decoders written the way SGLang writes them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from eyas_contract import EngineFailure
from eyas_extract.inside.tap import Tap

HIDDEN, LAYERS, TOKENS, AUX = 16, 12, 5, (2, 6, 9)


class Layer(nn.Module):
    """Hands on what it computed and the sum so far, not yet added."""

    def __init__(self, number: int) -> None:
        super().__init__()
        torch.manual_seed(number)
        self.mix = nn.Linear(HIDDEN, HIDDEN)

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        residual = hidden if residual is None else hidden + residual
        return self.mix(residual), residual


class FusedNorm(nn.Module):
    """Returns the norm of the sum, and writes the sum over the residual."""

    def forward(self, hidden: torch.Tensor, residual: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        residual += hidden
        return residual / residual.norm(dim=-1, keepdim=True), residual


class Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(k) for k in range(LAYERS))
        self.norm = FusedNorm()
        self.layers_to_capture: list[int] = []

    def forward(self, hidden: torch.Tensor) -> Any:
        residual, aux = None, []
        for number, layer in enumerate(self.layers):
            if number in self.layers_to_capture:
                aux.append(hidden + residual)
            hidden, residual = layer(hidden, residual)
        hidden, _ = self.norm(hidden, residual)
        return (hidden, aux) if aux else hidden


class NoHook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = Decoder()


class GoodForCausalLM(NoHook):
    def set_eagle3_layers_to_capture(self, ids: list[int]) -> None:
        self.model.layers_to_capture = [i + 1 for i in ids]


class HookSetsListOnly(NoHook):
    def set_eagle3_layers_to_capture(self, ids: list[int]) -> None:
        self.wanted = ids


class CapturesInputs(NoHook):
    def set_eagle3_layers_to_capture(self, ids: list[int]) -> None:
        self.model.layers_to_capture = list(ids)


class Packs(GoodForCausalLM):
    """Side by side in one tensor, as later versions hand them over."""

    def __init__(self) -> None:
        super().__init__()
        plain = self.model.forward

        def packed(hidden: torch.Tensor) -> Any:
            out, aux = plain(hidden)
            return out, torch.cat(aux, dim=-1)

        self.model.forward = packed


class WrongWidth(GoodForCausalLM):
    """Four residual streams."""

    def __init__(self) -> None:
        super().__init__()
        plain = self.model.forward

        def wide(hidden: torch.Tensor) -> Any:
            out, aux = plain(hidden)
            return out, [torch.cat([state] * 4, dim=-1) for state in aux]

        self.model.forward = wide


class NoNorm(GoodForCausalLM):
    def __init__(self) -> None:
        super().__init__()
        del self.model.norm


@pytest.fixture(autouse=True)
def inference() -> Iterator[None]:
    """As the engine computes."""
    with torch.no_grad():
        yield


def tap(model: nn.Module) -> Tap:
    return Tap(model, AUX, LAYERS, HIDDEN, "0.5.20")


@pytest.mark.parametrize("kind", [GoodForCausalLM, Packs])
def test_states_of_a_good_class(kind: type[NoHook]) -> None:
    model = kind()
    tapped = tap(model)
    embedded = torch.randn(TOKENS, HIDDEN, generator=torch.Generator().manual_seed(1))
    normed, states = model.model(embedded)
    total, wanted = embedded, []
    for layer in model.model.layers:
        total = total + layer.mix(total)
        wanted.append(total)
    for state, k in zip(states, (*AUX, LAYERS - 1), strict=True):
        torch.testing.assert_close(state, wanted[k])
    torch.testing.assert_close(normed, wanted[-1] / wanted[-1].norm(dim=-1, keepdim=True))
    assert "layer 6:" in tapped.proof
    again = model.model(embedded)[1]
    assert all(torch.equal(a, b) for a, b in zip(states, again, strict=True))
    assert not any(layer._forward_hooks for layer in model.model.layers)


@pytest.mark.parametrize(("kind", "message"), [
    (NoHook, "NoHook in SGLang 0.5.20: .*this class cannot serve an EAGLE-3 draft in this build"),
    (NoNorm, "NoNorm in SGLang 0.5.20: no decoder of 12 layers with a final norm"),
])
def test_refused_before_the_first_token(kind: type[NoHook], message: str) -> None:
    with pytest.raises(EngineFailure, match=f"(?s){message}"):
        tap(kind())


@pytest.mark.parametrize(("kind", "message"), [
    (HookSetsListOnly, "HookSetsListOnly in SGLang 0.5.20: .*hook present but 0 of 3 states came back"),
    (WrongWidth, "WrongWidth in SGLang 0.5.20: .*3 states of 64, expected 16"),
    (CapturesInputs, "the state asked of layer 2 is the output of layer 1; the state asked of layer 6 is"),
])
def test_refused_at_the_first_batch(kind: type[NoHook], message: str) -> None:
    model = kind()
    tap(model)
    with pytest.raises(EngineFailure, match=f"(?s){message}"):
        model.model(torch.randn(TOKENS, HIDDEN))
