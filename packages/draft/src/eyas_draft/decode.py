"""The reference decoder: a Hugging Face target, a draft and the tree operations; what serving is compared with.

Greedy, so the answer must be the one that plain greedy decoding gives, token for token (in float32; in bfloat16 ties
break differently with the number of tokens in a pass).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from eyas_contract import InvalidInput
from eyas_draft.model import DraftModel
from eyas_draft.ops import Ops
from eyas_draft.pool import ExtendAttention, KvPool
from eyas_draft.rounds import Drafter, Proposal, TreeShape
from eyas_draft.target_model import TargetModel


@dataclass
class Answer:
    """One prompt's answer.

    Attributes:
        tokens: answer ids, the end token included.
        accepted: draft tokens accepted in each round (as the engine counts them: also those after the end).
    """

    tokens: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)


class Decoder:
    """Decodes batches of prompts.

    Args:
        target: the target.
        draft: the draft, in the target's dtype, on its device.
        draft_ids_v: int64 [V], target id of each draft id.
        shape: of the tree.
        ops: tree and attention operations.
        max_new_tokens: longest answer.
    """

    def __init__(self, target: TargetModel, draft: DraftModel, draft_ids_v: Tensor, shape: TreeShape, ops: Ops,
                 max_new_tokens: int) -> None:
        check_shape(shape)
        self.target, self.draft, self.shape, self.ops, self.max_new = target, draft, shape, ops, max_new_tokens
        self.draft_ids_v = draft_ids_v.to(target.device)

    @torch.no_grad()
    def decode(self, prompts: Sequence[Sequence[int]],
               progress: Callable[[int], None] = lambda _: None) -> list[Answer]:
        """Answer all prompts together; `progress` is told the tokens of each round.

        Raises:
            InvalidInput: an empty prompt.
        """
        answers = [Answer() for _ in prompts]
        pool, seq_lens, first, aux = self._prefill(prompts)
        drafter = self._drafter(len(prompts), max(map(len, prompts)))
        requests = torch.arange(len(prompts), device=self.target.device)
        for answer, token in zip(answers, first.tolist(), strict=True):
            answer.tokens.append(token)
        flat = torch.tensor([t for p in prompts for t in p], device=self.target.device)
        shifted = flat.roll(-1)
        shifted[seq_lens.cumsum(0) - 1] = first
        state = drafter.extend(requests, seq_lens, seq_lens, shifted, aux)
        bonus = first
        alive = torch.tensor([not self._finished(a) for a in answers], device=self.target.device)
        requests, seq_lens, bonus, state = requests[alive], seq_lens[alive], bonus[alive], state.keep(alive)
        while requests.numel():
            proposal = drafter.propose(requests, seq_lens, state)
            predicts, accept_index, counts, aux = self._verify(pool, requests, seq_lens, bonus, proposal)
            rows = accept_index[accept_index >= 0].long()
            lens = counts.long() + 1
            seq_lens = seq_lens + lens
            emitted = predicts[rows].long()
            state = drafter.extend(requests, seq_lens, lens, emitted, aux[rows])
            bonus = emitted[lens.cumsum(0) - 1]
            alive = self._record(answers, requests, emitted, lens)
            progress(int(lens.sum()))
            requests, seq_lens, bonus, state = requests[alive], seq_lens[alive], bonus[alive], state.keep(alive)
        return answers

    @torch.no_grad()
    def greedy(self, prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Plain greedy answers by the same target, one token a pass, without the draft."""
        answers = [Answer() for _ in prompts]
        pool, seq_lens, token, _ = self._prefill(prompts)
        requests = torch.arange(len(prompts), device=self.target.device)
        alive = self._record(answers, requests, token, torch.ones_like(token))
        while bool(alive.any()):
            requests, seq_lens, token = requests[alive], seq_lens[alive] + 1, token[alive]
            attend = ExtendAttention(pool, requests, seq_lens, torch.ones_like(seq_lens))
            logits, _ = self.target.forward(token, seq_lens - 1, attend)
            token = logits.argmax(-1)
            alive = self._record(answers, requests, token, torch.ones_like(token))
        return [answer.tokens for answer in answers]

    def _prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[KvPool, Tensor, Tensor, Tensor]:
        """All prompts in one pass: pool, lengths [B], first answer token [B], aux states of all prompt tokens."""
        if not all(prompts):
            raise InvalidInput("prompts", "an empty prompt", "at least one token", "Remove it.")
        device = self.target.device
        lens = torch.tensor([len(p) for p in prompts], device=device)
        room = max(map(len, prompts)) + self.max_new + 2 * self.shape.num_nodes + self.shape.steps
        pool = self.target.pool(self.ops, len(prompts), room)
        ids = torch.tensor([t for p in prompts for t in p], device=device)
        positions = torch.cat([torch.arange(len(p), device=device) for p in prompts])
        attend = ExtendAttention(pool, torch.arange(len(prompts), device=device), lens, lens)
        logits, aux = self.target.forward(ids, positions, attend, lens.cumsum(0) - 1)
        return pool, lens, logits.argmax(-1), aux

    def _drafter(self, requests: int, longest: int) -> Drafter:
        spec = self.draft.spec
        room = longest + self.max_new + 2 * self.shape.num_nodes + self.shape.steps * (self.shape.topk + 1)
        pool = KvPool(self.ops, num_layers=spec.num_layers, num_kv_heads=spec.num_kv_heads, head_dim=spec.head_dim,
                      value_dim=spec.value_dim, requests=requests, length=room, dtype=self.target.dtype,
                      device=self.target.device)
        return Drafter(self.draft, self.draft_ids_v, pool, self.shape)

    def _verify(self, pool: KvPool, requests: Tensor, seq_lens: Tensor, bonus: Tensor,
                proposal: Proposal) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Run the tree through the target; keep the accepted path's keys and values at the front.

        Returns:
            predicts int32 [B*N], accept_index int32 [B, S+1] (-1 after the end), accepted draft tokens int32 [B],
            aux states [B*N, K*E].
        """
        batch, n, device = requests.numel(), self.shape.num_nodes, requests.device
        mask = torch.empty(batch * n * n, dtype=torch.bool, device=device)
        positions = torch.empty(batch * n, dtype=torch.int64, device=device)
        index, child, sibling = (torch.empty(batch, n, dtype=torch.int64, device=device) for _ in range(3))
        self.ops.tree_build(proposal.parent_list, proposal.selected_index, seq_lens, topk=self.shape.topk,
                            depth=self.shape.steps, num_nodes=n, mask_mode=1, tree_mask=mask, positions=positions,
                            retrive_index=index, retrive_next_token=child, retrive_next_sibling=sibling)
        candidates = torch.cat((bonus[:, None], proposal.tokens), dim=1)
        attend = ExtendAttention(pool, requests, seq_lens + n, torch.full_like(seq_lens, n), mask)
        logits, aux = self.target.forward(candidates.flatten(), positions, attend)
        predicts = torch.zeros(batch * n, dtype=torch.int32, device=device)
        accept = torch.full((batch, self.shape.steps + 1), -1, dtype=torch.int32, device=device)
        counts = torch.zeros(batch, dtype=torch.int32, device=device)
        self.ops.verify_greedy(predicts, accept, counts, candidates, index, child, sibling,
                               logits.argmax(-1).view(batch, n))
        column = torch.arange(accept.shape[1], device=device)
        node = accept.long() - torch.arange(batch, device=device)[:, None] * n
        kept = accept >= 0
        target = pool.slots(requests[:, None], seq_lens[:, None] + column)[kept]
        source = pool.slots(requests[:, None], seq_lens[:, None] + node.clamp(min=0))[kept]
        pool.move(target, source)
        return predicts, accept, counts, aux

    def _record(self, answers: list[Answer], requests: Tensor, emitted: Tensor, lens: Tensor) -> Tensor:
        """Append each request's tokens up to the end of its answer; bool [B], which go on."""
        tokens, start, alive = emitted.tolist(), 0, []
        for request, count in zip(requests.tolist(), lens.tolist(), strict=True):
            answer = answers[request]
            answer.accepted.append(count - 1)
            for token in tokens[start:start + count]:
                if not self._finished(answer):
                    answer.tokens.append(token)
            start += count
            alive.append(not self._finished(answer))
        return torch.tensor(alive, dtype=torch.bool, device=requests.device)

    def _finished(self, answer: Answer) -> bool:
        return len(answer.tokens) >= self.max_new or bool(answer.tokens and answer.tokens[-1] in self.target.eos_ids)


def check_shape(shape: TreeShape) -> None:
    """Raise InvalidInput where steps, topk and nodes do not make a tree."""
    steps, topk, nodes = shape.steps, shape.topk, shape.num_nodes
    most = 1 + topk + max(0, steps - 1) * topk * topk
    if min(steps, topk) < 1 or not 2 <= nodes <= most or (topk == 1 and nodes != steps + 1):
        raise InvalidInput("--steps/--topk/--num-draft-tokens", f"{steps}/{topk}/{nodes}",
                           f"steps and topk of at least 1; 2 to {most} nodes here, steps + 1 in a chain",
                           "For a chain give topk 1 and leave the number of draft tokens out.")
