"""Checks of a draft's vocabulary map as SGLang holds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

CERTAIN = 20.0  # offsets without a repeated value have probability exp(-n * n / V); e^-20 is never


def vocabulary_faults(hot_token_id: Tensor | None, draft_size: int | None, target_size: int,
                      t2d: Tensor | None = None) -> list[str]:
    """What is wrong with the map from draft ids to target ids; empty where nothing is.

    Args:
        hot_token_id: int [draft_size], the target id of each draft id, which SGLang computes as d2t + arange.
        draft_size: rows of the draft's head (None: the target's head).
        target_size: the target's vocabulary.
        t2d: bool [target_size], the checkpoint's mask, where it has one. SGLang itself ignores it.
    """
    if draft_size is None:
        return []
    if hot_token_id is None:
        if draft_size == target_size:
            return []
        return [f"d2t is missing although the draft's vocabulary is {draft_size} of {target_size} tokens, so draft ids "
                "would be taken for target ids and nearly every proposal be a wrong token. Write d2t (int64 offsets, "
                "target = draft + d2t[draft]) into the checkpoint"]
    import torch

    ids = hot_token_id.detach().cpu().long()
    if ids.numel() != draft_size:
        return [f"d2t has {ids.numel()} entries, not {draft_size} (draft_vocab_size). Export the draft again"]
    outside = int(((ids < 0) | (ids >= target_size)).sum())
    repeated = ids.numel() - len(set(ids.tolist()))
    offsets = ids - torch.arange(draft_size)
    increasing = bool((offsets[1:] > offsets[:-1]).all()) and int(offsets.min()) >= 0
    marked = None if t2d is None or t2d.numel() != target_size else t2d.detach().cpu().bool().nonzero().flatten()
    disagrees = marked is not None and not torch.equal(marked, ids.sort().values)
    agrees = marked is not None and not disagrees  # what t2d marks is what d2t leads to: then these are offsets
    absolute = not agrees and increasing and int(offsets.max()) < target_size and (
        outside > 0 or draft_size * draft_size > CERTAIN * target_size
        or (marked is not None and disagrees and torch.equal(offsets, marked)))
    if not (outside or repeated or absolute or disagrees):
        return []
    facts = [text for present, text in (
        (outside, f"{outside} target ids outside 0..{target_size - 1}"), (repeated, f"{repeated} repeated"),
        (disagrees, "other tokens than t2d marks"),
        (increasing and not absolute, "its values increase without repeating, as ids do")) if present]
    if absolute:
        return [f"d2t holds absolute target ids, not offsets ({'; '.join(facts) or 'no value repeats'}): proposals "
                "would be mapped to wrong tokens. Subtract 0, 1, 2, ... from d2t"]
    return [f"d2t maps wrongly: {'; '.join(facts)}. It must hold offsets, target = draft + d2t[draft]; rebuild it from "
            "the training vocabulary"]
