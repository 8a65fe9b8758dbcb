"""The selftest of the CUDA kernels without a GPU: host memory passes for the device's, the CPU backend for the kernels.

That proves the checks (their inputs, references and comparisons), and that a wrong kernel fails them; not the kernels.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest

import eyas_native
from eyas_native import __main__, cuda, selftest_attention, selftest_cuda, selftest_speed
from eyas_native.driver import DeviceArray, Driver


class HostDriver(Driver):
    """The driver's calls over host memory."""

    def __init__(self) -> None:
        self._addresses: list[int] = []
        self._fill = True
        self._blocks: dict[int, Any] = {}

    def call(self, name: str, *arguments: Any) -> None:
        values = [getattr(a, "value", a) for a in arguments]
        if name == "cuMemAlloc_v2":
            block = ctypes.create_string_buffer(values[1] + 64)
            address = -(-ctypes.addressof(block) // 64) * 64
            self._blocks[address] = block
            ctypes.cast(arguments[0], ctypes.POINTER(ctypes.c_uint64))[0] = address
        elif name == "cuMemFree_v2":
            del self._blocks[values[0]]
        elif name == "cuMemsetD8_v2":
            ctypes.memset(*values)
        elif name in ("cuMemcpyHtoD_v2", "cuMemcpyDtoDAsync_v2"):
            ctypes.memmove(*values[:3])
        elif name == "cuMemcpyDtoH_v2":
            ctypes.memmove(arguments[0], *values[1:])
        else:
            assert name == "cuCtxSynchronize"


class HostView:
    """Device memory as eyas_native takes arrays."""

    def __init__(self, array: DeviceArray) -> None:
        self.shape, self.itemsize = array.shape, array.element_size()
        self.strides = tuple(step * self.itemsize for step in array.stride())
        self.dtype = type("", (), {"name": array.dtype, "isnative": True})
        self.flags = type("", (), {"writeable": True})
        self.address = array.address

    @property
    def __array_interface__(self) -> dict[str, Any]:
        return {"data": (self.address, False)}


def on_cpu(name: str) -> Callable[..., None]:
    """eyas_native's operation with eyas_native.cuda's arguments."""

    def call(*arguments: Any, stream: int, **named: Any) -> None:
        assert stream == 0
        def view(x: Any) -> Any:
            if isinstance(x, list):
                return [view(one) for one in x]
            return HostView(x) if isinstance(x, DeviceArray) else x

        named = {key: view(x) for key, x in named.items()}
        getattr(eyas_native, name)(*map(view, arguments), **named)

    return call


SAME = ("tree_from_mask", "verify_greedy", "verify_target_only", "verify_rejection", "accept_commit",
        "hidden_gather")


def build(*lists: Any, words: DeviceArray, invalid: DeviceArray, tree_mask: DeviceArray, mask_mode: int,
          **rest: Any) -> None:
    call = on_cpu("tree_build")
    call(*lists, tree_mask=words, mask_mode=3, **rest)
    call(*lists, tree_mask=tree_mask, mask_mode=mask_mode, **rest)
    ctypes.memset(invalid.address, 0, 4 * invalid.numel())


def move(
    buffers: DeviceArray, slot_bytes: DeviceArray, tgt_loc: DeviceArray, src_loc: DeviceArray, stream: int
) -> None:
    addresses, sizes = ((ctypes.c_int64 * 2).from_address(x.address) for x in (buffers, slot_bytes))
    pools = [HostView(DeviceArray(at, (9, size // 4), "int32")) for at, size in zip(addresses, sizes, strict=True)]
    used = [HostView(DeviceArray(x.address, (5,), "int64")) for x in (tgt_loc, src_loc)]  # the last entry is -1
    eyas_native.kv_move(pools, *used)


def refuse(*arguments: Any, **options: Any) -> None:
    raise cuda.LaunchError("the CPU has no such operation")


def validate(tree_mask: DeviceArray, faults: DeviceArray, stream: int) -> None:
    assert stream == 0
    ctypes.memset(faults.address, 0, faults.numel())
    for fault in eyas_native.tree_validate(HostView(tree_mask)):
        ctypes.memset(faults.address + fault.request * faults.shape[1] + fault.node, 1, 1)


def prepare(q: Any, *caches_out_index_lens: Any, **options: Any) -> Callable[[int], None]:
    """Attention in the queries' dtype; for e4m3 caches, which the CPU has not, the case is left to fail."""
    *caches, out, table, lens = caches_out_index_lens
    if caches[0].dtype == "float8_e4m3fn":
        refuse()
    k = HostView(caches[0])
    v = HostView(caches[-1])
    v.shape = (*v.shape[:2], out.shape[2])  # MLA: the first 512 components of k
    n, one, tree_keys = options["max_tree"], selftest_attention.Memory, options.get("tree_keys", 0)
    columns = tree_keys or n
    mask = None  # causal
    if "mask" in options:
        words = (ctypes.c_uint32 * n).from_address(options["mask"].address)
        mask = one("B", (n * columns,), [words[i] >> j & 1 for i in range(n) for j in range(columns)])
    return lambda stream: eyas_native.tree_attention(
        HostView(q), k, v, HostView(out), HostView(table), one("q", (1,)), HostView(lens), one("q", (1,), [n]),
        one("q", (1,)), scale=options["scale"], tree_mask=mask, tree_keys=tree_keys, lse=HostView(options["lse"]),
    )


@pytest.fixture
def on_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in SAME:
        monkeypatch.setattr(cuda, name, on_cpu(name))
    monkeypatch.setattr(cuda, "tree_build", build)
    monkeypatch.setattr(cuda, "tree_validate", validate)
    monkeypatch.setattr(cuda, "kv_move", move)
    monkeypatch.setattr(cuda, "lse_combine", refuse)
    monkeypatch.setattr(cuda, "prepare_gqa", prepare)
    monkeypatch.setattr(cuda, "prepare_mla", prepare)
    monkeypatch.setattr(cuda, "attention_plan", lambda *kind, **sizes: {"workspace_bytes": 0})


def test_right_results_pass(on_host: None) -> None:
    checks = selftest_cuda.run(HostDriver())
    failed = {check.name: check.detail for check in checks if not check.passed}
    assert len(checks) == 7 + 6 * (3 * 2 + 1)
    assert failed.keys() == {check.name for check in checks if "e4m3" in check.name or "combine" in check.name}, failed


@pytest.mark.parametrize("name", [*SAME, "tree_build", "tree_validate", "kv_move"])
def test_a_kernel_that_does_nothing_fails(on_host: None, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    check = next(check for key, check in selftest_cuda.checks().items() if name in key)
    assert check(HostDriver()) == ""
    monkeypatch.setattr(cuda, name, lambda *arguments, **options: None)
    assert "differ" in (fault := check(HostDriver())) or "error nan" in fault


@pytest.mark.parametrize("kind", ["gqa", "mla"])
def test_attention_that_does_nothing_fails(on_host: None, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(cuda, f"prepare_{kind}", lambda *arguments, **options: lambda stream: None)
    check = next(check for key, check in selftest_cuda.checks().items() if kind in key)
    assert check(HostDriver()).startswith("relative error nan")


def test_the_report_of_a_machine_with_a_gpu(
    on_host: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Timed(HostDriver):
        def describe(self) -> dict[str, Any]:
            return {"name": "a card", "capability": "12.0"}

        def microseconds(self, launch: Callable[[], None], flush: DeviceArray, repeats: int = 15) -> float:
            assert callable(launch)
            return 12.34

    checked = selftest_cuda.Check("cuda all", True, "equal to the CPU's")
    plan = {"num_splits": 7, "workspace_bytes": 64}
    monkeypatch.setattr(__main__, "Driver", Timed)
    monkeypatch.setattr(__main__, "status", lambda: {"cpu": "available", "cuda": "available"})
    monkeypatch.setattr(selftest_cuda, "run", lambda driver: [checked])
    monkeypatch.setattr(cuda, "attention_plan", lambda *kind, **sizes: plan)
    monkeypatch.setattr(selftest_speed, "_MIB", 1024)
    found = __main__.report(("cuda",), speed=True)
    assert found["passed"]
    assert found["device"] == {"name": "a card", "capability": "12.0"}
    assert found["checks"] == [vars(checked)]
    assert list(found["plans"].values()) == [plan, plan]
    assert [row["case"] for row in found["speed"]] == [
        "copy-256MiB", "gqa64/8-d128-B1-L8192-T16", "gqa64/8-d128-B1-L32768-T16", "gqa64/8-d128-B1-L32768-T64",
        "mla8-B1-L8192-T16", "mla64-B1-L8192-T16", "gather-3x7168-N512"]
    gqa = found["speed"][1]
    assert (gqa["us"], gqa["gbps"]) == (12.3, round(2 * 2 * 8192 * 8 * 128 / 12.34e-6 / 1e9))
    monkeypatch.setattr("sys.argv", ["eyas_native", "selftest", "--backend", "cuda"])
    assert __main__.main() == 0
    text = capsys.readouterr().out
    for part in ("capability: 12.0", "num_splits=7", "12.3 us", "1 of 1 checks passed"):
        assert part in text
