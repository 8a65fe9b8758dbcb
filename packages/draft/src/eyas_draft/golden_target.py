"""The target's side of a golden record: real tokens, the aux states, every layer's output at a few positions."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoTokenizer

from eyas_contract.errors import InvalidInput
from eyas_draft.setup import require_target
from eyas_draft.store import Store
from eyas_draft.target_weights import TargetWeights

TEXT = (
    "An eyas is a young hawk taken from the nest before it can fly. Its keeper feeds it by hand, lets it watch the "
    "older birds, and waits until the feathers are hard. Then the training begins: first a few steps along a rope, "
    "then ten metres, then a hundred, always with a reward at the end. What is learned early stays for life, so each "
    "lesson must be right. Question: how many legs do three hawks and two dogs have together? Answer: three hawks "
    "have 6 legs, two dogs have 8 legs, and 6 + 8 = 14. def legs(hawks, dogs): return 2 * hawks + 4 * dogs\n")


@dataclass(frozen=True)
class TargetStates:
    """What the target hands over.

    Attributes:
        input_ids_t: int64 [T].
        next_id: its greedy choice after them.
        aux_tke: [T, K*E], outputs of the aux layers side by side.
        layer_positions, layers_pne: positions, and there the outputs of all layers [P, layers, E]; may be empty.
        dtype: of its arithmetic, as text.
    """

    input_ids_t: Tensor
    next_id: int
    aux_tke: Tensor
    layer_positions: tuple[int, ...]
    layers_pne: Tensor
    dtype: str


def states_of_target(folder: Path, ids: tuple[int, ...], count: int, text: str, device: str,
                     dtype: str) -> TargetStates:
    """Run the target over the first `count` tokens of a text (the built-in one by default).

    Raises:
        InvalidInput: a text that is too short.
    """
    tokenizer = AutoTokenizer.from_pretrained(folder)
    given: list[int] = tokenizer(text or TEXT, add_special_tokens=True)["input_ids"]
    if len(given) < 8:
        raise InvalidInput("--text", f"{len(given)} tokens", "at least 8", "Give a longer text.")
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype if dtype == "auto" else getattr(torch, dtype))
    model.eval().to(device)
    outputs: dict[int, Tensor] = {}

    def keeper(index: int) -> Any:
        def keep(_module: nn.Module, _args: Any, output: Any) -> None:
            outputs[index] = (output[0] if isinstance(output, tuple) else output)[0]
        return keep

    layers = model.get_decoder().layers
    for index, layer in enumerate(layers):
        layer.register_forward_hook(keeper(index))
    ids_t = torch.tensor(given[:count])
    with torch.no_grad():
        logits = model(ids_t[None].to(device), use_cache=False).logits[0]
    rows = tuple(sorted({len(ids_t) // 2, len(ids_t) - 1}))
    table = torch.stack([outputs[i][list(rows)].cpu() for i in range(len(layers))], dim=1)
    aux = torch.cat([outputs[i].cpu() for i in ids], dim=-1)
    return TargetStates(ids_t, int(logits[-1].argmax()), aux, rows, table, str(aux.dtype).removeprefix("torch."))


def states_of_store(folder: Path, target: Path, ids: tuple[int, ...], count: int,
                    weights: TargetWeights) -> TargetStates:
    """The first tokens of a store's longest early sample, with the states that extraction kept.

    Raises:
        InvalidInput, ContractMismatch: no such store, other layers than the draft's, or no sample of 8 tokens.
    """
    store = Store(folder)
    require_target(store.contract, folder, target)
    capture = store.contract.capture
    if capture.aux_layer_ids != ids:
        raise InvalidInput(str(folder), f"states of layers {list(capture.aux_layer_ids)}", f"{list(ids)}, the draft's",
                           "Give the store that the draft was trained on, or leave --store out.")
    longest = max(range(min(len(store), 64)), key=lambda i: min(store.length(i), count))
    sample = store.sample(longest)
    taken = min(store.length(longest), count)
    if taken < 8 or not sample.finite:
        raise InvalidInput(str(folder), f"sample {sample.id}: {taken} tokens, or states not finite", "8 finite ones",
                           "Leave --store out: the target is run then.")
    last = sample.last_te[taken - 1:taken].float()
    normed = last if capture.last_state == "post_norm" else weights.normed(last, weights.norm_h.float())
    next_id = int((normed @ weights.head_vh.float().T).argmax())
    aux = sample.aux_tke[:taken]
    return TargetStates(sample.input_ids_t[:taken].long(), next_id, aux, (), aux[:0], str(aux.dtype)[6:])
