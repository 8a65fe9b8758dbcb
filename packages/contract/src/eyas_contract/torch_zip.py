"""Reads where tensors lie in a `pytorch_model.bin` without torch, and without running what a pickle may hold.

Format: a ZIP of stored entries, `*/data.pkl` (a pickled dict of tensors) and `*/data/KEY` (raw storages); source:
`torch/serialization.py`. The unpickler knows tensors, storages and dicts; any other name in the file is refused.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import zipfile
from collections import OrderedDict
from pathlib import Path
from typing import Any

from eyas_contract.errors import CorruptFile, InvalidInput
from eyas_contract.safetensors_header import DTYPE_BITS, MAX_DIMENSIONS, TensorInfo

MAX_PICKLE_BYTES = 16 * 1024 * 1024
_STORAGES = {"FloatStorage": "F32", "HalfStorage": "F16", "BFloat16Storage": "BF16", "DoubleStorage": "F64",
             "LongStorage": "I64", "IntStorage": "I32", "ShortStorage": "I16", "CharStorage": "I8",
             "ByteStorage": "U8", "BoolStorage": "BOOL"}
_LOCAL_HEADER = 30  # bytes of a ZIP local header before its name


class _Storage(tuple[str, str]):
    """(dtype, key) of a storage."""


class _Tensor(tuple[_Storage, int, tuple[int, ...]]):
    """(storage, offset in elements, shape) of a contiguous tensor."""


def _rebuild(storage: Any, offset: Any, shape: Any, stride: Any, *rest: Any) -> _Tensor:
    if not isinstance(storage, _Storage) or type(offset) is not int or offset < 0 or len(shape) > MAX_DIMENSIONS \
            or not all(type(n) is int and n >= 0 for n in (*shape, *stride)):
        raise ValueError("a tensor that is described otherwise than torch does")
    dense = [math.prod(shape[axis + 1:]) for axis in range(len(shape))]
    if any(a != b for n, a, b in zip(shape, stride, dense, strict=True) if n > 1):
        raise ValueError("a tensor that is not contiguous")
    return _Tensor((storage, offset, tuple(shape)))


def _parameter(data: Any, *rest: Any) -> Any:
    return data


class _Unpickler(pickle.Unpickler):
    """Builds descriptions; calls nothing that the file names."""

    def find_class(self, module: str, name: str) -> Any:
        """The few names that a state dict needs."""
        known: dict[tuple[str, str], Any] = {("torch._utils", "_rebuild_tensor_v2"): _rebuild,
                                             ("torch._utils", "_rebuild_parameter"): _parameter,
                                             ("collections", "OrderedDict"): OrderedDict}
        if module == "torch" and name in _STORAGES:
            return _STORAGES[name]
        if (module, name) not in known:
            raise pickle.UnpicklingError(f"{module}.{name}, which is no part of a plain state dict"[:200])
        return known[module, name]

    def persistent_load(self, pid: Any) -> _Storage:
        """A storage's dtype and key."""
        if not isinstance(pid, tuple) or len(pid) != 5 or pid[0] != "storage" or pid[1] not in DTYPE_BITS:
            raise pickle.UnpicklingError("a storage of an unknown kind")
        return _Storage((pid[1], str(pid[2])))


def read_torch_zip(path: Path) -> dict[str, TensorInfo]:
    """Tensors of a `torch.save` file (a flat state dict, or one under `state_dict`).

    Raises:
        CorruptFile: no ZIP, compressed entries, or storages shorter than their tensors.
        InvalidInput: a pickle that holds anything but tensors.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = {info.filename: info for info in archive.infolist()}
            main = next((name for name in entries if name.endswith("/data.pkl")), None)
            if main is None or entries[main].file_size > MAX_PICKLE_BYTES:
                raise CorruptFile(str(path), "no data.pkl of a plausible size", "a file by torch.save (1.6 or later)",
                                  "Rewrite it as safetensors.")
            state = _unpickle(path, archive.read(main))
    except (zipfile.BadZipFile, NotImplementedError, OSError, EOFError, struct.error, ValueError) as error:
        if isinstance(error, CorruptFile | InvalidInput):
            raise
        raise CorruptFile(str(path), f"no whole ZIP archive ({error})", "a file by torch.save (1.6 or later)",
                          "Copy it again, or rewrite it as safetensors.") from error
    prefix = main.removesuffix("data.pkl")
    return {name: _locate(path, name, tensor, entries.get(f"{prefix}data/{tensor[0][1]}"))
            for name, tensor in state.items() if isinstance(name, str) and isinstance(tensor, _Tensor)}


def _unpickle(path: Path, raw: bytes) -> dict[Any, Any]:
    wanted = "a pickled dict of tensors and nothing else, by eyas-contract, which runs no pickled code"
    try:
        state = _Unpickler(io.BytesIO(raw)).load()
    except (pickle.UnpicklingError, EOFError, TypeError, ValueError, KeyError, IndexError, AttributeError,
            OverflowError, MemoryError, RecursionError) as error:
        raise InvalidInput(str(path), f"{type(error).__name__}: {error}"[:300], wanted,
                           "Rewrite it with safetensors.torch.save_file.") from error
    if isinstance(state, dict) and isinstance(state.get("state_dict"), dict):
        state = state["state_dict"]
    if not isinstance(state, dict):
        raise InvalidInput(str(path), f"a pickled {type(state).__name__}", wanted, "Save the state dict alone.")
    return state


def _locate(path: Path, name: str, tensor: _Tensor, entry: zipfile.ZipInfo | None) -> TensorInfo:
    (dtype, key), offset, shape = tensor
    size = DTYPE_BITS[dtype] // 8
    length, skip = math.prod(shape) * size, offset * size
    if entry is None or entry.compress_type != zipfile.ZIP_STORED or skip + length > entry.file_size:
        raise CorruptFile(str(path), f"tensor {name!r} beyond its storage {key!r}", "a whole file by torch.save",
                          "Copy the file again.")
    with path.open("rb") as source:
        source.seek(entry.header_offset)
        header = source.read(_LOCAL_HEADER)
    if len(header) < _LOCAL_HEADER:
        raise CorruptFile(str(path), f"no entry for {name!r}", "a whole file by torch.save", "Copy the file again.")
    start = entry.header_offset + _LOCAL_HEADER + sum(struct.unpack("<HH", header[26:30])) + skip
    if start + length > path.stat().st_size:
        raise CorruptFile(str(path), f"tensor {name!r} past the file's end", "a whole file by torch.save",
                          "Copy the file again.")
    return TensorInfo(name, dtype, shape, path, start, start + length)
