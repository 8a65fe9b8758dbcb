"""The CPU names of `sgl_kernel` that SGLang's EAGLE-3 path calls, filled by eyas-native.

No package on PyPI has them. The kernels are eyas-native's; index arithmetic over a few integers is torch's. Signatures
and shapes are SGLang's (`srt/speculative/eagle_utils.py`, `srt/layers/attention/intel_amx_backend.py`,
`kernels/ops/speculative/*.py`, `kernels/ops/kvcache/cache_move.py`), in which a request's row of `req_to_token`
i32 [R, L] lists the cache slot of each of its tokens. B: requests, n: nodes of a draft tree, T: tokens.
"""

from __future__ import annotations

import types
from typing import TYPE_CHECKING, Any

import eyas_native

if TYPE_CHECKING:
    from torch import Tensor


def build_tree_kernel_efficient_cpu(
    parent_list: Tensor, selected_index: Tensor, seq_lens: Tensor, tree_mask: Tensor, positions: Tensor,
    retrive_index: Tensor, retrive_next_token: Tensor, retrive_next_sibling: Tensor,
    topk: int, depth: int, draft_token_num: int, tree_mask_mode: int,
) -> None:
    """Links, positions and mask of the draft trees; the last five tensors are written."""
    parents = parent_list.long().contiguous()

    def build(selected: Tensor) -> None:
        eyas_native.tree_build(
            parents, selected.contiguous(), seq_lens.long(), topk=topk, depth=depth, num_nodes=draft_token_num,
            mask_mode=int(tree_mask_mode), tree_mask=tree_mask, positions=positions, retrive_index=retrive_index,
            retrive_next_token=retrive_next_token, retrive_next_sibling=retrive_next_sibling)

    try:
        build(selected_index)
    except eyas_native.ArgumentError:  # nothing is written yet; what is wrong otherwise is refused again
        build(without_orphans(parents, selected_index, topk))


def without_orphans(parent_list: Tensor, selected_index: Tensor, topk: int) -> Tensor:
    """Selected entries [B, n - 1] of which those without a selected parent hang from the root, as on a GPU.

    Where a draft is all but sure, a node's score is its parent's, and SGLang's `topk` may select the child alone. Any
    token may hang from the root: what is accepted is the target's own choice.
    """
    if not parent_list.numel():  # of one step: no node has another parent than the root
        return selected_index
    selected = selected_index.clone()
    while True:
        slots = selected // topk
        above = parent_list.gather(1, slots.clamp(0, parent_list.shape[1] - 1))
        known = (selected[:, None, :] == above[:, :, None]).tril(-1).any(-1)
        orphans = (slots > 0) & (slots < parent_list.shape[1]) & ~known
        if not orphans.any():
            return selected
        selected[orphans] = 0  # the first entry of the first step, whose parent is the root


def verify_tree_greedy_cpu(
    predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor,
    retrive_index: Tensor, retrive_next_token: Tensor, retrive_next_sibling: Tensor, target_predict: Tensor,
) -> None:
    """Walk each tree along the target's own choices; the first three tensors are written."""
    eyas_native.verify_greedy(predicts, accept_index, accept_token_num, candidates.contiguous(), retrive_index,
                              retrive_next_token, retrive_next_sibling,
                              target_predict.view(candidates.shape).long().contiguous())


def _only_self_attention(is_cross: bool, sinks: Any) -> None:
    if is_cross or sinks is not None:
        message = "eyas-native's CPU attention has neither cross attention nor attention sinks; this model needs them"
        raise RuntimeError(message)


def decode_attention_cpu(
    q: Tensor, k_buffer: Tensor, v_buffer: Tensor, k_scale: float, v_scale: float, out: Tensor,
    k: Tensor | None, v: Tensor | None, loc: Tensor, attn_logits: Tensor, req_to_token: Tensor,
    req_pool_indices: Tensor, seq_lens: Tensor, scale: float, logit_cap: float, is_cross: bool = False,
    window: int = 0, encoder_lens: Any = None, sinks: Any = None,
) -> None:
    """Write the new keys and values, then attend: q [B, Hq, D] to the first seq_lens[b] tokens of its request."""
    _only_self_attention(is_cross, sinks)
    if k is not None and v is not None:
        eyas_native.kv_write(k.view(-1, *k_buffer.shape[1:]), v.view(-1, *v_buffer.shape[1:]), k_buffer, v_buffer, loc)
    eyas_native.decode_attention(q, k_buffer, v_buffer, out, req_to_token, req_pool_indices, seq_lens,
                                 scale=scale, logit_cap=logit_cap, window=window)


def extend_attention_cpu(
    q: Tensor, k: Tensor | None, v: Tensor | None, out: Tensor, k_buffer: Tensor, v_buffer: Tensor,
    k_scale: float, v_scale: float, req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor,
    extend_lens: Tensor, extend_start: Tensor, max_extend_len: int, scale: float, logit_cap: float,
    is_cross: bool = False, window: int = 0, encoder_lens: Any = None, sinks: Any = None,
    tree_mask: Tensor | None = None, is_causal: bool = True,
) -> None:
    """Attention of prompts and of draft trees; the new keys and values are in the buffers already.

    MLA's prompts without a prefix come in multi-head form: expanded keys and values beside buffers of latents.
    """
    _only_self_attention(is_cross, sinks)
    if k is not None and v is not None and q.shape[-1] != k_buffer.shape[-1]:
        import torch

        assert bool((seq_lens == extend_lens).all()), "SGLang takes MLA's multi-head form only without a prefix"
        k_buffer, v_buffer = k.view(q.shape[0], -1, q.shape[-1]), v.view(q.shape[0], -1, out.shape[-1])
        column = torch.arange(max_extend_len, dtype=req_to_token.dtype)
        req_to_token = (extend_start[:, None].to(req_to_token.dtype) + column).clamp(max=q.shape[0] - 1)
        req_pool_indices = torch.arange(extend_lens.numel())
    eyas_native.tree_attention(q, k_buffer, v_buffer, out, req_to_token, req_pool_indices, seq_lens, extend_lens,
                               extend_start, scale=scale, logit_cap=logit_cap, window=window, tree_mask=tree_mask,
                               causal=is_causal)


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Move cache slots in every layer. data_ptrs u64 [layers], strides: bytes of a slot."""
    eyas_native.kv_move(data_ptrs.tolist(), tgt_loc, src_loc, strides=strides.tolist())


def _spans(start: Tensor, end: Tensor) -> tuple[Tensor, Tensor]:
    """Flat (request, column) of the half-open spans start[b] .. end[b], request by request."""
    import torch

    lengths = (end - start).long()
    request = torch.repeat_interleave(torch.arange(lengths.numel()), lengths)
    before = torch.cumsum(lengths, 0) - lengths
    return request, torch.arange(request.numel()) + (start.long() - before)[request]


def assign_req_to_token_pool_cpu(req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor,
                                 end_offset: Tensor, out_cache_loc: Tensor, pool_len: int) -> None:
    """req_to_token[r, start:end] = the next slots of out_cache_loc, request by request."""
    request, column = _spans(start_offset, end_offset)
    req_to_token[req_pool_indices[request], column] = out_cache_loc[:column.numel()].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(req_pool_indices: Tensor, req_to_token: Tensor, start_offset: Tensor,
                                 end_offset: Tensor, out_cache_loc: Tensor, pool_len: int) -> None:
    """The inverse: out_cache_loc = req_to_token[r, start:end], request by request."""
    request, column = _spans(start_offset, end_offset)
    out_cache_loc[:column.numel()] = req_to_token[req_pool_indices[request], column].to(out_cache_loc.dtype)


def assign_draft_cache_locs_contiguous_cpu(req_pool_indices: Tensor, req_to_token: Tensor, seq_lens: Tensor,
                                           out_cache_loc: Tensor, pool_len: int, topk: int, num_steps: int) -> None:
    """The topk * num_steps slots reserved behind each request's tokens."""
    import torch

    columns = seq_lens.long()[:, None] + torch.arange(topk * num_steps)
    slots = req_to_token[req_pool_indices[:, None], columns]
    out_cache_loc[:slots.numel()] = slots.flatten().to(out_cache_loc.dtype)


def build_draft_decode_metadata_cpu(req_to_token: Tensor, req_pool_indices: Tensor, seq_lens: Tensor, topk: int,
                                    num_steps: int, pool_len: int) -> Tensor:
    """A table for the draft's own steps: row b * topk + k is request b's tokens, then branch k's reserved slots.

    Returns:
        i32 [B * topk, max(seq_lens) + num_steps]; a row is meaningful up to its request's length plus num_steps.
    """
    import torch

    batch, seq_lens = seq_lens.numel(), seq_lens.long()
    longest = int(seq_lens.max()) if batch else 0
    table = req_to_token.new_empty((batch, topk, longest + num_steps))
    table[:, :, :longest] = req_to_token[req_pool_indices, :longest][:, None]
    step = torch.arange(num_steps)
    branch = seq_lens[:, None, None] + torch.arange(topk)[:, None] * num_steps + step
    slots = req_to_token[req_pool_indices[:, None, None], branch]
    table.scatter_(2, (seq_lens[:, None, None] + step).expand(batch, topk, num_steps), slots)
    return table.flatten(0, 1)


def fill_bonus_tokens_cpu(accept_tokens: Tensor, accept_lens: Tensor, bonus_tokens: Tensor,
                          accept_stride: int) -> None:
    """bonus_tokens[b] = the last accepted token of request b, whose tokens start at b * accept_stride."""
    import torch

    last = torch.arange(accept_lens.numel()) * accept_stride + accept_lens.long() - 1
    bonus_tokens.copy_(accept_tokens.view(-1)[last])


def fill_accept_out_cache_loc_cpu(accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor) -> None:
    """The slots of the accepted tokens, in order; accept_index is -1 where nothing was accepted."""
    accepted = accept_index.view(-1)
    slots = out_cache_loc[accepted[accepted > -1].long()]
    accept_out_cache_loc[:slots.numel()] = slots


OPS = (decode_attention_cpu, extend_attention_cpu)
FUNCTIONS = (
    build_tree_kernel_efficient_cpu, verify_tree_greedy_cpu, copy_all_layer_kv_cache_cpu, assign_req_to_token_pool_cpu,
    assign_extend_cache_locs_cpu, assign_draft_cache_locs_contiguous_cpu, build_draft_decode_metadata_cpu,
    fill_bonus_tokens_cpu, fill_accept_out_cache_loc_cpu, *OPS,
)


def as_module() -> types.ModuleType:
    """A module `sgl_kernel` with these names; any other name is a function that says so when called.

    Registers the attention of OPS on `torch.ops.sgl_kernel` too, where SGLang looks for it. The name
    `convert_weight_packed` must stay absent there: with it SGLang would pack weights for kernels that do not exist.
    """
    import torch

    module = types.ModuleType("sgl_kernel", "CPU names of sgl_kernel, filled by eyas-native.")
    for function in FUNCTIONS:
        setattr(module, function.__name__, function)
    for op in OPS:
        setattr(torch.ops.sgl_kernel, op.__name__, op)
    module.__dict__["__getattr__"] = _absent
    return module


def _absent(name: str) -> Any:
    if name.startswith("__"):
        raise AttributeError(name)

    def refuse(*_: Any, **__: Any) -> None:
        message = (f"sgl_kernel.{name} was called, but on a CPU eyas-native fills only what EAGLE-3 with a dense "
                   "target needs. This model or option needs a GPU")
        raise RuntimeError(message)

    return refuse
