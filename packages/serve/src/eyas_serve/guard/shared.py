"""After SGLang has shared the target's embedding (and head) with the draft: are they there and sound?"""

from __future__ import annotations

from typing import Any

from eyas_contract import EngineFailure
from eyas_serve.guard.state import GUARD
from eyas_serve.guard.vocabulary import vocabulary_faults


def check_shared(result: Any, worker: Any, *args: Any, **kwargs: Any) -> None:
    """AFTER hook of `EagleDraftWorker.init_lm_head`.

    Raises:
        EngineFailure: embedding or head not finite, vocabulary map absent or wrong (all at once).
    """
    model = worker.draft_runner.model
    if type(model).__name__ not in ("LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"):
        return
    GUARD.worker = worker
    faults = [f"{name} holds NaN or infinity: {why}" for name, module, why in (
        ("embed_tokens", model.model.embed_tokens, "neither the checkpoint nor the target filled it. A draft of "
         "another hidden size than its target's must bring its own embed_tokens.weight"),
        ("lm_head", model.lm_head, "the checkpoint's head is damaged, or was never loaded. Export the draft again"))
        if not bool(module.weight.isfinite().all())]
    size = None if getattr(model, "load_lm_head_from_target", False) else model.config.draft_vocab_size
    faults += vocabulary_faults(worker.hot_token_id, size, model.config.vocab_size, getattr(model, "_eyas_t2d", None))
    if faults:
        GUARD.refuse(EngineFailure("draft in the engine", "; ".join(faults),
                                   "a draft that can propose tokens, by the guard", "Nothing would be accepted."))
    GUARD.verified("vocabulary")
