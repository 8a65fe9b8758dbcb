"""`--attention-backend eyas`: SGLang's drafting and verifying with eyas-native's CUDA kernels (GQA, and MLA absorbed).

Draft trees are verified, and the draft is extended by what was accepted, through the kernels here; the draft's own
steps go through them in `draft_attention.py`. Prompts and plain decoding stay with SGLang's Triton backend, which this
one extends. The tree is built by eyas-native too: one launch writes what SGLang wants and the mask in 32-bit words,
which is what the attention reads, so no mask over the whole context is looked at. Read in SGLang 0.5.16 and 0.5.20:
`srt/layers/attention/triton_backend.py`, `srt/speculative/eagle_utils.py`, `eagle_worker_common.py`.
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
BEYOND = 64  # requests: SGLang rounds the largest batch that it records up to a multiple of the ranks or of twice them


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


class Workspaces:
    """Scratch memory of the kernels, one buffer for each shape of call: recorded graphs hold their addresses."""

    def __init__(self, max_seq_len: int, device: Any) -> None:
        self._max_seq_len, self._device = max_seq_len, device
        self._buffers: dict[tuple[object, ...], Tensor] = {}

    def get(self, kind: str, batch: int, queries: Tensor, keys: Tensor, max_tree: int) -> Tensor:
        """The buffer, u8, of calls with queries [N, H, D] and a cache [S, G, D] of these shapes.

        Args:
            kind: `gqa` or `mla`.
            max_tree: queries of a request, at most.
        """
        import torch

        key = (kind, batch, *queries.shape[1:], *keys.shape[1:], max_tree)
        if key not in self._buffers:
            plan = native.attention_plan(
                kind, batch=batch, max_tree=max_tree, num_q_heads=queries.shape[1], num_kv_heads=keys.shape[-2],
                max_seq_len=self._max_seq_len, head_dim=queries.shape[2],
                dtype=str(queries.dtype).removeprefix("torch."), kv_dtype=str(keys.dtype).removeprefix("torch."))
            self._buffers[key] = torch.empty(max(plan["workspace_bytes"], 1), dtype=torch.uint8, device=self._device)
        return self._buffers[key]


class EyasAttnBackend(TritonAttnBackend):  # type: ignore[misc]
    """SGLang's Triton backend, but for the attention of target verification and of the draft's extension after it."""

    def __init__(self, model_runner: Any, *arguments: Any, **options: Any) -> None:
        super().__init__(model_runner, *arguments, **options)
        require_servable(self, model_runner)
        self.tree_nodes: int = self.num_draft_tokens or 0
        self.mask_words: Tensor | None = None
        if self.tree_nodes and self.topk > 1 and not self.is_draft_runner:
            WORDS.reserve(model_runner.req_to_token_pool.size + BEYOND, self.tree_nodes, self.device)
            self.mask_words = WORDS.buffer
        self.workspaces = Workspaces(self.max_context_len, self.device)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Triton's, where Triton attends; the kernels here read the batch's own tensors."""
        if not is_ours(forward_batch.forward_mode):
            super().init_forward_metadata(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Triton's likewise, before a graph is recorded or replayed: else every round pays for copies of its lengths,
        its slots and its trees' masks that nothing reads."""
        if not is_ours(forward_batch.forward_mode):
            super().init_forward_metadata_out_graph(forward_batch, in_capture)

    def forward_extend(self, q: Tensor, k: Tensor | None, v: Tensor | None, layer: Any, forward_batch: Any,
                       save_kv_cache: bool = True, **options: Any) -> Tensor:
        """Attention of prompts (Triton), of trees to verify and of a draft's extension: q [N, H * Dqk] -> [N, H * Dv].
        """
        if not is_ours(forward_batch.forward_mode):
            prompt: Tensor = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache=save_kv_cache,
                                                    **options)
            return prompt
        require_plain(layer, options)
        self.store(k, v, layer, forward_batch, save_kv_cache)
        if forward_batch.forward_mode.is_draft_extend_v2():
            return self.attend(q, layer, forward_batch, **accepted_chains(forward_batch, q.shape[0]))
        mask = None if self.mask_words is None else self.mask_words[:forward_batch.seq_lens.shape[0]]
        return self.attend(q, layer, forward_batch, max_tree=self.tree_nodes, seq_lens_are_prefix=True, mask=mask)

    def store(self, k: Tensor | None, v: Tensor | None, layer: Any, forward_batch: Any, wanted: bool) -> None:
        """Write new keys and values into the cache, which is where the kernels read all of them."""
        if wanted and k is not None:
            self._set_kv_buffer(forward_batch, layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, v)

    def attend(self, q: Tensor, layer: Any, forward_batch: Any, *, max_tree: int, seq_lens: Tensor | None = None,
               **tree: Any) -> Tensor:
        """One launch over the cache: q [N, H * Dqk] -> [N, H * Dv].

        Everything that changes from round to round is read on the device, from the batch's own buffers, so a recorded
        graph needs no planning before it is replayed.

        Args:
            max_tree, tree: queries of a request and what they see, as in `eyas_native.cuda.Options`.
            seq_lens: i64 [B]; the batch's where it is None.
        """
        lens = forward_batch.seq_lens if seq_lens is None else seq_lens
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        out = queries.new_empty((queries.shape[0], layer.tp_q_head_num, layer.v_head_dim))
        keys, kind = self.token_to_kv_pool.get_key_buffer(layer.layer_id), "mla" if self.use_mla else "gqa"
        shared: dict[str, Any] = {
            "max_tree": max_tree, "max_seq_len": self.max_context_len, "scale": layer.scaling,
            "index_rows": forward_batch.req_pool_indices.long(),
            "workspace": self.workspaces.get(kind, lens.shape[0], queries, keys, max_tree), **tree}
        if self.use_mla:
            native.tree_attn_mla(queries, keys, out, self.req_to_token, lens, **shared)
        else:
            values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
            native.tree_attn_gqa(queries, keys, values, out, self.req_to_token, lens, **shared)
        return out.view(-1, layer.tp_q_head_num * layer.v_head_dim)


def is_ours(mode: Any) -> bool:
    """Whether the kernels here attend in this mode of a batch: trees to verify, and a draft's extension after it."""
    return bool(mode.is_target_verify() or mode.is_draft_extend_v2())


def accepted_chains(forward_batch: Any, rows: int) -> dict[str, Any]:
    """How a draft's extension after a verification lies: per request a chain, the last keys of its cache.

    SGLang gives every request as many rows as the tree has nodes, accepted ones first; what follows them is thrown
    away. A recorded graph is padded by requests of one key and as many rows, whose lengths are raised to the rows.

    Args:
        forward_batch: SGLang's, in mode DRAFT_EXTEND_V2; its seq_lens include the chains.
        rows: queries of the batch.
    """
    lengths = forward_batch.extend_seq_lens_cpu
    longest, lens = max(lengths), forward_batch.seq_lens
    if rows == longest * lens.shape[0] and min(lengths) == longest:
        return {"max_tree": longest, "seq_lens": lens.clamp(min=longest)}
    starts = lens.new_zeros(lens.shape[0] + 1, dtype=forward_batch.extend_seq_lens.dtype)
    starts[1:] = forward_batch.extend_seq_lens.cumsum(0)
    return {"max_tree": longest, "q_start": starts.int()}


def require_plain(layer: Any, options: dict[str, Any]) -> None:
    """Refuse attention that is more than a softmax over what was there before (sinks, encoders and the like).

    Raises:
        EngineFailure: it is.
    """
    if any(value is not None for value in options.values()) or layer.attn_type != AttentionType.DECODER:
        raise EngineFailure(f"layer {layer.layer_id}", f"attention of type {layer.attn_type} with {options}",
                            f"plain decoder attention, by the attention backend {NAME}", "Serve with triton.")


def require_servable(backend: Any, model_runner: Any) -> None:
    """Refuse what the kernels do not compute (all of it named).

    Raises:
        EngineFailure: no CUDA library; sliding windows, context parallelism, pages, a remapped or scaled cache; trees
            that are built where no hook of ours reaches.
    """
    from sglang.srt.speculative import eagle_utils

    config = model_runner.model_config.hf_text_config
    round_slots = backend.topk * (backend.speculative_num_steps or 0)
    remapped = getattr(backend, "_translate_kv_loc", None) is not None or getattr(  # 0.5.16's name, then later ones'
        getattr(backend, "kv_index_translator", None), "is_translating", False)
    faults = [text for bad, text in (
        (native.status() != "available", f"eyas-native: {native.status()}"),
        (backend.sliding_window_size, "sliding windows"),
        (backend.dcp_size > 1, "decode context parallelism"),
        (backend.page_size > 1, f"page size {backend.page_size}"),
        (remapped, "a remapped KV pool"),
        (getattr(config, "attn_logit_softcapping", None), "soft-capped scores"),
        (backend.token_to_kv_pool.dtype != model_runner.dtype, f"a {backend.token_to_kv_pool.dtype} cache beside "
                                                                f"{model_runner.dtype}"),
        (backend.topk > 1 and not hasattr(eagle_utils, BUILD.rpartition(".")[2]), f"an SGLang without {BUILD}"),
        (backend.num_draft_tokens and backend.num_draft_tokens > 256, f"trees of {backend.num_draft_tokens} nodes"),
        (backend.is_draft_runner and round_slots > 256, f"rounds of {round_slots} drafted tokens"),
    ) if bad]
    if faults:
        raise EngineFailure(f"attention backend {NAME}, {'draft' if backend.is_draft_runner else 'target'}",
                            ", ".join(map(str, faults)),
                            "drafting and verifying over an unscaled cache of page size 1, by eyas-native's kernels",
                            "Serve with triton; for a draft alone --speculative-draft-attention-backend triton.")


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

    from eyas_serve.engine.draft_attention import CHOICE, with_ours

    register_attention_backend(NAME)(EyasAttnBackend)
    HookRegistry.register(BUILD, build_tree, HookType.REPLACE)
    HookRegistry.register(VERIFY, verify_tree, HookType.REPLACE)
    HookRegistry.register(CHOICE, with_ours, HookType.AROUND)
