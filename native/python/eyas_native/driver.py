"""Just enough of the CUDA driver to give the kernels memory and time them, by ctypes: the selftest needs no torch."""

from __future__ import annotations

import ctypes
import math
import statistics
from array import array
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from eyas_native.cuda_core import LaunchError

SIZES = {"bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "float32": 4, "int32": 4, "int64": 8, "uint8": 1}
_ATTRIBUTES = {"sm_count": 16, "capability_major": 75, "capability_minor": 76, "l2_bytes": 38, "smem_per_block": 97}


class Place:
    """What `tensor.device` is asked for."""

    type = "cuda"

    def __str__(self) -> str:
        return "cuda:0"


@dataclass(frozen=True)
class DeviceArray:
    """Contiguous device memory with what `eyas_native.cuda` asks of a torch tensor."""

    address: int
    shape: tuple[int, ...]
    dtype: str
    device: Place = field(default_factory=Place)

    def data_ptr(self) -> int:
        """Device address."""
        return self.address

    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    def element_size(self) -> int:
        """Bytes of an element."""
        return SIZES[self.dtype]

    def is_contiguous(self) -> bool:
        """Always."""
        return True

    def stride(self, axis: int | None = None) -> Any:
        """Elements, of one axis or of all."""
        strides = tuple(math.prod(self.shape[i + 1 :]) for i in range(len(self.shape)))
        return strides if axis is None else strides[axis]


class Driver:
    """The first CUDA device, through its primary context, which CUDA's runtime shares.

    Args:
        fill: new memory is filled with NaNs, so that what no kernel wrote shows in a result; not filled, it shows in
            compute-sanitizer's initcheck.

    Raises:
        OSError: no driver.
        LaunchError: the driver refuses, e.g. because there is no device.
    """

    def __init__(self, fill: bool = True) -> None:
        self._fill = fill
        self._library = ctypes.CDLL("libcuda.so.1")
        self._addresses: list[int] = []
        self._device, context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(self._device), 0)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), self._device)
        self.call("cuCtxSetCurrent", context)

    def call(self, name: str, *arguments: Any) -> None:
        """Calls the driver; its error becomes a LaunchError."""
        code = getattr(self._library, name)(*arguments)
        if code:
            text = ctypes.c_char_p()
            self._library.cuGetErrorString(code, ctypes.byref(text))
            raise LaunchError(f"{name}: {(text.value or b'unknown error').decode()} (CUresult {code})")

    def describe(self) -> dict[str, Any]:
        """name, capability, driver (CUDA version it supports), memory_mib, sm_count, l2_bytes, smem_per_block."""
        name, memory, version = ctypes.create_string_buffer(256), ctypes.c_size_t(), ctypes.c_int()
        self.call("cuDeviceGetName", name, 256, self._device)
        self.call("cuDeviceTotalMem_v2", ctypes.byref(memory), self._device)
        self.call("cuDriverGetVersion", ctypes.byref(version))
        found = {}
        for key, number in _ATTRIBUTES.items():
            value = ctypes.c_int()
            self.call("cuDeviceGetAttribute", ctypes.byref(value), number, self._device)
            found[key] = value.value
        capability = f"{found.pop('capability_major')}.{found.pop('capability_minor')}"
        driver = f"{version.value // 1000}.{version.value % 1000 // 10}"
        return {"name": name.value.decode(), "capability": capability, "driver": driver,
                "memory_mib": memory.value >> 20, **found}  # fmt: skip

    def empty(self, dtype: str, *shape: int) -> DeviceArray:
        """Device memory, every byte 255 (a NaN in all float dtypes) unless this driver does not fill."""
        address, size = ctypes.c_uint64(), max(1, math.prod(shape) * SIZES[dtype])
        self.call("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(size))
        self._addresses.append(address.value)
        if self._fill:
            self.call("cuMemsetD8_v2", address, ctypes.c_ubyte(255), ctypes.c_size_t(size))
        return DeviceArray(address.value, shape, dtype)

    def put(self, dtype: str, shape: tuple[int, ...], content: Any) -> DeviceArray:
        """A copy of `content` (a buffer of the dtype's size)."""
        made, data = self.empty(dtype, *shape), bytes(memoryview(content).cast("B"))
        assert len(data) == made.numel() * made.element_size(), (dtype, shape, len(data))
        if data:
            self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(made.address), data, ctypes.c_size_t(len(data)))
        return made

    def get(self, code: str, source: DeviceArray) -> array[Any]:
        """Waits for the device and brings an array back as `array(code)`."""
        self.call("cuCtxSynchronize")
        size = source.numel() * source.element_size()
        buffer = ctypes.create_string_buffer(max(1, size))
        self.call("cuMemcpyDtoH_v2", buffer, ctypes.c_uint64(source.address), ctypes.c_size_t(size))
        return array(code, buffer.raw[:size])

    def repeat(self, target: DeviceArray, pattern: bytes) -> None:
        """Fills `target` with copies of `pattern`."""
        size, done = target.numel() * target.element_size(), min(len(pattern), target.numel() * target.element_size())
        self.call("cuMemcpyHtoD_v2", ctypes.c_uint64(target.address), pattern, ctypes.c_size_t(done))
        while done < size:
            more = min(done, size - done)
            to, start = ctypes.c_uint64(target.address + done), ctypes.c_uint64(target.address)
            self.call("cuMemcpyDtoDAsync_v2", to, start, ctypes.c_size_t(more), None)
            done += more

    def copy(self, target: DeviceArray, source: DeviceArray) -> None:
        """Queues a copy between two arrays of one size on the null stream."""
        size = ctypes.c_size_t(source.numel() * source.element_size())
        self.call("cuMemcpyDtoDAsync_v2", ctypes.c_uint64(target.address), ctypes.c_uint64(source.address), size, None)

    def release(self) -> None:
        """Frees all memory."""
        for address in self._addresses:
            self.call("cuMemFree_v2", ctypes.c_uint64(address))
        self._addresses.clear()

    def microseconds(self, launch: Callable[[], None], flush: DeviceArray, repeats: int = 15) -> float:
        """Median time of a launch on the null stream with a cold L2 cache: `flush` is overwritten before each."""
        events, times = [ctypes.c_void_p(), ctypes.c_void_p()], []
        for event in events:
            self.call("cuEventCreate", ctypes.byref(event), 0)
        for i in range(repeats + 3):
            size = ctypes.c_size_t(flush.numel() * flush.element_size())
            self.call("cuMemsetD8Async", ctypes.c_uint64(flush.address), ctypes.c_ubyte(i), size, None)
            self.call("cuEventRecord", events[0], None)
            launch()
            self.call("cuEventRecord", events[1], None)
            self.call("cuEventSynchronize", events[1])
            elapsed = ctypes.c_float()
            # cuEventElapsedTime is exported under this name in every driver; newer ones add a _v2 of equal arguments.
            self.call("cuEventElapsedTime", ctypes.byref(elapsed), *events)
            times.append(1000 * elapsed.value)
        for event in events:
            self.call("cuEventDestroy_v2", event)
        return statistics.median(times[3:])
