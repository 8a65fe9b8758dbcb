"""The acceptance length that serving will show, while training: real rounds by the reference decoder.

Prompts are the openings of held-out samples, up to the assistant's first word; the target decodes them with the draft
as it is now, rounded to the dtype in which it will be exported on a GPU, in float32 on a CPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from eyas_contract import Contract, InvalidInput
from eyas_draft.decode import Decoder
from eyas_draft.model import DraftModel
from eyas_draft.ops import get_ops
from eyas_draft.rounds import TreeShape
from eyas_draft.setup import draft_ids
from eyas_draft.store import Store
from eyas_draft.target_model import TargetModel
from eyas_draft.target_weights import TargetWeights
from eyas_draft.walk import Walk


class RealRounds:
    """Measures a draft by decoding.

    Args:
        target: Hugging Face folder.
        contract: all four sections.
        weights: of the target.
        prompts: token ids, see `openings`.
        chain: draft steps of a round.
        max_new_tokens: of an answer.
        device: where both models run.
    """

    def __init__(self, target: Path, contract: Contract, weights: TargetWeights, prompts: Sequence[list[int]], *,
                 chain: int, max_new_tokens: int, device: torch.device) -> None:
        assert contract.draft is not None
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.prompts = sorted(prompts, key=len)
        self._draft = DraftModel(contract.draft, weights.embedding_vh.float()).to(device, dtype)
        self._decoder = Decoder(TargetModel(target, contract.capture.aux_layer_ids, dtype, device), self._draft,
                                draft_ids(contract), TreeShape(chain, 1, chain + 1),
                                get_ops("native" if device.type == "cpu" else "torch"), max_new_tokens)

    def measure(self, model: DraftModel) -> Walk:
        """Rounds of a chain over all prompts, with the weights that `model` has now."""
        with torch.no_grad():
            for mine, theirs in zip(self._draft.parameters(), model.parameters(), strict=True):
                mine.copy_(theirs)
        histogram = [0] * (self._decoder.shape.steps + 1)
        for answer in self._decoder.decode(self.prompts) if self.prompts else ():
            for count in answer.accepted:
                histogram[count] += 1
        return Walk(tuple(histogram))


def openings(store: Store, held: Sequence[int], count: int) -> list[list[int]]:
    """The first `count` held-out samples up to the assistant's first token.

    Raises:
        InvalidInput: not one of them has tokens before it.
    """
    prompts = []
    for index in held[:count]:
        sample = store.sample(index)
        first = int(sample.loss_mask_t.int().argmax())
        if first:
            prompts.append(sample.input_ids_t[:first].tolist())
    if not prompts:
        raise InvalidInput("--decode-prompts", f"{len(held)} held-out samples, none with a prompt",
                           "held-out samples to decode", "Raise --holdout, or leave --decode-prompts at 0.")
    return prompts
