"""Makes SGLang start on a CPU: environment, torchvision beside a CPU torch, and the `sgl_kernel` names it imports."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
from pathlib import Path

ENVIRONMENT = {
    "SGLANG_USE_CPU_ENGINE": "1",  # else rotary embeddings look for vllm
    "TORCHDYNAMO_DISABLE": "1",  # else 15 s of inductor at start
}


def prepare_cpu() -> None:
    """Prepare this process; call before SGLang is imported. Idempotent."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    if torchvision_is_cuda_build():
        declare_torchvision_ops()
    spare_cuda_waits()
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
