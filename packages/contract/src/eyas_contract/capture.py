"""CaptureSpec: which hidden states were stored, and exactly what they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class TensorSpec:
    """One stored tensor.

    Attributes:
        name: key in the shard.
        dtype: safetensors dtype: `BF16`, `F16`, `F32`, `I32`, `U8`, `I64`, `F8_E4M3`.
        dims: one symbol or number per axis: `T` tokens, `N+1` sample bounds, `K` aux layers, `K*H` aux
            width, `H` hidden.
    """

    name: str
    dtype: str
    dims: tuple[str, ...]


@dataclass(frozen=True)
class CaptureSpec:
    """What extraction stored.

    Attributes:
        aux_layer_ids: output of decoder layer k, 0-based (Hugging Face `hidden_states[k+1]`, the residual stream
            before the next norm), ascending. No other convention exists inside eyas.
        hidden_size: width of one state.
        last_state: the last layer's output `pre_norm` (before the final norm) or `post_norm`, or `none`.
        tensors: the stored tensors.
        max_length: samples longer than this many tokens were cut or left out.
    """

    aux_layer_ids: tuple[int, ...]
    hidden_size: int
    last_state: Literal["pre_norm", "post_norm", "none"]
    tensors: tuple[TensorSpec, ...]
    max_length: int

    def __post_init__(self) -> None:
        ids = self.aux_layer_ids
        if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0:
            raise ValueError(f"aux_layer_ids {list(ids)} are not ascending, distinct and >= 0")

    @property
    def aux_width(self) -> int:
        """Width of the concatenated aux states, K*H."""
        return len(self.aux_layer_ids) * self.hidden_size


def default_aux_layer_ids(num_layers: int) -> tuple[int, int, int]:
    """The field's default, as outputs: `(1, n//2 - 1, n - 4)` (EAGLE, SpecForge, TorchSpec).

    Raises:
        ValueError: fewer than 6 layers, where the three would not be distinct.
    """
    if num_layers < 6:
        raise ValueError(f"{num_layers} layers are too few for three distinct default layers; name them yourself")
    return (1, num_layers // 2 - 1, num_layers - 4)


def store_tensors(dtype: str) -> tuple[TensorSpec, ...]:
    """The tensors of a shard of packed ragged samples.

    Sample i of a shard holds tokens `sample_offsets[i]` to `sample_offsets[i + 1]` of every `T` tensor.
    `loss_mask[t]` is 1 where token t was produced by the assistant and is trained on. Of `F8_E4M3` states, layer k's at
    token t are the stored values times `aux_scales[t, k]`, the last layer's times `last_scale[t]`.
    """
    scales = (TensorSpec("aux_scales", "F32", ("T", "K")), TensorSpec("last_scale", "F32", ("T", "1")))
    return (
        TensorSpec("input_ids", "I32", ("T",)),
        TensorSpec("loss_mask", "U8", ("T",)),
        TensorSpec("aux_hidden_states", dtype, ("T", "K*H")),
        TensorSpec("last_hidden_state", dtype, ("T", "H")),
        *(scales if dtype == "F8_E4M3" else ()),
        TensorSpec("sample_offsets", "I64", ("N+1",)),
    )
