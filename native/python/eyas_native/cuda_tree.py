"""Trees, verification and commit on CUDA: checked calls; callers use `eyas_native.cuda`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from eyas_native import cuda_abi as abi
from eyas_native.cuda_core import Faults, Tensor, current_stream, pointer, run

MASK_FULL, MASK_QLEN_ONLY, MASK_BITPACKED, MASK_WORDS = 0, 1, 2, 3


def tree_build(
    parent_list: Tensor,
    selected_index: Tensor,
    seq_lens: Tensor,
    *,
    topk: int,
    depth: int,
    num_nodes: int,
    mask_mode: int,
    tree_mask: Tensor,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    invalid: Tensor | None = None,
    stream: int | None = None,
) -> None:
    """Draft trees from the selected entries of the score table; writes everything, -1 fills and prefix included.

    Args:
        parent_list: i64 [B, topk * (depth - 1) + 1] ([B, 0] at depth 1). selected_index: i64 [B, n - 1], rising.
        mask_mode: 0 flat bool (rows of seq_len + n), 1 bool [B, n, n], 2 bit-packed u8/u16/u32 (n <= 32),
            3 words [B, n, ceil(n / 32)].
        positions: i64 [B * n]. retrive_*: i64 [B, n], as SGLang's build_tree_kernel_efficient leaves them.
        invalid: i32 [B], set to 1 for a tree with an orphaned entry (which then hangs from the root), else 0.

    Raises:
        ArgumentError: every argument that does not fit, by name.
    """
    f, n = Faults("tree_build"), num_nodes
    batch = seq_lens.shape[0] if hasattr(seq_lens, "shape") and len(seq_lens.shape) else 0
    f.need(1 <= n <= 256, f"num_nodes is {n}, wanted 1 to 256")
    f.need(topk >= 1 and depth >= 1, f"topk, depth are {topk}, {depth}, wanted at least 1")
    f.need(
        0 <= mask_mode <= 3 and not (mask_mode == 2 and n > 32),
        f"mask_mode is {mask_mode}, wanted 0 to 3, and 2 only up to 32 nodes",
    )
    f.tensor("seq_lens", seq_lens, ("int64",), (None,))
    f.tensor("selected_index", selected_index, ("int64",), (batch, n - 1))
    if f.tensor("parent_list", parent_list, ("int64",), (batch, None)):
        wanted = 0 if depth == 1 else topk * (depth - 1) + 1
        f.need(parent_list.shape[1] >= wanted, f"parent_list has {parent_list.shape[1]} columns, wanted {wanted}")
    for name, t in (
        ("retrive_index", retrive_index),
        ("retrive_next_token", retrive_next_token),
        ("retrive_next_sibling", retrive_next_sibling),
    ):
        f.tensor(name, t, ("int64",), (batch, n))
    f.tensor("positions", positions, ("int64",), (batch * n,))
    if mask_mode < 2:
        f.tensor("tree_mask", tree_mask, ("bool", "uint8"))
    elif f.tensor("tree_mask", tree_mask, ("uint8", "int16", "int32", "uint16", "uint32")):
        size = tree_mask.numel() * tree_mask.element_size()
        wanted = batch * n * (4 * ((n + 31) // 32) if mask_mode == 3 else 1 if n <= 8 else 2 if n <= 16 else 4)
        f.need(size >= wanted, f"tree_mask has {size} bytes, wanted {wanted}")
    if invalid is not None:
        f.tensor("invalid", invalid, ("int32",), (batch,))
    f.check()
    if mask_mode < 2:
        f.need(
            tree_mask.numel() >= batch * n * n,
            f"tree_mask has {tree_mask.numel()} entries, wanted at least {batch * n * n}",
        )
    for name, t in (("parent_list", parent_list), ("selected_index", selected_index), ("tree_mask", tree_mask)):
        f.need(t.is_contiguous(), f"{name} is not contiguous")
    f.check()
    run(
        "eyas_tree_build",
        pointer(parent_list),
        parent_list.shape[1],
        pointer(selected_index),
        pointer(seq_lens),
        batch,
        topk,
        depth,
        n,
        mask_mode,
        pointer(tree_mask),
        pointer(positions),
        pointer(retrive_index),
        pointer(retrive_next_token),
        pointer(retrive_next_sibling),
        pointer(invalid),
        current_stream(stream),
    )


def _verify(
    call: str,
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    tree: Sequence[Tensor],
    stream: int | None,
) -> tuple[Faults, abi.Verify]:
    f = Faults(call)
    f.tensor("candidates", candidates, ("int64",), (None, None))
    f.check()
    batch, n = candidates.shape
    f.need(1 <= n <= 256, f"candidates has {n} nodes, wanted 1 to 256")
    for name, t in zip(("retrive_index", "retrive_next_token", "retrive_next_sibling"), tree, strict=True):
        f.tensor(name, t, ("int64",), (batch, n))
    f.tensor("predicts", predicts, ("int32",), (batch * n,))
    f.tensor("accept_index", accept_index, ("int32",), (batch, None))
    f.tensor("accept_token_num", accept_token_num, ("int32",), (batch,))
    f.check()
    v = abi.Verify(
        struct_size=ctypes.sizeof(abi.Verify),
        batch=batch,
        nodes=n,
        max_accept=accept_index.shape[1],
        candidates=pointer(candidates),
        retrive_index=pointer(tree[0]),
        retrive_next_token=pointer(tree[1]),
        retrive_next_sibling=pointer(tree[2]),
        predicts=pointer(predicts),
        accept_index=pointer(accept_index),
        accept_token_num=pointer(accept_token_num),
        stream=current_stream(stream),
    )
    return f, v


def verify_greedy(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    target_predict: Tensor,
    *,
    stream: int | None = None,
) -> None:
    """The path whose tokens are the target's own choices; SGLang's verify_tree_greedy.

    Args:
        predicts: i32 [B * n], written at visited nodes. accept_index: i32 [B, depth + 1], written (-1 beyond the path).
        accept_token_num: i32 [B], written, bonus token excluded. candidates, retrive_*, target_predict: i64 [B, n].
    """
    f, v = _verify(
        "verify_greedy",
        predicts,
        accept_index,
        accept_token_num,
        candidates,
        (retrive_index, retrive_next_token, retrive_next_sibling),
        stream,
    )
    f.tensor("target_predict", target_predict, ("int64",), (v.batch, v.nodes))
    f.check()
    v.target_predict = pointer(target_predict)
    run("eyas_verify_greedy", ctypes.byref(v))


def verify_target_only(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform: Tensor,
    uniform_final: Tensor,
    target_probs: Tensor,
    *,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    stream: int | None = None,
) -> None:
    """Sampled verification from the target's probabilities alone; SGLang's tree_speculative_sampling_target_only.

    Args:
        uniform: f32 [B, n]; uniform_final: f32 [B]; target_probs: f32 [B, n, V], V up to 524,288, read only.
        threshold_single, threshold_acc: accept at p >= single, or at coin <= accumulated p / acc; 1 and 1 keep the
            target's distribution.
    """
    f, v = _verify(
        "verify_target_only",
        predicts,
        accept_index,
        accept_token_num,
        candidates,
        (retrive_index, retrive_next_token, retrive_next_sibling),
        stream,
    )
    _sampling(f, v, uniform, uniform_final, target_probs)
    f.need(threshold_acc > 0, f"threshold_acc is {threshold_acc}, wanted a positive number")
    f.check()
    v.threshold_single, v.threshold_acc = threshold_single, threshold_acc
    run("eyas_verify_target_only", ctypes.byref(v))


def _sampling(f: Faults, v: abi.Verify, uniform: Tensor, uniform_final: Tensor, target_probs: Tensor) -> None:
    f.tensor("uniform", uniform, ("float32",), (v.batch, v.nodes))
    f.tensor("uniform_final", uniform_final, ("float32",), (v.batch,))
    f.tensor("target_probs", target_probs, ("float32",), (v.batch, v.nodes, None))
    f.check()
    f.contiguous(uniform=uniform, uniform_final=uniform_final, target_probs=target_probs)
    v.uniform, v.uniform_final, v.target_probs = pointer(uniform), pointer(uniform_final), pointer(target_probs)
    v.vocab = target_probs.shape[2]


def verify_rejection(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    candidates: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    uniform: Tensor,
    uniform_final: Tensor,
    target_probs: Tensor,
    draft_probs: Tensor,
    *,
    replacement: bool = True,
    stream: int | None = None,
) -> None:
    """Sampled verification by rejection, for drafts that were sampled; as `eyas_native.verify_rejection`.

    Args:
        uniform, uniform_final, target_probs: as in verify_target_only; node i's coin decides whether it is accepted.
        draft_probs: f32 [B, n, V], what the children of each node were drawn from (rows of leaves are not read).
        replacement: siblings were drawn independently; else one after the other without repetition.
    """
    f, v = _verify(
        "verify_rejection",
        predicts,
        accept_index,
        accept_token_num,
        candidates,
        (retrive_index, retrive_next_token, retrive_next_sibling),
        stream,
    )
    _sampling(f, v, uniform, uniform_final, target_probs)
    if f.tensor("draft_probs", draft_probs, ("float32",), tuple(target_probs.shape)):
        f.contiguous(draft_probs=draft_probs)
    f.check()
    v.draft_probs, v.replacement = pointer(draft_probs), int(replacement)
    run("eyas_verify_rejection", ctypes.byref(v))


def accept_commit(
    predicts: Tensor,
    accept_index: Tensor,
    accept_token_num: Tensor,
    out_cache_loc: Tensor,
    *,
    accept_lens: Tensor,
    tokens: Tensor,
    src_loc: Tensor,
    tgt_loc: Tensor,
    rows: Tensor,
    bonus: Tensor,
    stream: int | None = None,
) -> None:
    """What a verify leads to, in one launch.

    Args:
        predicts, accept_index, accept_token_num: as verify wrote them. out_cache_loc: i64 [B * n], the nodes' slots.
        accept_lens: i32 [B], bonus included. tokens, src_loc, tgt_loc, rows: i64 [B, max_accept], -1 beyond.
        bonus: i64 [B].
    """
    f = Faults("accept_commit")
    f.tensor("accept_index", accept_index, ("int32",), (None, None))
    f.check()
    batch, width = accept_index.shape
    f.tensor("predicts", predicts, ("int32",), (None,))
    f.tensor("out_cache_loc", out_cache_loc, ("int64",), tuple(predicts.shape))
    f.need(
        predicts.shape[0] % batch == 0, f"predicts has {predicts.shape[0]} entries, wanted a multiple of batch {batch}"
    )
    f.tensor("accept_token_num", accept_token_num, ("int32",), (batch,))
    f.tensor("accept_lens", accept_lens, ("int32",), (batch,))
    for name, t in (("tokens", tokens), ("src_loc", src_loc), ("tgt_loc", tgt_loc), ("rows", rows)):
        f.tensor(name, t, ("int64",), (batch, width))
    f.tensor("bonus", bonus, ("int64",), (batch,))
    f.check()
    run(
        "eyas_accept_commit",
        pointer(predicts),
        pointer(accept_index),
        pointer(accept_token_num),
        pointer(out_cache_loc),
        batch,
        predicts.shape[0] // batch,
        width,
        pointer(accept_lens),
        pointer(tokens),
        pointer(src_loc),
        pointer(tgt_loc),
        pointer(rows),
        pointer(bonus),
        current_stream(stream),
    )
