"""What the CUDA wrappers share: finding the library, argument checks, error codes, streams. See `eyas_native.cuda`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from ctypes import CDLL, byref, sizeof
from functools import cache
from pathlib import Path
from typing import Any

from eyas_native import _C
from eyas_native import cuda_abi as abi
from eyas_native.errors import ArgumentError

Tensor = Any  # a torch tensor, taken by what it offers: data_ptr, shape, stride, dtype, device

MATH = ("bfloat16", "float16")
DTYPE = {"bfloat16": abi.BF16, "float16": abi.FP16, "float8_e4m3fn": abi.E4M3}


class LaunchError(RuntimeError):
    """The driver refused a launch; the text holds its reason."""


def library_path() -> Path:
    """Where the library is looked for: `EYAS_CUDA_LIBRARY`, else beside this file."""
    return Path(os.environ.get("EYAS_CUDA_LIBRARY") or Path(__file__).with_name("libeyas_cuda.so"))


@cache
def library() -> CDLL:
    """The library, loaded once.

    Raises:
        OSError: it is missing (with the build's reason), cannot be loaded, or speaks another version of the ABI.
    """
    path = library_path()
    if not path.exists():
        reason = _C.build_info()["cuda_reason"] or "it was removed, or EYAS_CUDA_LIBRARY names another place"
        raise OSError(
            f"{path}: no such file ({reason}). Wanted: the CUDA library, by eyas_native.cuda. Install a wheel +cu130, or build "
            "with EYAS_CUDA=ON."
        )
    return abi.load(path)


def status() -> str:
    """`available`, or the reason why the kernels cannot be used in this process."""
    try:
        lib = library()
    except OSError as error:
        return str(error)
    probe = abi.Attention(struct_size=sizeof(abi.Attention), head_dim=64, batch=1, max_tree=1, max_seq_len=1)
    probe.num_q_heads = probe.num_kv_heads = 1
    code = lib.eyas_tree_attn_gqa_plan(byref(probe), 0, 0)  # asks the driver for the current device
    return "available" if code == 0 else _text(lib, code)


# What CUDA's own words for these do not say: 35 (insufficient driver) is also what it answers where there is none.
_NO_DEVICE = {35: "no CUDA driver here, or one too old for the library's CUDA runtime", 100: "no CUDA device here"}


def _text(lib: CDLL, code: int) -> str:
    words = str(lib.eyas_cuda_error_text(code).decode())
    return f"{_NO_DEVICE[code]} ({words})" if code in _NO_DEVICE else words


def dtype_name(t: Tensor) -> str:
    return _name(t.dtype)


@cache
def _name(dtype: object) -> str:
    return str(dtype).rsplit(".", 1)[-1]


def pointer(t: Tensor | None) -> int | None:
    return None if t is None else t.data_ptr()


def current_device() -> int:
    """The device that work is queued on, as torch has it."""
    torch = sys.modules["torch"]  # the caller's tensors come from it
    return int(torch.cuda.current_device())


def current_stream(stream: int | None) -> int:
    """torch's current stream of its current device, where every tensor of a call is, unless the caller gives another."""
    if stream is not None:
        return stream
    torch = sys.modules["torch"]  # the caller's tensors come from it
    return int(torch.cuda.current_stream().cuda_stream)


def run(name: str, *args: Any) -> None:
    """Calls the library.

    Raises:
        ArgumentError: the library refused an argument.
        LaunchError: the driver refused the launch.
    """
    code = getattr(library(), name)(*args)
    if code == 0:
        return
    text = _text(library(), code)
    if code >= 1000:
        raise ArgumentError(name, "an argument the kernel cannot take", text)
    raise LaunchError(f"{name}: {text} (cudaError {code})")


def _wanted_device(device: Any) -> str:
    return f"cuda:{current_device()}, torch's current device" if device.type == "cuda" else "a CUDA device"


class Faults:
    """Collects what is wrong with a call's arguments, so that all of it is reported at once."""

    def __init__(self, call: str) -> None:
        self.call = call
        self.texts: list[str] = []
        self._place: object = None  # the device of a tensor that has passed, so that the others' is compared only

    def need(self, true: object, text: str) -> bool:
        if not true:
            self.texts.append(text)
        return bool(true)

    def tensor(self, name: str, t: Tensor, dtypes: Sequence[str], dims: Sequence[int | None] | None = None) -> bool:
        """Checks device, dtype, shape (None: any size) and a packed last axis."""
        if not self.need(hasattr(t, "data_ptr"), f"{name} is a {type(t).__name__}, wanted a torch tensor"):
            return False
        on_device = t.device == self._place or self._reached(t.device)
        kind, shape = dtype_name(t), tuple(t.shape)
        fits = dims is None or shape == dims or (
            len(shape) == len(dims) and all(d is None or s == d for s, d in zip(shape, dims, strict=True))
        )
        packed = not shape or shape[-1] <= 1 or t.stride(-1) == 1
        if on_device and kind in dtypes and fits and packed:
            return True  # as on every launch of a server's rounds: words are for faults alone
        wanted = ", ".join("any" if d is None else str(d) for d in dims or ())
        good = on_device or self.need(False, f"{name} is on {t.device}, wanted {_wanted_device(t.device)}")
        good &= self.need(kind in dtypes, f"{name} is {kind}, wanted {' or '.join(dtypes)}")
        good &= self.need(fits, f"{name} has shape {list(shape)}, wanted [{wanted}]")
        return self.need(packed, f"{name} is not packed in its last axis") and good

    def _reached(self, device: Any) -> bool:
        """Whether a launch reaches the device's memory: a launch goes to torch's current device, and to its stream."""
        if device.type != "cuda":
            return False
        index = getattr(device, "index", None)  # None: an array of driver.py's, which has one device alone
        if index is not None and index != current_device():
            return False
        self._place = device
        return True

    def contiguous(self, **tensors: Tensor) -> None:
        for name, t in tensors.items():
            if t is not None and not t.is_contiguous():
                self.need(False, f"{name} is not contiguous")

    def check(self) -> None:
        """Raises ArgumentError if anything was wrong."""
        if self.texts:
            raise ArgumentError(self.call, "; ".join(self.texts), "arguments as its docstring gives them")
