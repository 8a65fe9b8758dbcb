"""Draft trees and their verification.

Names keep SGLang's spelling (``retrive_*``), so that its arrays pass unchanged. B requests, n nodes a tree (root
included). Outputs are preallocated by the caller and written whole. Source of the semantics: SGLang 0.5.16,
``sgl-kernel/csrc/speculative/eagle_utils.cu``.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from eyas_native import _C
from eyas_native.arrays import View, target, view

MASK_FULL, MASK_TREE_ONLY, MASK_BITS, MASK_WORDS = 0, 1, 2, 3


def tree_build(
    parent_list: Any,
    selected_index: Any,
    seq_lens: Any,
    *,
    topk: int,
    depth: int,
    num_nodes: int,
    mask_mode: int,
    tree_mask: Any,
    positions: Any,
    retrive_index: Any,
    retrive_next_token: Any,
    retrive_next_sibling: Any,
) -> None:
    """Builds a tree from the candidates that were selected, the -1 fills included.

    Args:
        parent_list: i64 [B, topk * (depth - 1) + 1]; any width when depth is 1. Flat index of each slot's node.
        selected_index: i64 [B, n - 1], ascending flat indices; a node's slot is ``index // topk``, slot 0 the root.
        seq_lens: i64 [B], tokens before the tree.
        topk, depth, num_nodes: as the tree was drafted; depth is accepted for SGLang's sake, parent_list carries it.
        mask_mode: 0 bool rows of seq_len + n, back to back (prefix columns are written too); 1 bool [B, n, n]; 2 bits,
            1/2/4 bytes a row for n up to 8/16/32; 3 u32 words [B, n, ceil(n / 32)].
        tree_mask: bool or u8 (modes 2 and 3: any integer array of enough bytes).
        positions: i64 [B * n], seq_len + depth of the node.
        retrive_index: i64 [B, n], b * n + i.
        retrive_next_token: i64 [B, n], smallest child or -1.
        retrive_next_sibling: i64 [B, n], next larger sibling or -1.

    Raises:
        ArgumentError: shapes, dtypes, too many nodes for the mode, or an orphan; then nothing has been written.
    """
    _C.tree_build(
        view(parent_list, "parent_list"),
        view(selected_index, "selected_index"),
        view(seq_lens, "seq_lens"),
        topk,
        num_nodes,
        mask_mode,
        target(tree_mask, "tree_mask"),
        target(positions, "positions"),
        target(retrive_index, "retrive_index"),
        target(retrive_next_token, "retrive_next_token"),
        target(retrive_next_sibling, "retrive_next_sibling"),
    )


def tree_from_mask(
    tree_mask: Any,
    seq_lens: Any,
    *,
    positions: Any,
    retrive_index: Any,
    retrive_next_token: Any,
    retrive_next_sibling: Any,
) -> None:
    """Writes tree_build's outputs from a mask: a node's parent is the last earlier node that it sees.

    Args:
        tree_mask: bool or u8 [B, n, n]; row i says what node i sees.
        seq_lens: i64 [B]; the other arguments as in tree_build.

    Raises:
        ArgumentError: shapes, dtypes, or a node without a parent; then nothing has been written.
    """
    _C.tree_from_mask(
        view(tree_mask, "tree_mask"),
        view(seq_lens, "seq_lens"),
        target(positions, "positions"),
        target(retrive_index, "retrive_index"),
        target(retrive_next_token, "retrive_next_token"),
        target(retrive_next_sibling, "retrive_next_sibling"),
    )


@dataclass(frozen=True)
class TreeFault:
    """One node whose row of the mask cannot be of a tree."""

    request: int
    node: int
    problem: str

    def __str__(self) -> str:
        return f"request {self.request}, node {self.node} {self.problem}"


_PROBLEMS = ("", "does not see itself", "sees a later node", "sees no earlier node", "sees other nodes than its parent")


def tree_validate(tree_mask: Any) -> tuple[TreeFault, ...]:
    """All nodes whose row is not their parent's row plus themselves; empty for proper trees.

    Args:
        tree_mask: bool or u8 [B, n, n].

    Raises:
        ArgumentError: shape or dtype.
    """
    codes = _C.tree_validate(view(tree_mask, "tree_mask"))
    nodes = tree_mask.shape[1] or 1  # of trees without nodes there are no codes
    return _named([codes[i : i + nodes] for i in range(0, len(codes), nodes)])


def tree_faults(codes: Any) -> tuple[TreeFault, ...]:
    """What `eyas_native.cuda.tree_validate` wrote, as tree_validate returns it; waits for the device.

    Args:
        codes: u8 [B, n], a tensor or an array.
    """
    return _named(codes.tolist())


def _named(codes: Iterable[Iterable[int]]) -> tuple[TreeFault, ...]:
    rows = enumerate(codes)
    return tuple(TreeFault(b, i, _PROBLEMS[code]) for b, row in rows for i, code in enumerate(row) if code)


def verify_greedy(
    predicts: Any,
    accept_index: Any,
    accept_token_num: Any,
    candidates: Any,
    retrive_index: Any,
    retrive_next_token: Any,
    retrive_next_sibling: Any,
    target_predict: Any,
) -> None:
    """Walks each tree from the root along the target's own choices.

    Args:
        predicts: i32 [B * n], out: the target's token at each visited node (the last is the bonus); others untouched.
        accept_index: i32 [B, depth + 1], out: global ids of the accepted nodes, root first, -1 beyond.
        accept_token_num: i32 [B], out: accepted draft tokens, root and bonus not counted.
        candidates: i64 [B, n], the token of each node.
        retrive_index, retrive_next_token, retrive_next_sibling: i64 [B, n] as tree_build wrote them.
        target_predict: i64 [B, n] or [B * n], the target's greedy token after each node.

    Raises:
        ArgumentError: shapes, dtypes, or a link that leads outside the tree or in a circle.
    """
    _C.verify_greedy(
        *_verified(predicts, accept_index, accept_token_num),
        *_tree(candidates, retrive_index, retrive_next_token, retrive_next_sibling),
        view(target_predict, "target_predict"),
    )


def accept_commit(
    predicts: Any,
    accept_index: Any,
    accept_token_num: Any,
    out_cache_loc: Any,
    *,
    accept_lens: Any,
    tokens: Any,
    src_loc: Any,
    tgt_loc: Any,
    rows: Any,
    bonus: Any,
) -> None:
    """What a verify leads to: accepted tokens, KV slots to move, rows of hidden states to gather.

    Args:
        predicts, accept_index, accept_token_num: as a verify wrote them: i32 [B * n], [B, depth + 1], [B].
        out_cache_loc: i64 [B * n], the KV slot of each node.
        accept_lens: i32 [B], out: accepted tokens, bonus included.
        tokens: i64 [B, depth + 1], out: these tokens, the bonus last; -1 beyond, as in the next three.
        src_loc, tgt_loc: i64 [B, depth + 1], out: slots of the accepted nodes, and those where they belong, which are
            the request's first; pairs for kv_move.
        rows: i64 [B, depth + 1], out: global ids of the accepted nodes.
        bonus: i64 [B], out.

    Raises:
        ArgumentError: shapes, dtypes, a count or a node that cannot be; then nothing has been written.
    """
    _C.accept_commit(
        view(predicts, "predicts"),
        view(accept_index, "accept_index"),
        view(accept_token_num, "accept_token_num"),
        view(out_cache_loc, "out_cache_loc"),
        target(accept_lens, "accept_lens"),
        target(tokens, "tokens"),
        target(src_loc, "src_loc"),
        target(tgt_loc, "tgt_loc"),
        target(rows, "rows"),
        target(bonus, "bonus"),
    )


def verify_target_only(
    predicts: Any,
    accept_index: Any,
    accept_token_num: Any,
    candidates: Any,
    retrive_index: Any,
    retrive_next_token: Any,
    retrive_next_sibling: Any,
    uniform: Any,
    uniform_final: Any,
    target_probs: Any,
    *,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
) -> None:
    """Samples a path from the target's probabilities alone; SGLang's tree_speculative_sampling_target_only.

    Args:
        uniform: f32 [B, n], coins in [0, 1); node i's decides among its children. uniform_final: f32 [B].
        target_probs: f32 [B, n, V], the target's distribution after each node.
        threshold_single, threshold_acc: accept at p >= single, or at coin <= accumulated p / acc; 1 and 1 keep the
            target's distribution.
        others: as in verify_greedy.

    Raises:
        ArgumentError: shapes, dtypes, a token outside the vocabulary, or a link that leads nowhere.
    """
    _C.verify_sampled(
        *_verified(predicts, accept_index, accept_token_num),
        *_tree(candidates, retrive_index, retrive_next_token, retrive_next_sibling),
        view(uniform, "uniform"),
        view(uniform_final, "uniform_final"),
        view(target_probs, "target_probs"),
        None,
        False,
        threshold_single,
        threshold_acc,
    )


def verify_rejection(
    predicts: Any,
    accept_index: Any,
    accept_token_num: Any,
    candidates: Any,
    retrive_index: Any,
    retrive_next_token: Any,
    retrive_next_sibling: Any,
    uniform: Any,
    uniform_final: Any,
    target_probs: Any,
    draft_probs: Any,
    *,
    replacement: bool = True,
) -> None:
    """Samples a path by rejection, for drafts that were sampled (not the top-k); keeps the target's distribution.

    A child x drawn from q is accepted with probability min(1, p(x) / q(x)); after a refusal p becomes the positive part
    of p - q, normalised (multi-round speculative sampling, SpecInfer 2023). A chain is a tree of one child a node.

    Args:
        uniform: f32 [B, n], coins in [0, 1); node i's decides whether node i is accepted. uniform_final: f32 [B].
        draft_probs: f32 [B, n, V], what the children of each node were drawn from (rows of leaves are not read).
        replacement: siblings were drawn independently; else one after the other without repetition.
        others: as in verify_target_only.

    Raises:
        ArgumentError: shapes, dtypes, a token outside the vocabulary, or a link that leads nowhere.
    """
    _C.verify_sampled(
        *_verified(predicts, accept_index, accept_token_num),
        *_tree(candidates, retrive_index, retrive_next_token, retrive_next_sibling),
        view(uniform, "uniform"),
        view(uniform_final, "uniform_final"),
        view(target_probs, "target_probs"),
        view(draft_probs, "draft_probs"),
        replacement,
        1.0,
        1.0,
    )


def _verified(predicts: Any, accept_index: Any, accept_token_num: Any) -> tuple[View, View, View]:
    return (
        target(predicts, "predicts"),
        target(accept_index, "accept_index"),
        target(accept_token_num, "accept_token_num"),
    )


def _tree(
    candidates: Any, retrive_index: Any, retrive_next_token: Any, retrive_next_sibling: Any
) -> tuple[View, View, View, View]:
    return (
        view(candidates, "candidates"),
        view(retrive_index, "retrive_index"),
        view(retrive_next_token, "retrive_next_token"),
        view(retrive_next_sibling, "retrive_next_sibling"),
    )
