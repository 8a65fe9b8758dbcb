"""What the extension needs to know of an array: address, dtype, shape, strides. For torch and numpy, importing neither.

Called once per argument of every operation, so it costs well under a microsecond for a torch tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eyas_native.errors import ArgumentError

View = tuple[int, int, tuple[int, ...], tuple[int, ...]]

# Position is the code; the extension's src/python/view.h has the same list.
DTYPES = (
    "float32", "bfloat16", "float16", "int32", "int64", "uint8", "bool", "int16", "uint16", "uint32", "uint64",
    "float8_e4m3fn",
)  # fmt: skip
_CODES = {name: code for code, name in enumerate(DTYPES)}
_makers: dict[type, Callable[[Any, str, bool], View]] = {}


def view(array: Any, name: str) -> View:
    """(address, dtype code, shape, strides in elements) of a CPU array that is only read.

    Args:
        array: torch tensor or numpy array.
        name: the argument's name, for the error.

    Raises:
        ArgumentError: neither of the two, on another device, or of an unknown dtype.
    """
    return (_makers.get(type(array)) or _maker(type(array), name))(array, name, False)


def target(array: Any, name: str) -> View:
    """Like view, of an array that will be written; a read-only one is refused."""
    return (_makers.get(type(array)) or _maker(type(array), name))(array, name, True)


def optional(array: Any, name: str) -> View | None:
    """Like view, None for None."""
    return None if array is None else view(array, name)


def _maker(kind: type, name: str) -> Callable[[Any, str, bool], View]:
    if any(base.__module__.partition(".")[0] == "torch" and base.__name__ == "Tensor" for base in kind.__mro__):
        maker = _torch_maker()
    elif hasattr(kind, "__array_interface__"):
        maker = _numpy_view
    else:
        raise ArgumentError(name, f"a {kind.__name__}", "a torch tensor on the CPU or a numpy array", "Convert it.")
    _makers[kind] = maker
    return maker


def _torch_maker() -> Callable[[Any, str, bool], View]:
    import torch

    codes = {getattr(torch, dtype): code for dtype, code in _CODES.items()}

    def torch_view(tensor: Any, name: str, written: bool) -> View:
        if not tensor.is_cpu:
            raise ArgumentError(name, f"a tensor on {tensor.device}", "a tensor on the CPU", "Move it to the CPU.")
        code = codes.get(tensor.dtype)
        if code is None:
            raise _unknown_dtype(name, str(tensor.dtype))
        return tensor.data_ptr(), code, tensor.shape, tensor.stride()

    return torch_view


def _numpy_view(array: Any, name: str, written: bool) -> View:
    code = _CODES.get(array.dtype.name)
    if code is None or not array.dtype.isnative:
        raise _unknown_dtype(name, str(array.dtype))
    if written and not array.flags.writeable:
        raise ArgumentError(name, "a read-only array", "an array to write the result into", "Pass a writable copy.")
    size = array.itemsize
    if any(stride % size for stride in array.strides):
        raise ArgumentError(name, "elements at odd addresses", "strides of whole elements", "Pass a contiguous copy.")
    strides = tuple(stride // size for stride in array.strides)
    return array.__array_interface__["data"][0], code, array.shape, strides


def _unknown_dtype(name: str, dtype: str) -> ArgumentError:
    return ArgumentError(name, f"dtype {dtype}", "one of " + ", ".join(DTYPES), "Convert it first.")
