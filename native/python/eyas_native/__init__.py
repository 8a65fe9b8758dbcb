"""Tree attention, tree verification and hidden-state gather for EAGLE-3 speculative decoding.

Operations take torch tensors or numpy arrays and write into arrays that the caller allocated. Neither torch nor numpy
is imported here; eyas_native.torch_ops registers the operations with torch.library.
"""

from eyas_native.attention import decode_attention, tree_attention
from eyas_native.errors import ArgumentError
from eyas_native.info import build_info, isa, set_isa, set_threads, status
from eyas_native.memory import hidden_gather, kv_move, kv_write
from eyas_native.tree import (
    MASK_BITS,
    MASK_FULL,
    MASK_TREE_ONLY,
    MASK_WORDS,
    TreeFault,
    accept_commit,
    tree_build,
    tree_faults,
    tree_from_mask,
    tree_validate,
    verify_greedy,
    verify_rejection,
    verify_target_only,
)

__version__ = "0.1.0"

__all__ = [
    "MASK_BITS",
    "MASK_FULL",
    "MASK_TREE_ONLY",
    "MASK_WORDS",
    "ArgumentError",
    "TreeFault",
    "accept_commit",
    "build_info",
    "decode_attention",
    "hidden_gather",
    "isa",
    "kv_move",
    "kv_write",
    "set_isa",
    "set_threads",
    "status",
    "tree_attention",
    "tree_build",
    "tree_faults",
    "tree_from_mask",
    "tree_validate",
    "verify_greedy",
    "verify_rejection",
    "verify_target_only",
]
