"""What the live target class hands over, judged on the first prompt: a hook at all, how many states, how wide."""

from __future__ import annotations

from typing import Any

from eyas_contract import EngineFailure
from eyas_contract.engines import render
from eyas_contract.engines.capture_probe import check_captured
from eyas_contract.engines.sglang import DRAFT_CLASSES
from eyas_serve.guard.state import GUARD

HOOK = "set_eagle3_layers_to_capture"


def check_hand_over(worker: Any, batch: Any, states: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE hook of `EagleDraftWorker._draft_extend_for_prefill`; looks at the first batch only.

    Raises:
        EngineFailure: no hook, another number of states than the draft's `fc` reads, another width or other rows.
    """
    if "hand-over" in GUARD.status.checks or not getattr(batch, "extend_lens", None) or not states.shape[0]:
        return
    draft = worker.draft_runner.model
    if type(draft).__name__ not in DRAFT_CLASSES.values():
        return
    target, config = worker.target_worker.model_runner, draft.config
    wanted, tokens = int(draft.model.num_aux_hidden_states), sum(map(int, batch.extend_lens))
    rows, width = min(int(states.shape[0]), tokens), int(states.shape[1])  # padding of data-parallel ranks is no fault
    each = int(target.model_config.hidden_size)
    shapes = [(rows, each)] * (width // each) if width % each == 0 else [(rows, width // wanted)] * wanted
    findings = check_captured(type(target.model).__name__, hasattr(target.model, HOOK), shapes, wanted, tokens,
                              int(getattr(config, "target_hidden_size", None) or config.hidden_size))
    if findings:
        what = "one state only" if len(shapes) == 1 < wanted else "other states than the draft reads"
        GUARD.refuse(EngineFailure(type(target.model).__name__, f"the target hands over {what}\n{render(findings)}\n",
                                   "the states that the draft was trained on, by the guard",
                                   "See the last line of each finding."))
    GUARD.verified("hand-over")
