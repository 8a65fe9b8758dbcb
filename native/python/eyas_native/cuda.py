"""The CUDA kernels, through ctypes over the C ABI of `libeyas_cuda.so` (`include/eyas/cuda_api.h`).

Takes torch CUDA tensors by address; torch is not imported. Every call checks its arguments, reports all faults at once
by the arguments' names, queues its work on torch's current stream and allocates nothing, so it may be captured in a CUDA
graph. The library is looked for beside this file, or where `EYAS_CUDA_LIBRARY` points.
"""

from eyas_native.cuda_attention import (
    Prepared,
    attention_plan,
    lse_combine,
    prepare_gqa,
    prepare_mla,
    tree_attn_gqa,
    tree_attn_mla,
)
from eyas_native.cuda_core import LaunchError, library_path, status
from eyas_native.cuda_memory import hidden_gather, kv_move
from eyas_native.cuda_options import Options, TileConfig
from eyas_native.cuda_tree import tree_build, tree_from_mask, tree_validate
from eyas_native.cuda_verify import accept_commit, verify_greedy, verify_rejection, verify_target_only
from eyas_native.memory import NORMS
from eyas_native.tree import MASK_BITS, MASK_FULL, MASK_TREE_ONLY, MASK_WORDS

__all__ = [
    "MASK_BITS",
    "MASK_FULL",
    "MASK_TREE_ONLY",
    "MASK_WORDS",
    "NORMS",
    "LaunchError",
    "Options",
    "Prepared",
    "TileConfig",
    "accept_commit",
    "attention_plan",
    "hidden_gather",
    "kv_move",
    "library_path",
    "lse_combine",
    "prepare_gqa",
    "prepare_mla",
    "status",
    "tree_attn_gqa",
    "tree_attn_mla",
    "tree_build",
    "tree_from_mask",
    "tree_validate",
    "verify_greedy",
    "verify_rejection",
    "verify_target_only",
]
