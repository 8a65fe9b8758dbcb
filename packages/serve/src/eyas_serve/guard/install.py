"""Registers the guard's hooks with SGLang."""

from __future__ import annotations

import multiprocessing

from eyas_serve.guard import forward, layout, scheduler, shared, weights


def install() -> None:
    """Register every hook in a rank; SGLang applies them once all plug-ins are loaded.

    Raises:
        EngineFailure: an SGLang of unknown layout.
    """
    layout.require_known_version()
    if multiprocessing.parent_process() is None:
        return  # SGLang's own launcher: no model is loaded in it, and importing the targets would cost it seconds
    layout.require_targets()
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(layout.SCHEDULER, scheduler.start_rank, HookType.AROUND)
    for target in layout.LOAD_WEIGHTS:
        HookRegistry.register(target, weights.audit_weights, HookType.AROUND)
    for target in layout.FORWARD:
        HookRegistry.register(target, forward.check_width, HookType.BEFORE)
    HookRegistry.register(layout.INIT_LM_HEAD, shared.check_shared, HookType.AFTER)
    HookRegistry.register(layout.LOAD_MODEL, scheduler.phase("loading {model} weights"), HookType.AROUND)
    HookRegistry.register(layout.KV_CACHE, scheduler.phase("allocating {model} KV cache"), HookType.AROUND)
    HookRegistry.register(layout.GRAPHS, scheduler.phase("capturing {model} graphs"), HookType.AROUND)
    HookRegistry.register(layout.READ_WEIGHTS, scheduler.count_weights, HookType.AROUND)
