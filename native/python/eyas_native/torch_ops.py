"""The operations as torch.ops.eyas.*, with fake implementations, for torch.compile and torch.export.

Importing this module imports torch and registers them once; nothing else in the package does. Every operation writes
into tensors given to it and returns nothing, exactly like the functions of the same names in eyas_native.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import eyas_native


def _register(name: str, written: tuple[str, ...]) -> Callable[[Callable[..., None]], Any]:
    def register(operation: Callable[..., None]) -> Any:
        custom = torch.library.custom_op(f"eyas::{name}", operation, mutates_args=written, device_types="cpu")
        custom.register_fake(lambda *args, **kwargs: None)
        return custom

    return register


_LINKS = ("positions", "retrive_index", "retrive_next_token", "retrive_next_sibling")


@_register("tree_build", ("tree_mask", *_LINKS))
def tree_build(
    parent_list: Tensor,
    selected_index: Tensor,
    seq_lens: Tensor,
    topk: int,
    depth: int,
    num_nodes: int,
    mask_mode: int,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
) -> None:
    """eyas_native.tree_build."""
    eyas_native.tree_build(
        parent_list,
        selected_index,
        seq_lens,
        topk=topk,
        depth=depth,
        num_nodes=num_nodes,
        mask_mode=mask_mode,
        tree_mask=tree_mask,
        positions=positions,
        retrive_index=retrive_index,
        retrive_next_token=retrive_next_token,
        retrive_next_sibling=retrive_next_sibling,
    )


@_register("tree_from_mask", _LINKS)
def tree_from_mask(
    tree_mask: Tensor,
    seq_lens: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
) -> None:
    """eyas_native.tree_from_mask."""
    eyas_native.tree_from_mask(
        tree_mask,
        seq_lens,
        positions=positions,
        retrive_index=retrive_index,
        retrive_next_token=retrive_next_token,
        retrive_next_sibling=retrive_next_sibling,
    )


@_register("verify_greedy", ("predicts", "accept_index", "accept_token_num"))
def verify_greedy(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
) -> None:
    """eyas_native.verify_greedy."""
    eyas_native.verify_greedy(
        predicts,
        accept_index,
        accept_token_num,
        candidates,
        retrive_index,
        retrive_next_token,
        retrive_next_sibling,
        target_predict,
    )


@_register("decode_attention", ("out",))
def decode_attention(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    out: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    scale: float,
    logit_cap: float = 0.0,
    window: int = 0,
) -> None:
    """eyas_native.decode_attention."""
    tables = (req_to_token, req_pool_indices, seq_lens)
    eyas_native.decode_attention(q, k_buffer, v_buffer, out, *tables, scale=scale, logit_cap=logit_cap, window=window)


@_register("tree_attention", ("out",))
def tree_attention(
    q: Tensor,
    k_buffer: Tensor,
    v_buffer: Tensor,
    out: Tensor,
    req_to_token: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    extend_lens: Tensor,
    extend_start: Tensor,
    scale: float,
    logit_cap: float = 0.0,
    window: int = 0,
    tree_mask: Tensor | None = None,
    causal: bool = True,
    tree_keys: int = 0,
) -> None:
    """eyas_native.tree_attention."""
    eyas_native.tree_attention(
        q,
        k_buffer,
        v_buffer,
        out,
        req_to_token,
        req_pool_indices,
        seq_lens,
        extend_lens,
        extend_start,
        scale=scale,
        logit_cap=logit_cap,
        window=window,
        tree_mask=tree_mask,
        causal=causal,
        tree_keys=tree_keys,
    )


@_register("kv_write", ("k_buffer", "v_buffer"))
def kv_write(k: Tensor, v: Tensor, k_buffer: Tensor, v_buffer: Tensor, loc: Tensor) -> None:
    """eyas_native.kv_write."""
    eyas_native.kv_write(k, v, k_buffer, v_buffer, loc)


@_register("kv_move", ("buffers",))
def kv_move(buffers: list[Tensor], tgt_loc: Tensor, src_loc: Tensor) -> None:
    """eyas_native.kv_move over tensors."""
    eyas_native.kv_move(buffers, tgt_loc, src_loc)


@_register("hidden_gather", ("out", "row_scale"))
def hidden_gather(
    sources: list[Tensor],
    index: Tensor | None,
    out: Tensor,
    norm: str = "none",
    weight: Tensor | None = None,
    eps: float = 1e-6,
    out_scale: float = 1.0,
    row_scale: Tensor | None = None,
) -> None:
    """eyas_native.hidden_gather, without residuals: torch.library has no schema for an optional list of tensors."""
    eyas_native.hidden_gather(
        sources,
        index,
        out,
        norm=norm,
        weight=weight,
        eps=eps,
        out_scale=out_scale,
        row_scale=row_scale,
    )


@_register("accept_commit", ("accept_lens", "tokens", "src_loc", "tgt_loc", "rows", "bonus"))
def accept_commit(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    out_cache_loc: Tensor,
    accept_lens: Tensor,
    tokens: Tensor,
    src_loc: Tensor,
    tgt_loc: Tensor,
    rows: Tensor,
    bonus: Tensor,
) -> None:
    """eyas_native.accept_commit."""
    eyas_native.accept_commit(
        predicts,
        accept_index,
        accept_token_num,
        out_cache_loc,
        accept_lens=accept_lens,
        tokens=tokens,
        src_loc=src_loc,
        tgt_loc=tgt_loc,
        rows=rows,
        bonus=bonus,
    )
