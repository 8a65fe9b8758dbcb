"""Training-time test: the draft unrolled over its own outputs, and the loss of every step.

Alignment, as SGLang serves it: at step i the row of position t holds the token t+1+i, the state of step i-1 (the
target's states at step 0), rotary position t+i, and predicts the token t+2+i, for which the target's distribution is
the one after its state of position t+1+i.

Shape suffixes: T tokens (rows), H hidden, V draft vocabulary, N scored rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from eyas_draft.attention import Layout, TttAttention
from eyas_draft.batches import Batch
from eyas_draft.model import DraftModel
from eyas_draft.target_weights import TargetWeights


@dataclass(frozen=True)
class Step:
    """One unrolled step.

    Attributes:
        index: 0-based.
        normed_th: [T, H], input of `lm_head`.
        rows_n: int64 [N], rows whose prediction is scored at this step.
        sources_n: int64 [N], for each the position whose target state gives the distribution (t+1+i).
    """

    index: int
    normed_th: Tensor
    rows_n: Tensor
    sources_n: Tensor


def unroll(model: DraftModel, batch: Batch, steps: int, scored_t: Tensor) -> Iterator[Step]:
    """Run `steps` steps over a packed batch.

    Args:
        model: the draft.
        batch: packed documents.
        steps: how many.
        scored_t: bool [T], positions whose target distribution counts (see `scored_positions`).
    """
    rows = Rows(batch.input_ids_t, batch.positions_t, batch.ends_t)
    layout = Layout(batch.lengths, batch.input_ids_t.device)
    for index, (normed, source, inside) in enumerate(unroll_rows(model, rows, batch.aux_tke, layout, steps)):
        kept = torch.nonzero(inside & scored_t[source]).squeeze(1)
        yield Step(index, normed, kept, source[kept])


@dataclass(frozen=True)
class Rows:
    """Tokens of a batch: ids, rotary positions, and where each one's document ends (index after it); int64 [T]."""

    input_ids_t: Tensor
    positions_t: Tensor
    ends_t: Tensor


def unroll_rows(model: DraftModel, rows: Rows, aux_tke: Tensor, layout: Layout, steps: int) -> Iterator[
        tuple[Tensor, Tensor, Tensor]]:
    """`unroll` before any row is chosen.

    Yields:
        for each step normed [T, H], the position [T] whose target state gives each row's distribution, and whether
        [T] it lies in the row's document.
    """
    attend = TttAttention(layout, model.spec.num_layers, rows.input_ids_t.device)
    casts = torch.is_autocast_enabled(aux_tke.device.type)  # then `fc` takes what the store holds
    hidden = model.fuse(aux_tke if casts else aux_tke.to(model.fc.weight.dtype))
    here = torch.arange(rows.input_ids_t.numel(), device=rows.input_ids_t.device)
    for index in range(steps):
        source = here + 1 + index
        inside = source < rows.ends_t
        source = torch.minimum(source, rows.ends_t - 1)  # rows past the end compute on, unseen and unscored
        normed, hidden = model(rows.input_ids_t[source], hidden, rows.positions_t + index, attend)
        yield normed, source, inside


def scored_positions(batch: Batch) -> Tensor:
    """bool [T]: positions whose next token lies in the same document and is trained on."""
    following = torch.arange(1, batch.ends_t.numel() + 1, device=batch.ends_t.device)
    inside = following < batch.ends_t
    return inside & batch.loss_mask_t[torch.minimum(following, batch.ends_t - 1)]


class Teacher:
    """The target's distribution over the draft vocabulary, recomputed from the stored last states.

    Args:
        weights: of the target.
        draft_ids_v: int64 [V], target ids of the draft vocabulary, ascending.
        post_norm: whether the stored last state is already normed.
        device: where to compute.
        dtype: of the matrix products (float32, or bfloat16 for speed).
    """

    def __init__(self, weights: TargetWeights, draft_ids_v: Tensor, *, post_norm: bool, device: torch.device,
                 dtype: torch.dtype) -> None:
        self.weights, self.post_norm = weights, post_norm
        self.head_vh = weights.head_vh.to(device, dtype)
        self.draft_head_vh = self.head_vh[draft_ids_v.to(device)]
        self.in_draft = torch.zeros(self.head_vh.shape[0], dtype=torch.bool, device=device)
        self.in_draft[draft_ids_v.to(device)] = True
        self.covers_all = bool(self.in_draft.all())
        self.norm_h = weights.norm_h.to(device, torch.float32)

    def states(self, last_th: Tensor) -> Tensor:
        """Stored last states -> what the target's head reads, in the products' dtype."""
        if self.post_norm:
            return last_th.to(self.head_vh.dtype)
        return self.weights.normed(last_th, self.norm_h).to(self.head_vh.dtype)

    def probabilities(self, last_nh: Tensor) -> Tensor:
        """softmax over the target's logits restricted to the draft vocabulary: float32 [N, V]."""
        return (self.states(last_nh) @ self.draft_head_vh.T).float().softmax(-1)

    def proposable(self, last_nh: Tensor) -> Tensor:
        """bool [N]: whether the target's own choice is a token that the draft can propose."""
        if self.covers_all:
            return torch.ones(last_nh.shape[0], dtype=torch.bool, device=last_nh.device)
        return self.in_draft[(self.states(last_nh) @ self.head_vh.T).argmax(-1)]


def autocast(device: torch.device, precision: str) -> torch.autocast:
    """bfloat16 matrix products where the settings say `bf16`."""
    return torch.autocast(device.type, torch.bfloat16, enabled=precision == "bf16")
