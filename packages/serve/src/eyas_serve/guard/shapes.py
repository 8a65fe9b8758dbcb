"""Tensors of other shapes than the draft class was built with, of which SGLang's loaders say nothing.

The layers that are cut for tensor parallelism take the rows or columns they have room for and pass over the rest, and
fill `o_proj` and `down_proj` up with zeros (`narrow`, `pad_or_narrow_weight` in `layers/linear.py`): a checkpoint of 8
heads under a config of 4 leaves nothing unset.
"""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, Any

from eyas_contract.engines.loaders import draft_kind, loader
from eyas_contract.engines.sglang import parse_version
from eyas_contract.engines.wanted import tensors

if TYPE_CHECKING:
    from torch import Tensor

_PADDED = {"original_num_attention_heads": "num_attention_heads", "original_total_num_kv_heads": "num_key_value_heads",
           "original_intermediate_size": "intermediate_size",
           "original_intermediate_size_mlp": "intermediate_size_mlp"}  # what SGLang pads on CPUs, as it was written


class Shapes:
    """What each tensor of a checkpoint must look like, by the config that the engine itself built the class from."""

    def __init__(self, model: Any) -> None:
        config = model.config.to_dict()
        config |= {key: config[original] for original, key in _PADDED.items() if original in config and key in config}
        kind = draft_kind("sglang", type(model).__name__)
        self.loader = loader("sglang", parse_version(importlib.metadata.version("sglang")), kind) if kind else None
        packed = getattr(model, "quant_config", None) is not None  # several numbers in one: other shapes
        self.wanted = tensors(config, self.loader) if self.loader and not packed else {}

    def fault(self, name: str, tensor: Tensor) -> str:
        """What is wrong with a tensor's shape; empty where it is right, or the name is none of the table's."""
        wanted = self.wanted.get(self.loader.place(name) or "") if self.loader else None
        return "" if wanted in (None, tuple(tensor.shape)) else f"{name} {list(tensor.shape)}, not {list(wanted)}"
