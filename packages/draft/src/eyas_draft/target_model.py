"""The Hugging Face target run over a pool of keys and values, with its aux states kept."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from eyas_contract import InvalidInput
from eyas_contract.target import read_config, text_config
from eyas_draft.ops import Ops
from eyas_draft.pool import ExtendAttention, KvPool

NAME = "eyas_pool"
POOLED = {"full_attention", "sliding_attention", "chunked_attention", "attention", "moe", "mlp"}
"""Kinds of layers that keep nothing of earlier tokens but keys and values (of the windowed, `_attend` refuses)."""


def _attend(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, *,
            eyas_attend: ExtendAttention, scaling: float | None = None, sliding_window: int | None = None,
            softcap: float | None = None, **_: Any) -> tuple[Tensor, None]:
    """Attention function of transformers: [1, heads, T, D] -> [1, T, heads, D], through the pool."""
    if attention_mask is not None or sliding_window or softcap:
        raise InvalidInput(type(module).__name__, "a sliding window, soft cap or mask of its own",
                           "plain attention, by the reference decoder", "Measure this target by serving it.")
    usual = query.shape[-1] ** -0.5
    if scaling not in (None, usual):  # YaRN's in DeepSeek; the pool knows the usual scale alone
        query = query * (scaling / usual)
    layer = module.layer_idx
    assert isinstance(layer, int)
    q_tqd, k_tgd, v_tgd = (x[0].transpose(0, 1) for x in (query, key, value))
    return eyas_attend(layer, q_tqd, k_tgd, v_tgd)[None], None


ALL_ATTENTION_FUNCTIONS.register(NAME, _attend)


class TargetModel:
    """The target.

    Args:
        folder: Hugging Face folder.
        aux_layer_ids: outputs of these decoder layers (0-based) are returned.
        dtype, device: of the weights.

    Raises:
        InvalidInput: layers that carry a state of their own from token to token, which the pool does not keep.
    """

    def __init__(self, folder: Path, aux_layer_ids: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        _require_pooled(folder)
        self.model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=NAME)
        self.model.eval().to(device)
        self.dtype, self.device = dtype, device
        self.eos_ids = _eos_ids(folder, self.model)
        self._aux: dict[int, Tensor] = {}
        self.aux_layer_ids = aux_layer_ids
        layers = self.model.get_decoder().layers
        for index in aux_layer_ids:
            layers[index].register_forward_hook(self._keeper(index))

    def _keeper(self, index: int) -> Any:
        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            self._aux[index] = output[0] if isinstance(output, tuple) else output
        return keep

    def pool(self, ops: Ops, requests: int, length: int) -> KvPool:
        """An empty pool for `requests` sequences of `length` tokens."""
        config = self.model.config.get_text_config()
        heads = config.num_attention_heads
        if getattr(config, "kv_lora_rank", None):  # transformers writes every head's keys and values out
            groups, width, value = heads, config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
        else:
            groups = getattr(config, "num_key_value_heads", None) or heads
            width = value = getattr(config, "head_dim", None) or config.hidden_size // heads
        return KvPool(ops, num_layers=config.num_hidden_layers, requests=requests, length=length, dtype=self.dtype,
                      num_kv_heads=groups, head_dim=width, value_dim=value, device=self.device)

    @torch.no_grad()
    def forward(self, input_ids_t: Tensor, positions_t: Tensor, attend: ExtendAttention,
                rows: Tensor | int = 0) -> tuple[Tensor, Tensor]:
        """One pass over new tokens of several requests.

        Args:
            input_ids_t, positions_t: int64 [T].
            attend: attention over the pool.
            rows: tokens whose logits are wanted; 0 for all.

        Returns:
            logits [R, V], and the aux states side by side [T, K*E].
        """
        out = self.model(input_ids=input_ids_t[None], position_ids=positions_t[None], use_cache=False,
                         logits_to_keep=rows, eyas_attend=attend)
        aux = torch.cat([self._aux[index][0] for index in self.aux_layer_ids], dim=-1)
        return out.logits[0], aux


def _require_pooled(folder: Path) -> None:
    """Refuse linear attention, Mamba and their like: with no cache given, they begin anew at every pass."""
    config = AutoConfig.from_pretrained(folder).get_text_config()
    kinds = set(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ())
    if not kinds:  # Falcon-H1 has both in every layer, and says so by its sizes alone
        kinds = {name for name in vars(config) if name.startswith(("mamba_", "linear_attn"))}
    if kinds - POOLED:
        raise InvalidInput(str(folder), f"layers of {', '.join(sorted(kinds - POOLED))}",
                           "attention in every layer, by the reference decoder", "Measure this target by serving it.")


def _eos_ids(folder: Path, model: Any) -> frozenset[int]:
    """Ids that end an answer: those of the config and of the generation config."""
    found: set[int] = set()
    for value in (text_config(read_config(folder)).get("eos_token_id"), model.generation_config.eos_token_id):
        found |= set(value if isinstance(value, list) else [] if value is None else [value])
    return frozenset(found)
