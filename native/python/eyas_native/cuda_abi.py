"""ctypes mirror of `include/eyas/cuda_api.h`: structs, prototypes, loading."""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_int64, c_uint32, c_uint64, c_void_p
from pathlib import Path

BF16, FP16, E4M3 = 0, 1, 2
OVERLAP = 1
ABI_VERSION = 4


class Attention(Structure):
    """`eyas_attn`."""

    _fields_ = (
        [("struct_size", c_uint32), ("q_dtype", c_int32), ("kv_dtype", c_int32), ("head_dim", c_int32)]
        + [(name, c_void_p) for name in ("q", "out", "lse", "k", "v")]
        + [
            (name, c_int64)
            for name in (
                "q_stride_token",
                "q_stride_head",
                "out_stride_token",
                "out_stride_head",
                "kv_stride_page",
                "kv_stride_token",
                "kv_stride_head",
            )
        ]
        + [
            ("kv_index", c_void_p),
            ("index_rows", c_void_p),
            ("index_start", c_void_p),
            ("index_stride", c_int64),
            ("q_start", c_void_p),
            ("seq_lens", c_void_p),
            ("mask", c_void_p),
            ("positions", c_void_p),
            ("mask_stride_batch", c_int64),
        ]
        + [
            (name, c_int32)
            for name in (
                "mask_words",
                "page_size",
                "batch",
                "max_tree",
                "num_q_heads",
                "num_kv_heads",
                "tree_keys",
                "seq_lens_are_prefix",
                "window",
                "max_seq_len",
            )
        ]
        + [(name, c_float) for name in ("scale", "k_scale", "v_scale")]
        + [(name, c_int32) for name in ("num_splits", "groups", "stages", "row_tile", "key_tile", "flags")]
        + [("workspace", c_void_p), ("workspace_bytes", c_uint64), ("stream", c_void_p)]
    )


class Gather(Structure):
    """`eyas_gather`."""

    _fields_ = (
        ("struct_size", c_uint32),
        ("num_sources", c_int32),
        ("source", c_void_p * 8),
        ("residual", c_void_p * 8),
        ("source_stride", c_int64 * 8),
        ("index", c_void_p),
        ("index_is_i64", c_int32),
        ("width", c_int32),
        ("rows", c_int32),
        ("norm", c_int32),
        ("weight", c_void_p),
        ("out", c_void_p),
        ("out_stride", c_int64),
        ("in_dtype", c_int32),
        ("out_dtype", c_int32),
        ("eps", c_float),
        ("out_scale", c_float),
        ("row_scale", c_void_p),
        ("stream", c_void_p),
    )


class Verify(Structure):
    """`eyas_verify`."""

    _fields_ = (
        ("struct_size", c_uint32),
        ("batch", c_int32),
        ("nodes", c_int32),
        ("max_accept", c_int32),
        ("candidates", c_void_p),
        ("retrive_index", c_void_p),
        ("retrive_next_token", c_void_p),
        ("retrive_next_sibling", c_void_p),
        ("target_predict", c_void_p),
        ("predicts", c_void_p),
        ("accept_index", c_void_p),
        ("accept_token_num", c_void_p),
        ("uniform", c_void_p),
        ("uniform_final", c_void_p),
        ("target_probs", c_void_p),
        ("vocab", c_int64),
        ("threshold_single", c_float),
        ("threshold_acc", c_float),
        ("draft_probs", c_void_p),
        ("replacement", c_int32),
        ("stream", c_void_p),
    )


_P, _I, _L = c_void_p, c_int, c_int64
PROTOTYPES: dict[str, tuple[object, ...]] = {
    "eyas_tree_attn_gqa": (POINTER(Attention),),
    "eyas_tree_attn_gqa_plan": (POINTER(Attention), _I, _I),
    "eyas_tree_attn_mla": (POINTER(Attention),),
    "eyas_tree_attn_mla_plan": (POINTER(Attention), _I, _I),
    "eyas_lse_combine": (_P, _P, _P, _P, _I, _L, _I, _I, _P),
    "eyas_hidden_gather": (POINTER(Gather),),
    "eyas_tree_build": (_P, _L, _P, _P, _I, _I, _I, _I, _I, _P, _P, _P, _P, _P, _P, _P, _P),
    "eyas_tree_from_mask": (_P, _P, _I, _I, _P, _P, _P, _P, _P, _P),
    "eyas_tree_validate": (_P, _I, _I, _P, _P),
    "eyas_verify_greedy": (POINTER(Verify),),
    "eyas_verify_target_only": (POINTER(Verify),),
    "eyas_verify_rejection": (POINTER(Verify),),
    "eyas_accept_commit": (_P, _P, _P, _P, _I, _I, _I, _P, _P, _P, _P, _P, _P, _P),
    "eyas_kv_move": (_P, _P, _I, _P, _P, _I, _I, _P),
    "eyas_cuda_version": (),
}


def load(path: Path) -> ctypes.CDLL:
    """Opens the library and declares its calls.

    Raises:
        OSError: the file is missing, is no such library, or speaks another version of the ABI.
    """
    lib = ctypes.CDLL(str(path))
    for name, arguments in PROTOTYPES.items():
        call = getattr(lib, name)
        call.argtypes, call.restype = list(arguments), c_int
    lib.eyas_cuda_error_text.argtypes, lib.eyas_cuda_error_text.restype = [c_int], c_char_p
    version = lib.eyas_cuda_version()
    if version != ABI_VERSION:
        raise OSError(f"{path}: ABI version {version}, wanted {ABI_VERSION} by eyas_native.cuda; rebuild the library")
    return lib
