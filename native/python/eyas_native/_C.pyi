"""The extension: arrays arrive as arrays.View, checks of shape and dtype against one another happen inside."""

from collections.abc import Sequence
from typing import Any

from eyas_native.arrays import View

def tree_build(
    parent_list: View,
    selected_index: View,
    seq_lens: View,
    topk: int,
    num_nodes: int,
    mask_mode: int,
    tree_mask: View,
    positions: View,
    retrive_index: View,
    retrive_next_token: View,
    retrive_next_sibling: View,
) -> None: ...
def tree_from_mask(
    tree_mask: View,
    seq_lens: View,
    positions: View,
    retrive_index: View,
    retrive_next_token: View,
    retrive_next_sibling: View,
) -> None: ...
def tree_validate(tree_mask: View) -> bytes: ...
def verify_greedy(
    predicts: View,
    accept_index: View,
    accept_token_num: View,
    candidates: View,
    retrive_index: View,
    retrive_next_token: View,
    retrive_next_sibling: View,
    target_predict: View,
) -> None: ...
def verify_sampled(
    predicts: View,
    accept_index: View,
    accept_token_num: View,
    candidates: View,
    retrive_index: View,
    retrive_next_token: View,
    retrive_next_sibling: View,
    uniform: View,
    uniform_final: View,
    target_probs: View,
    draft_probs: View | None,
    replacement: bool,
    threshold_single: float,
    threshold_acc: float,
) -> None: ...
def attention(
    q: View,
    k_buffer: View,
    v_buffer: View,
    out: View,
    lse: View | None,
    req_to_token: View,
    req_pool_indices: View,
    seq_lens: View,
    extend_lens: View | None,
    extend_start: View | None,
    tree_mask: View | None,
    causal: bool,
    window: int,
    scale: float,
    logit_cap: float,
    tree_keys: int,
) -> None: ...
def kv_write(k: View, v: View, k_buffer: View, v_buffer: View, loc: View) -> None: ...
def kv_move(
    buffers: Sequence[int],
    strides: Sequence[int],
    bytes: Sequence[int],
    slots: int,
    tgt_loc: View,
    src_loc: View,
) -> None: ...
def accept_commit(
    predicts: View,
    accept_index: View,
    accept_token_num: View,
    out_cache_loc: View,
    accept_lens: View,
    tokens: View,
    src_loc: View,
    tgt_loc: View,
    rows: View,
    bonus: View,
) -> None: ...
def hidden_gather(
    sources: list[View],
    residuals: list[View | None],
    index: View | None,
    out: View,
    norm: int,
    weight: View | None,
    eps: float,
    out_scale: float,
    row_scale: View | None,
) -> None: ...
def build_info() -> dict[str, Any]: ...
def isas() -> str: ...
def isa() -> str: ...
def set_isa(name: str) -> None: ...
def threads() -> int: ...
def set_threads(n: int) -> None: ...
