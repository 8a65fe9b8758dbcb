"""Module hooks that keep a draft's intermediate values during one recorded forward pass. Runs inside SGLang.

Norms that add the residual change their inputs in place, so every value is copied when seen.

Source: `LlamaDecoderLayer` and `LlamaModel` in SGLang's `srt/models/llama_eagle3.py`, `Eagle3MLADecoderLayer` and
`Eagle3MLAModel` in `srt/models/kimi_k25_eagle3.py` (0.5.16 to 0.5.23).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

TROUBLE = (AttributeError, IndexError, KeyError, OSError, RuntimeError, TypeError, ValueError)
"""What a record may run into in an SGLang that is laid out otherwise. It is told to the client, never to the engine."""


class Taps:
    """Values of one forward pass by stage name, [rows of the batch, width] each."""

    def __init__(self) -> None:
        self.values: dict[str, Tensor] = {}
        self.trouble: list[str] = []

    def keep(self, name: str, value: Any) -> None:
        """Copy a value."""
        if hasattr(value, "dim") and value.dim() >= 1:
            self.values[name] = value.detach().clone()

    @contextmanager
    def on(self, model: Any) -> Iterator[None]:
        """Watch a draft while the block runs."""
        handles: list[Any] = []
        try:
            self._attach(model, handles)
        except TROUBLE as error:
            self.trouble.append(f"taps: {type(error).__name__}: {error}")
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _attach(self, model: Any, handles: list[Any]) -> None:
        inner = model.model
        layer = inner.layers[0] if hasattr(inner, "layers") else inner.midlayer

        def before(module: Any, action: Callable[[tuple[Any, ...], dict[str, Any]], None]) -> None:
            handles.append(module.register_forward_pre_hook(
                lambda _m, args, kwargs: self._try(action, args, kwargs), with_kwargs=True))

        def after(module: Any, action: Callable[[Any], None]) -> None:
            handles.append(module.register_forward_hook(lambda _m, _args, out: self._try(action, out)))

        before(inner.embed_tokens, lambda args, _: self.keep("input_ids", args[0]))
        if getattr(inner, "input_norm", None) is not None:
            after(inner.input_norm, lambda out: self.keep("input_norm", out))
        for i, norm in enumerate(getattr(inner, "fc_norm", None) or ()):
            after(norm, lambda out, i=i: self.keep(f"aux_norm.{i}", out))  # type: ignore[misc]
        before(layer, self._layer_inputs)
        before(layer.self_attn, self._attention_input)
        after(layer.self_attn, lambda out: self.keep("attention", out[0] if isinstance(out, tuple) else out))
        after(layer.post_attention_layernorm, lambda out: self.keep("mlp_norm", out[0]))
        after(inner.norm, self._final)
        after(inner, lambda out: self.keep("handed_on", out[1][0]))
        after(model.logits_processor, lambda out: self.keep("logits", out.next_token_logits))

    def _try(self, action: Callable[..., None], *args: Any) -> None:
        try:
            action(*args)
        except TROUBLE as error:
            self.trouble.append(f"{type(error).__name__}: {error}")

    def _layer_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        names = ("positions", "embeds", "hidden_states")
        positions, embeds, hidden = (kwargs[n] if n in kwargs else args[i] for i, n in enumerate(names))
        self.keep("positions", positions if positions.dim() == 1 else positions[0])
        self.keep("embedding", embeds)
        self.keep("fused", hidden)

    def _attention_input(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        both = kwargs["hidden_states"] if "hidden_states" in kwargs else args[1]
        half = both.shape[-1] // 2
        self.keep("embedding_norm", both[:, :half])
        self.keep("hidden_norm", both[:, half:])

    def _final(self, out: Any) -> None:
        self.keep("norm", out[0])
        self.keep("layer", out[1])
