"""Makes SGLang start on a CPU: environment, torchvision beside a CPU torch, and the `sgl_kernel` names it imports."""

from __future__ import annotations

import importlib.util
import multiprocessing.context
import os
import re
import sys
from pathlib import Path
from typing import Any

ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",  # else rotary embeddings look for vllm
    "TORCHDYNAMO_DISABLE": "1",  # else 15 s of inductor at start
}
SPAWN = "EYAS_CPU_SPAWN"  # 1: start SGLang's processes as on a GPU


def prepare_cpu() -> None:
    """Prepare this process; call before SGLang is imported. Idempotent."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if torchvision_is_cuda_build():
        declare_torchvision_ops()
    spare_cuda_waits()
    if os.environ.get(SPAWN, "0") in ("", "0"):
        fork_ranks()
    from eyas_serve.engine import sgl_kernel_cpu

    sys.modules.setdefault("sgl_kernel", sgl_kernel_cpu.as_module())


def torchvision_is_cuda_build() -> bool:
    """Whether torchvision is a CUDA build beside a CPU build of torch; reads its version file, imports only torch."""
    import torch

    found = importlib.util.find_spec("torchvision")
    if torch.version.cuda is not None or found is None or found.origin is None:
        return False
    text = Path(found.origin).with_name("version.py").read_text(encoding="utf-8")
    return re.search(r"__version__ = '[^']*\+cu", text) is not None


def declare_torchvision_ops() -> None:
    """Declare the two operators that torchvision registers fake versions of while it is imported.

    Its CUDA build cannot load its own library beside a CPU torch, so they would not exist. SGLang calls neither.
    """
    import torch

    for name in ("nms", "qnms"):
        if not hasattr(torch.ops.torchvision, name):
            torch.library.define(f"torchvision::{name}",
                                 "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def spare_cuda_waits() -> None:
    """Nothing to wait for where torch has no CUDA: SGLang's MLA draft class (0.5.12 to 0.5.23) waits all the same."""
    import torch

    if torch.version.cuda is None:
        torch.cuda.synchronize = lambda device=None: None


def fork_ranks() -> None:
    """Fork SGLang's processes where it asks to spawn them.

    A spawned one imports torch and SGLang anew, 10 s of a core. SGLang spawns for CUDA's sake. A forked rank runs the
    plug-ins again, as a spawned one does.
    """
    contexts = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
    contexts["spawn"] = contexts["fork"]
    os.register_at_fork(after_in_child=forget_plugins)


def forget_plugins() -> None:
    """Let SGLang load its plug-ins in this process too."""
    plugins: Any = sys.modules.get("sglang.srt.plugins")
    if plugins is not None:
        plugins._plugins_loaded = False
