"""`--attention-backend eyas`: SGLang verifies draft trees with eyas-native's CUDA kernels (GQA, and MLA absorbed).

Prompts, plain decoding and the draft's own steps stay with SGLang's Triton backend, which this one extends: give
`--speculative-draft-attention-backend triton` beside it. The tree is built by eyas-native too: one launch writes what
SGLang wants and the mask in 32-bit words, which is what the attention reads, so no mask over the whole context is
looked at. Read in SGLang 0.5.16: `srt/layers/attention/triton_backend.py`, `srt/speculative/eagle_utils.py`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from sglang.srt.layers.attention.attention_registry import register_attention_backend
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

import eyas_native.cuda as native
from eyas_contract import EngineFailure

if TYPE_CHECKING:
    from torch import Tensor

NAME = "eyas"
BUILD = "sglang.srt.speculative.eagle_utils.sgl_build_tree_kernel_efficient"
VERIFY = "sgl_kernel.verify_tree_greedy"


class TreeWords:
    """The masks of the trees being verified, i32 [requests, n, ceil(n / 32)], at one address for CUDA graphs.

    SGLang builds the trees of a batch right before it verifies them, so one buffer for the process is enough.
    """

    def __init__(self) -> None:
        self.buffer: Tensor | None = None

    def reserve(self, requests: int, nodes: int, device: Any) -> None:
        """Make room for this many trees. Later calls keep the address."""
        import torch

        shape = (requests, nodes, (nodes + 31) // 32)
        if self.buffer is None or self.buffer.shape != shape:
            self.buffer = torch.zeros(shape, dtype=torch.int32, device=device)


WORDS = TreeWords()


class EyasAttnBackend(TritonAttnBackend):  # type: ignore[misc]
    """SGLang's Triton backend, but for the attention of target verification."""

    def __init__(self, model_runner: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(model_runner, *arguments, **options)
        require_servable(self, model_runner)
        self.tree_nodes: int = self.num_draft_tokens or 0
        self.mask_words: Tensor | None = None
        if self.tree_nodes and self.topk > 1:
            WORDS.reserve(model_runner.req_to_token_pool.size, self.tree_nodes, self.device)
            self.mask_words = WORDS.buffer
        self._workspaces: dict[tuple[int, ...], Tensor] = {}  # kept: recorded graphs hold their addresses

    def forward_extend(self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, forward_batch: Any,
                       save_kv_cache: bool = True, **options: Any) -> Tensor:
        """Attention of prompts (Triton) and of draft trees (ours): q [N, H * Dqk] -> [N, H * Dv]."""
        if not forward_batch.forward_mode.is_target_verify():
            prompt: Tensor = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache,
                                                    **options)
            return prompt
        if any(value is not None for value in options.values()) or layer.attn_type != AttentionType.DECODER:
            raise EngineFailure(f"layer {layer.layer_id}", f"attention of type {layer.attn_type} with {options}",
                                f"plain decoder attention, by the attention backend {NAME}", "Serve with triton.")
        if save_kv_cache and k is not None:
            self._set_kv_buffer(forward_batch, layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)
        return self._verify(q, layer, forward_batch)

    def _verify(self, q: Tensor, layer: Any, forward_batch: Any) -> Tensor:
        heads, batch = layer.tp_q_head_num, forward_batch.seq_lens.shape[0]
        queries = q.view(-1, heads, layer.qk_head_dim)
        out = queries.new_empty((queries.shape[0], heads, layer.v_head_dim))
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        shared: dict[str, Any] = {
            "max_tree": self.tree_nodes, "max_seq_len": self.max_context_len, "scale": layer.scaling,
            "mask": None if self.mask_words is None else self.mask_words[:batch],
            "index_rows": forward_batch.req_pool_indices.long(), "seq_lens_are_prefix": True,
            "workspace": self._workspace(batch, queries, keys)}
        if self.use_mla:
            native.tree_attn_mla(queries, keys, out, self.req_to_token, forward_batch.seq_lens, **shared)
        else:
            values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
            native.tree_attn_gqa(queries, keys, values, out, self.req_to_token, forward_batch.seq_lens, **shared)
        return out.view(-1, heads * layer.v_head_dim)

    def _workspace(self, batch: int, queries: Tensor, keys: Tensor) -> Tensor:
        import torch

        key = (batch, *queries.shape[1:], *keys.shape[1:])
        if key not in self._workspaces:
            plan = native.attention_plan(
                "mla" if self.use_mla else "gqa", batch=batch, max_tree=self.tree_nodes, num_q_heads=queries.shape[1],
                num_kv_heads=keys.shape[-2], max_seq_len=self.max_context_len, head_dim=queries.shape[2],
                dtype=str(queries.dtype).removeprefix("torch."), kv_dtype=str(keys.dtype).removeprefix("torch."))
            self._workspaces[key] = torch.empty(max(plan["workspace_bytes"], 1), dtype=torch.uint8, device=self.device)
        return self._workspaces[key]


def require_servable(backend: Any, model_runner: Any) -> None:
    """Refuse what the kernels do not compute (all of it named).

    Raises:
        EngineFailure: no CUDA library; sliding windows, context parallelism, pages, a remapped or scaled cache.
    """
    config = model_runner.model_config.hf_text_config
    faults = [text for bad, text in (
        (native.status() != "available", f"eyas-native: {native.status()}"),
        (backend.sliding_window_size, "sliding windows"),
        (backend.dcp_size > 1, "decode context parallelism"),
        (backend.page_size > 1, f"page size {backend.page_size}"),
        (getattr(backend, "_translate_kv_loc", None) is not None, "a remapped KV pool"),  # 0.5.16 has such pools
        (getattr(config, "attn_logit_softcapping", None), "soft-capped scores"),
        (backend.token_to_kv_pool.dtype != model_runner.dtype, f"a {backend.token_to_kv_pool.dtype} cache beside "
                                                                f"{model_runner.dtype}"),
        (backend.is_draft_runner, "the draft's own steps"),
        (backend.num_draft_tokens and backend.num_draft_tokens > 256, f"trees of {backend.num_draft_tokens} nodes"),
    ) if bad]
    if faults:
        raise EngineFailure(f"attention backend {NAME}", ", ".join(map(str, faults)),
                            "target verification over an unscaled cache of page size 1, by eyas-native's kernels",
                            "Add --speculative-draft-attention-backend triton for the draft; else serve with triton.")


def build_tree(parent_list: Tensor, selected_index: Tensor, seq_lens: Tensor, tree_mask: Tensor, positions: Tensor,
               retrive_index: Tensor, retrive_next_token: Tensor, retrive_next_sibling: Tensor, topk: int, depth: int,
               num_nodes: int, mask_mode: int) -> None:
    """SGLang's `build_tree_kernel_efficient`, which writes the same trees' masks into `WORDS` in the same launch."""
    native.tree_build(
        parent_list.long().contiguous(), selected_index.contiguous(), seq_lens.long(), topk=topk, depth=depth,
        num_nodes=num_nodes, mask_mode=int(mask_mode), tree_mask=tree_mask, positions=positions,
        retrive_index=retrive_index, retrive_next_token=retrive_next_token, retrive_next_sibling=retrive_next_sibling,
        words=None if WORDS.buffer is None else WORDS.buffer[:seq_lens.numel()])


def verify_tree(predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor,
                retrive_index: Tensor, retrive_next_token: Tensor, retrive_next_sibling: Tensor,
                target_predict: Tensor) -> None:
    """SGLang's `verify_tree_greedy`."""
    native.verify_greedy(predicts, accept_index, accept_token_num, candidates.contiguous(), retrive_index,
                         retrive_next_token, retrive_next_sibling, target_predict.view(candidates.shape).long())


def register() -> None:
    """Register the backend, and eyas-native's tree operations in place of SGLang's; call in every rank."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    register_attention_backend(NAME)(EyasAttnBackend)
    HookRegistry.register(BUILD, build_tree, HookType.REPLACE)
    HookRegistry.register(VERIFY, verify_tree, HookType.REPLACE)
