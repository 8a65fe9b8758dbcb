"""Verification and commit on CUDA: checked calls; callers use `eyas_native.cuda`."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

from eyas_native import cuda_abi as abi
from eyas_native.cuda_core import Faults, Tensor, current_stream, pointer, run


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
    f.contiguous(
        accept_index=accept_index,
        candidates=candidates,
        retrive_index=tree[0],
        retrive_next_token=tree[1],
        retrive_next_sibling=tree[2],
    )
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
        All of them contiguous.
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
    if f.tensor("target_predict", target_predict, ("int64",), (v.batch, v.nodes)):
        f.contiguous(target_predict=target_predict)
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
    f.need(batch >= 1, "accept_index has no rows, wanted one a request")
    f.check()
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
    f.contiguous(accept_index=accept_index, tokens=tokens, src_loc=src_loc, tgt_loc=tgt_loc, rows=rows)
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
