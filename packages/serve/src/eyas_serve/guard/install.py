"""Registers the hooks of guard and probe with SGLang."""

from __future__ import annotations

import multiprocessing

from eyas_serve.guard import captured, forward, layout, reload, scheduler, shared, weights
from eyas_serve.guard.state import GUARD
from eyas_serve.probe.recorder import record_prefill
from eyas_serve.probe.route import add_routes


def install() -> None:
    """Register every hook in a rank; SGLang applies them once all plug-ins are loaded.

    Raises:
        EngineFailure: an SGLang of unknown layout.
    """
    layout.require_known_version()
    if multiprocessing.parent_process() is None:
        add_routes()
        return  # SGLang's own launcher: no model is loaded in it, and importing the targets would cost it seconds
    layout.require_targets(GUARD.mode)
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(layout.SCHEDULER, scheduler.start_rank, HookType.AROUND)
    HookRegistry.register(layout.LOAD_MODEL, scheduler.phase("loading {model} weights"), HookType.AROUND)
    HookRegistry.register(layout.KV_CACHE, scheduler.phase("allocating {model} KV cache"), HookType.AROUND)
    HookRegistry.register(layout.GRAPHS, scheduler.phase("capturing {model} graphs"), HookType.AROUND)
    HookRegistry.register(layout.READ_WEIGHTS, scheduler.count_weights, HookType.AROUND)
    HookRegistry.register(layout.PREFILL, record_prefill, HookType.AROUND)
    if GUARD.mode == "off":
        return
    for target in layout.LOAD_WEIGHTS:
        HookRegistry.register(target, weights.audit_weights, HookType.AROUND)
    for target in layout.FORWARD:
        HookRegistry.register(target, forward.check_width, HookType.BEFORE)
    HookRegistry.register(layout.INIT_LM_HEAD, shared.check_shared, HookType.AFTER)
    HookRegistry.register(layout.PREFILL, captured.check_hand_over, HookType.BEFORE)
    HookRegistry.register(layout.RELOAD, reload.guard_reload, HookType.AROUND)
