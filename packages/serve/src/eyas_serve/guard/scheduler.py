"""Around the start of one rank: refuses settings that cannot work, and reports the rank's phases and its end."""

from __future__ import annotations

import inspect
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from eyas_contract import EngineFailure, EyasError
from eyas_contract.checkpoint_files import weight_sizes
from eyas_contract.engines.overrides import FLAG, overridden
from eyas_contract.engines.sglang import DRAFT_CLASSES
from eyas_contract.target import read_config
from eyas_serve.guard import layout
from eyas_serve.guard.state import GUARD
from eyas_serve.handshake import READY


def start_rank(original: Callable[..., Any], scheduler: Any, *args: Any, **kwargs: Any) -> None:
    """AROUND hook of `Scheduler.__init__`: the rank is ready when it returns and every check has passed.

    Raises:
        EngineFailure: hooks not applied, settings that cannot work, checks that never ran.
    """
    given = inspect.signature(original).bind(scheduler, *args, **kwargs).arguments
    server_args = given["server_args"]
    status = GUARD.status
    status.pid = os.getpid()  # a forked rank has its launcher's
    status.rank = f"tp{given.get('tp_rank', 0)}-pp{given.get('pp_rank', 0)}-dp{given.get('dp_rank') or 0}"
    status.expected = _ranks_here(server_args)
    GUARD.enter("starting")
    missing = layout.unhooked(GUARD.mode)
    if missing:
        raise GUARD.told(EngineFailure("guard", f"no hook on {', '.join(missing)}", "every hook applied",
                                       "SGLang's log says why. Report it with the version."))
    GUARD.verified("hooks")
    wanted = ["hooks"]
    if GUARD.mode != "off" and _draft_architecture(server_args) in DRAFT_CLASSES.values():
        GUARD.target, GUARD.draft = Path(server_args.model_path), Path(server_args.speculative_draft_model_path)
        _require_settings(server_args)
        wanted += ["weights", "vocabulary"]
    try:
        original(scheduler, *args, **kwargs)
    except EyasError:
        raise
    except Exception as error:
        status.error = "".join(traceback.format_exception_only(error)).strip()
        GUARD.publish()
        raise
    unchecked = [check for check in wanted if check not in status.checks]
    if unchecked:
        raise GUARD.told(EngineFailure(
            f"rank {status.rank}", f"never checked: {', '.join(unchecked)}", "every check of the guard passed",
            "This SGLang loads drafts by a way the guard does not see: do not trust its acceptance. Report it with the "
            "version."))
    GUARD.enter(READY)


def _ranks_here(server_args: Any) -> int:
    replicas = 1 if getattr(server_args, "enable_dp_attention", False) else int(server_args.dp_size or 1)
    ranks = int(server_args.tp_size or 1) * int(server_args.pp_size or 1) * replicas
    return max(ranks // int(server_args.nnodes or 1), 1)


def _draft_config(server_args: Any) -> dict[str, Any]:
    path = server_args.speculative_draft_model_path
    return read_config(Path(path)) if path and Path(path).is_dir() else {}


def _draft_architecture(server_args: Any) -> str:
    return str((_draft_config(server_args).get("architectures") or [""])[0])


def _require_settings(server_args: Any) -> None:
    faults = []
    algorithm = str(server_args.speculative_algorithm)
    if algorithm.upper() != "EAGLE3":
        faults.append(f"--speculative-algorithm {algorithm} with an EAGLE-3 draft: SGLang would hand it one state "
                      "instead of several, skip fc, ignore d2t and put the target's head on it. Use EAGLE3")
    changed = overridden(_draft_config(server_args), getattr(server_args, "json_model_override_args", None))
    if changed:
        faults.append(f"{FLAG} changes the draft's config too: {'; '.join(changed)}. Write these keys into the "
                      "config.json of a copy of the target's folder instead")
    eagle = _draft_config(server_args).get("eagle_config")
    if isinstance(eagle, dict) and eagle.get("use_aux_hidden_state", True) is not True:
        faults.append(f"eagle_config.use_aux_hidden_state is {str(eagle['use_aux_hidden_state']).lower()} in the "
                      "draft's config.json: SGLang would hand over one state and skip fc. Set it to true")
    if os.environ.get("SGLANG_SIMULATE_ACC_LEN", "-1") not in ("-1", "-1.0", ""):
        faults.append("SGLANG_SIMULATE_ACC_LEN is set: acceptance lengths would be invented. Unset it")
    if faults:
        GUARD.refuse(EngineFailure(
            "settings", "; ".join(faults), "a draft fed and read as it was trained, by the guard",
            "The server would answer but its acceptance mean nothing."))


def phase(name: str) -> Callable[..., Any]:
    """An AROUND hook that reports a phase; `{model}` in the name becomes target or draft."""

    def hook(original: Callable[..., Any], runner: Any, *args: Any, **kwargs: Any) -> Any:
        GUARD.enter(name.format(model="draft" if getattr(runner, "is_draft_worker", False) else "target"))
        return original(runner, *args, **kwargs)

    return hook


def count_weights(original: Callable[..., Any], loader: Any, model_config: Any, *args: Any,
                  **kwargs: Any) -> Iterator[Any]:
    """AROUND hook of the weight iterator: bytes read, of the bytes in the folder."""
    folder = Path(str(model_config.model_path))
    GUARD.status.total = sum(weight_sizes(folder))
    for name, tensor in original(loader, model_config, *args, **kwargs):
        yield name, tensor
        GUARD.advance(tensor.numel() * tensor.element_size())
