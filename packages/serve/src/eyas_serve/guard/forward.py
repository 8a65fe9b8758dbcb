"""The draft is fed as many aux states as its `fc` was trained on, or the engine does not go on."""

from __future__ import annotations

from typing import Any

from eyas_contract import EngineFailure
from eyas_serve.guard.state import GUARD


def check_width(model: Any, input_ids: Any, positions: Any, forward_batch: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE hook of the draft's `forward`: in extend modes the states must be K*H wide.

    The draft's own decode steps carry H, which is why SGLang skips `fc` at that width and cannot tell the fault.

    Raises:
        EngineFailure: another width, with its likely cause.
    """
    states = getattr(forward_batch.spec_info, "hidden_states", None)
    if states is None or not forward_batch.forward_mode.is_extend(include_draft_extend_v2=True):
        return
    found, wanted = states.shape[-1], fc_width(model)
    if found == wanted or not states.shape[0]:
        return
    GUARD.refuse(EngineFailure(
        "draft forward", f"states of width {found} in mode {forward_batch.forward_mode.name}",
        f"width {wanted} ({model.num_aux_hidden_states} aux states), by the draft's fc", _cause(found, wanted, model)))


def fc_width(inner: Any) -> int:
    """Width that a draft's `fc` reads: torch's Linear in the Llama class, SGLang's parallel one in the MLA class."""
    fc = inner.fc
    return int(fc.in_features if hasattr(fc, "in_features") else fc.input_size)


def _cause(found: int, wanted: int, model: Any) -> str:
    each = wanted // model.num_aux_hidden_states
    if found == each:
        return ("The target hands over one state only: --speculative-algorithm is EAGLE instead of EAGLE3, the draft's "
                "config has use_aux_hidden_state false, or this target class captures no aux states in this SGLang.")
    if found % each == 0:
        return (f"The target captured {found // each} of {model.num_aux_hidden_states} layers: an id in "
                "eagle_aux_hidden_state_layer_ids lies outside the target's layers. Correct the ids.")
    return "The draft was trained for a target of another hidden size. Serve it with its own target."
