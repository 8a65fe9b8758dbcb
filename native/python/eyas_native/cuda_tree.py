"""Draft trees on CUDA: checked calls; callers use `eyas_native.cuda`."""

from __future__ import annotations

from eyas_native.cuda_core import Faults, Tensor, current_stream, pointer, run


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
    words: Tensor | None = None,
    invalid: Tensor | None = None,
    stream: int | None = None,
) -> None:
    """Draft trees from the selected entries of the score table; writes everything, -1 fills and prefix included.

    Args:
        parent_list: i64 [B, topk * (depth - 1) + 1] ([B, 0] at depth 1). selected_index: i64 [B, n - 1], rising.
        mask_mode: 0 flat bool (rows of seq_len + n), 1 bool [B, n, n], 2 bit-packed u8/u16/u32 (n <= 32),
            3 words [B, n, ceil(n / 32)].
        positions: i64 [B * n]. retrive_*: i64 [B, n], as SGLang's build_tree_kernel_efficient leaves them.
        words: i32 or u32 [B, n, ceil(n / 32)], the mask of mode 3, written in the same launch whatever the mode.
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
    _links(f, batch, n, positions, retrive_index, retrive_next_token, retrive_next_sibling)
    if mask_mode < 2:
        f.tensor("tree_mask", tree_mask, ("bool", "uint8"))
    elif f.tensor("tree_mask", tree_mask, ("uint8", "int16", "int32", "uint16", "uint32")):
        size = tree_mask.numel() * tree_mask.element_size()
        wanted = batch * n * (4 * ((n + 31) // 32) if mask_mode == 3 else 1 if n <= 8 else 2 if n <= 16 else 4)
        f.need(size >= wanted, f"tree_mask has {size} bytes, wanted {wanted}")
    if words is not None:
        f.tensor("words", words, ("int32", "uint32"), (batch, n, (n + 31) // 32))
    if invalid is not None:
        f.tensor("invalid", invalid, ("int32",), (batch,))
    f.check()
    if mask_mode < 2:
        f.need(
            tree_mask.numel() >= batch * n * n,
            f"tree_mask has {tree_mask.numel()} entries, wanted at least {batch * n * n}",
        )
    f.contiguous(parent_list=parent_list, selected_index=selected_index, tree_mask=tree_mask, words=words)
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
        pointer(words),
        pointer(positions),
        pointer(retrive_index),
        pointer(retrive_next_token),
        pointer(retrive_next_sibling),
        pointer(invalid),
        current_stream(stream),
    )


def tree_from_mask(
    tree_mask: Tensor,
    seq_lens: Tensor,
    *,
    positions: Tensor,
    retrive_index: Tensor,
    retrive_next_token: Tensor,
    retrive_next_sibling: Tensor,
    invalid: Tensor | None = None,
    stream: int | None = None,
) -> None:
    """Writes tree_build's outputs from a mask: a node's parent is the last earlier node that it sees.

    Args:
        tree_mask: bool or u8 [B, n, n], n up to 256; row i says what node i sees. seq_lens: i64 [B].
        positions: i64 [B * n]. retrive_*: i64 [B, n].
        invalid: i32 [B], set to 1 for a tree with a node that sees no earlier one (which then hangs from the root), else 0.

    Raises:
        ArgumentError: every argument that does not fit, by name.
    """
    f = Faults("tree_from_mask")
    batch, n = _mask(f, tree_mask)
    f.tensor("seq_lens", seq_lens, ("int64",), (batch,))
    _links(f, batch, n, positions, retrive_index, retrive_next_token, retrive_next_sibling)
    if invalid is not None:
        f.tensor("invalid", invalid, ("int32",), (batch,))
    f.check()
    run(
        "eyas_tree_from_mask",
        pointer(tree_mask),
        pointer(seq_lens),
        batch,
        n,
        pointer(positions),
        pointer(retrive_index),
        pointer(retrive_next_token),
        pointer(retrive_next_sibling),
        pointer(invalid),
        current_stream(stream),
    )


def tree_validate(tree_mask: Tensor, faults: Tensor, *, stream: int | None = None) -> None:
    """What is wrong with each node's row, as codes on the device; `eyas_native.tree_faults` puts them into words.

    Args:
        tree_mask: bool or u8 [B, n, n], n up to 256.
        faults: u8 [B, n], written: 0 where the row is the parent's row plus the node itself, else 1 to 4.

    Raises:
        ArgumentError: every argument that does not fit, by name.
    """
    f = Faults("tree_validate")
    batch, n = _mask(f, tree_mask)
    if f.tensor("faults", faults, ("uint8",), (batch, n)):
        f.contiguous(faults=faults)
    f.check()
    run("eyas_tree_validate", pointer(tree_mask), batch, n, pointer(faults), current_stream(stream))


def _mask(f: Faults, tree_mask: Tensor) -> tuple[int, int]:
    """Checks a mask [B, n, n], at once: the other arguments' shapes follow from it."""
    f.tensor("tree_mask", tree_mask, ("bool", "uint8"), (None, None, None))
    f.check()
    batch, n = int(tree_mask.shape[0]), int(tree_mask.shape[1])
    f.need(batch >= 1 and 1 <= n <= 256, f"tree_mask holds {batch} trees of {n} nodes, wanted 1 or more of 1 to 256")
    f.need(tree_mask.shape[2] == n, f"tree_mask has rows of {tree_mask.shape[2]}, wanted {n} as it has rows")
    f.contiguous(tree_mask=tree_mask)
    return batch, n


def _links(f: Faults, batch: int, n: int, positions: Tensor, index: Tensor, child: Tensor, sibling: Tensor) -> None:
    f.tensor("positions", positions, ("int64",), (batch * n,))
    names = ("retrive_index", "retrive_next_token", "retrive_next_sibling")
    for name, t in zip(names, (index, child, sibling), strict=True):
        if f.tensor(name, t, ("int64",), (batch, n)):
            f.contiguous(**{name: t})
