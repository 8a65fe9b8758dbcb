"""The rounds of tree speculative decoding, as SGLang runs them: draft, build the tree, verify, extend the draft.

Shape suffixes: B requests, N nodes of a tree (root included), S steps, k topk, T tokens, H hidden, E target hidden.

Source: `draft_forward`, `_draft_extend_for_prefill`, `_draft_extend_for_decode` in SGLang's
`srt/speculative/eagle_worker_v2.py`, `select_top_k_tokens` in `spec_utils.py`, `organize_draft_results` in
`eagle_utils.py` (0.5.20).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from eyas_draft.model import DraftModel
from eyas_draft.pool import BranchAttention, ExtendAttention, KvPool


@dataclass(frozen=True)
class TreeShape:
    """Steps, topk and nodes; a chain is topk 1 with steps + 1 nodes."""

    steps: int
    topk: int
    num_nodes: int


@dataclass(frozen=True)
class DraftState:
    """What a round begins with.

    Attributes:
        probs_bk, tokens_bk: the draft's topk after the last committed token: float32, int64 target ids [B, k].
        hidden_bh: the draft's recurrent state there, [B, H].
    """

    probs_bk: Tensor
    tokens_bk: Tensor
    hidden_bh: Tensor

    def keep(self, rows: Tensor) -> DraftState:
        """The state of some of the requests."""
        return DraftState(self.probs_bk[rows], self.tokens_bk[rows], self.hidden_bh[rows])


@dataclass(frozen=True)
class Proposal:
    """A round's draft tokens: parent_list int64 [B, k*(S-1)+1], selected_index and tokens int64 [B, N-1]."""

    parent_list: Tensor
    selected_index: Tensor
    tokens: Tensor


class Drafter:
    """The draft over its own pool.

    Args:
        model: the draft.
        draft_ids_v: int64 [V], target id of each draft id.
        pool: its keys and values.
        shape: of the tree.
    """

    def __init__(self, model: DraftModel, draft_ids_v: Tensor, pool: KvPool, shape: TreeShape) -> None:
        self.model, self.draft_ids_v, self.pool, self.shape = model, draft_ids_v, pool, shape

    @torch.no_grad()
    def extend(self, requests_b: Tensor, seq_lens_b: Tensor, extend_lens_b: Tensor, input_ids_t: Tensor,
               aux_tke: Tensor) -> DraftState:
        """Run over committed tokens with the target's states.

        Args:
            requests_b: int64 [B].
            seq_lens_b: tokens committed after this call.
            extend_lens_b: of which new.
            input_ids_t: for each new token the one after it (the last of each request is the newest token).
            aux_tke: the target's states of the new tokens.
        """
        attend = ExtendAttention(self.pool, requests_b, seq_lens_b, extend_lens_b)
        ends = extend_lens_b.cumsum(0)
        inside = torch.arange(input_ids_t.numel(), device=ends.device)
        positions = inside + (seq_lens_b - ends).repeat_interleave(extend_lens_b)
        normed, hidden = self.model(input_ids_t, self.model.fuse(aux_tke), positions, attend)
        last = ends - 1
        return DraftState(*self._top(normed[last]), hidden[last])

    @torch.no_grad()
    def propose(self, requests_b: Tensor, seq_lens_b: Tensor, state: DraftState) -> Proposal:
        """Expand the tree from the state after the last committed token."""
        steps, topk = self.shape.steps, self.shape.topk
        attend = BranchAttention(self.pool, requests_b, seq_lens_b, topk, steps)
        positions = seq_lens_b.repeat_interleave(topk)
        probs, tokens, hidden = state.probs_bk, state.tokens_bk, state.hidden_bh
        hidden = hidden.repeat_interleave(topk, dim=0)
        scores, inputs = probs, tokens.flatten()
        batch = requests_b.numel()
        all_scores, all_tokens = [probs], [tokens]
        parents = [torch.arange(-1, topk, device=tokens.device).expand(batch, -1)]
        for step in range(1, steps):
            normed, hidden = self.model(inputs, hidden, positions + step - 1, attend)
            attend.step = step
            probs, tokens = self._top(normed)
            expanded = (scores[..., None] * probs.view(batch, topk, topk)).flatten(1)
            candidates = tokens.view(batch, topk * topk)
            scores, chosen = expanded.topk(topk, dim=-1)
            inputs = candidates.gather(1, chosen).flatten()
            owner = chosen // topk + torch.arange(batch, device=chosen.device)[:, None] * topk
            hidden = hidden[owner.flatten()]
            all_scores.append(expanded)
            all_tokens.append(candidates)
            parents.append(chosen + topk * topk * (step - 1) + topk)
        # Stable: where the draft is all but sure, a node's score is its parent's, which must be picked before it.
        ranked = torch.cat(all_scores, dim=1).sort(dim=-1, descending=True, stable=True).indices
        picked = ranked[:, :self.shape.num_nodes - 1].sort(dim=-1).values
        parent_list = torch.cat(parents[:-1], dim=1) if steps > 1 else parents[0][:, :0]
        return Proposal(parent_list.contiguous(), picked, torch.cat(all_tokens, dim=1).gather(1, picked))

    def _top(self, normed: Tensor) -> tuple[Tensor, Tensor]:
        """topk of the draft's distribution, as probabilities and target ids; a chain's probabilities count as one."""
        logits = self.model.lm_head(normed).float()
        probs, ids = logits.softmax(-1).topk(self.shape.topk, dim=-1)
        if self.shape.topk == 1:
            probs = torch.ones_like(probs)
        return probs, self.draft_ids_v[ids]
