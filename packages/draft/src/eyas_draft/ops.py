"""Tree and attention operations of decoding: those of eyas_native, or a plain torch statement of the same.

Both have one interface (caller-allocated outputs, names and dtypes as in eyas_native). The plain statement runs on any
device and is slow; it is used where asked for by name, and as the second opinion in tests.

Source: SGLang's `build_tree_kernel_efficient` and `verify_tree_greedy`, by their semantics.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor


class Ops(Protocol):
    """What decoding needs; shapes as in eyas_native."""

    def tree_build(self, parent_list: Tensor, selected_index: Tensor, seq_lens: Tensor, *, topk: int, depth: int,
                   num_nodes: int, mask_mode: int, tree_mask: Tensor, positions: Tensor, retrive_index: Tensor,
                   retrive_next_token: Tensor, retrive_next_sibling: Tensor) -> None:
        """Fill mask, positions and child/sibling links of B trees of `num_nodes` nodes."""

    def verify_greedy(self, predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor,
                      retrive_index: Tensor, retrive_next_token: Tensor, retrive_next_sibling: Tensor,
                      target_predict: Tensor) -> None:
        """Walk each tree along the target's choices."""

    def kv_write(self, k: Tensor, v: Tensor, k_buffer: Tensor, v_buffer: Tensor, loc: Tensor) -> None:
        """k_buffer[loc] = k, v_buffer[loc] = v."""

    def decode_attention(self, q: Tensor, k_buffer: Tensor, v_buffer: Tensor, out: Tensor, req_to_token: Tensor,
                         req_pool_indices: Tensor, seq_lens: Tensor, *, scale: float) -> None:
        """One query per request over its whole row."""

    def tree_attention(self, q: Tensor, k_buffer: Tensor, v_buffer: Tensor, out: Tensor, req_to_token: Tensor,
                       req_pool_indices: Tensor, seq_lens: Tensor, extend_lens: Tensor, extend_start: Tensor, *,
                       scale: float, tree_mask: Tensor | None, causal: bool) -> None:
        """Several queries per request over prefix and tree."""


def get_ops(name: str) -> Ops:
    """`native` or `torch`."""
    if name == "native":
        import eyas_native
        native: Ops = eyas_native  # the module itself has the interface
        return native
    return TorchOps()


class TorchOps:
    """The plain statement."""

    def tree_build(self, parent_list: Tensor, selected_index: Tensor, seq_lens: Tensor, *, topk: int, depth: int,
                   num_nodes: int, mask_mode: int, tree_mask: Tensor, positions: Tensor, retrive_index: Tensor,
                   retrive_next_token: Tensor, retrive_next_sibling: Tensor) -> None:
        """A node's slot is selected // topk: slot 0 hangs on the root, others on the node that parent_list names."""
        assert mask_mode == 1, "the plain statement writes the tree block only"
        batch, n = seq_lens.numel(), num_nodes
        child, sibling = ([[-1] * n for _ in range(batch)] for _ in range(2))
        depth_of, mask = [[0] * n for _ in range(batch)], torch.zeros(batch, n, n, dtype=torch.bool)
        for b, (chosen, table) in enumerate(zip(selected_index.tolist(), parent_list.tolist(), strict=True)):
            node_of = {entry: node + 1 for node, entry in enumerate(chosen)}
            parents = [0] + [node_of[table[entry // topk]] if entry // topk else 0 for entry in chosen]
            mask[b, 0, 0] = True
            for node in range(1, n):
                mask[b, node] = mask[b, parents[node]]
                mask[b, node, node] = True
                depth_of[b][node] = depth_of[b][parents[node]] + 1
            for node in range(n - 1, 0, -1):
                sibling[b][node] = child[b][parents[node]]
                child[b][parents[node]] = node
        tree_mask.copy_(mask.flatten())
        positions.copy_((seq_lens[:, None].cpu() + torch.tensor(depth_of)).flatten())
        retrive_index.copy_(torch.arange(batch * n).view(batch, n))
        retrive_next_token.copy_(torch.tensor(child))
        retrive_next_sibling.copy_(torch.tensor(sibling))

    def verify_greedy(self, predicts: Tensor, accept_index: Tensor, accept_token_num: Tensor, candidates: Tensor,
                      retrive_index: Tensor, retrive_next_token: Tensor, retrive_next_sibling: Tensor,
                      target_predict: Tensor) -> None:
        """From the root, follow the child that holds the target's choice; the last choice is the bonus."""
        del retrive_index  # always b * n + node
        tokens, wanted = candidates.tolist(), target_predict.tolist()
        child, sibling = retrive_next_token.tolist(), retrive_next_sibling.tolist()
        n, depth = candidates.shape[1], accept_index.shape[1]
        accepted, choices = [], predicts.tolist()
        for b in range(candidates.shape[0]):
            path = [0]
            while len(path) < depth:
                node = child[b][path[-1]]
                while node != -1 and tokens[b][node] != wanted[b][path[-1]]:
                    node = sibling[b][node]
                if node == -1:
                    break
                path.append(node)
            for node in path:
                choices[b * n + node] = wanted[b][node]
            accepted.append([b * n + node for node in path] + [-1] * (depth - len(path)))
        predicts.copy_(torch.tensor(choices))
        accept_index.copy_(torch.tensor(accepted))
        accept_token_num.copy_((torch.tensor(accepted) >= 0).sum(1) - 1)

    def kv_write(self, k: Tensor, v: Tensor, k_buffer: Tensor, v_buffer: Tensor, loc: Tensor) -> None:
        """Indexed assignment."""
        k_buffer[loc], v_buffer[loc] = k, v

    def decode_attention(self, q: Tensor, k_buffer: Tensor, v_buffer: Tensor, out: Tensor, req_to_token: Tensor,
                         req_pool_indices: Tensor, seq_lens: Tensor, *, scale: float) -> None:
        """As tree attention with one query each."""
        ones = torch.ones_like(seq_lens)
        self.tree_attention(q, k_buffer, v_buffer, out, req_to_token, req_pool_indices, seq_lens, ones,
                            torch.arange(q.shape[0], device=q.device), scale=scale, tree_mask=None, causal=True)

    def tree_attention(self, q: Tensor, k_buffer: Tensor, v_buffer: Tensor, out: Tensor, req_to_token: Tensor,
                       req_pool_indices: Tensor, seq_lens: Tensor, extend_lens: Tensor, extend_start: Tensor, *,
                       scale: float, tree_mask: Tensor | None, causal: bool) -> None:
        """Rows gathered and padded, one masked softmax over all requests."""
        batch, longest, width = seq_lens.numel(), int(seq_lens.max()), int(extend_lens.max())
        rows = req_to_token[req_pool_indices.long(), :longest].long()
        column = torch.arange(longest, device=q.device)
        node = torch.arange(width, device=q.device)
        prefix = (seq_lens - extend_lens).long()
        valid = node[None] < extend_lens[:, None]
        index = (extend_start.long()[:, None] + node[None]).clamp(max=q.shape[0] - 1)
        seen = column[None, None] <= (prefix[:, None] + node[None])[..., None]
        if not causal:
            seen = seen | (column < seq_lens[:, None])[:, None]
        if tree_mask is not None:
            place = column[None] - prefix[:, None]
            block = tree_mask.view(batch, width, width).bool().gather(
                2, place.clamp(0, width - 1)[:, None].expand(-1, width, -1))
            seen = torch.where((place >= 0)[:, None], block & (place < width)[:, None], True)
        groups = q.shape[1] // k_buffer.shape[1]
        keys = k_buffer[rows].transpose(1, 2).repeat_interleave(groups, dim=1)
        values = v_buffer[rows].transpose(1, 2).repeat_interleave(groups, dim=1)
        result = torch.nn.functional.scaled_dot_product_attention(
            q[index].transpose(1, 2), keys, values, attn_mask=seen[:, None], scale=scale)
        out[index[valid]] = result.transpose(1, 2)[valid]
