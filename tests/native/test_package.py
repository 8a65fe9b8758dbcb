"""status, build_info, the selftest command, and the C ABI as another program would call it."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

import eyas_native
from eyas_native import _C, __main__, selftest


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ | environment)


def test_status_and_build_info() -> None:
    status, info = eyas_native.status(), eyas_native.build_info()
    assert status["cpu"] == "available"
    assert status["cuda"] == "available" or len(status["cuda"]) > 10, "a reason"
    assert info["version"] == version("eyas-native")
    assert info["isas"][-1] == "scalar"
    assert {"git", "compiler", "cuda_archs", "threads"} <= info.keys()


def test_selftest_passes_and_reports() -> None:
    done = run("-m", "eyas_native", "selftest", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["passed"]
    assert len(report["checks"]) == 9 + 2 * len(report["build"]["isas"])
    assert "checks passed" in run("-m", "eyas_native", "selftest").stdout


def test_selftest_notices_a_wrong_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(eyas_native, "kv_move", lambda *arguments: None)
    failed = [check.name for check in selftest.run() if not check.passed]
    assert failed == ["kv_move", "bad arguments are refused"]
    monkeypatch.setattr(sys, "argv", ["eyas_native", "selftest"])
    assert __main__.main() == 1


def test_instruction_set_from_the_environment() -> None:
    ask = "import eyas_native; print(eyas_native.isa())"
    assert run("-c", ask, EYAS_NATIVE_ISA="scalar").stdout.strip() == "scalar"
    refused = run("-c", "import eyas_native; print(eyas_native.status()['cpu'])", EYAS_NATIVE_ISA="avx1024")
    assert refused.stdout.startswith("EYAS_NATIVE_ISA: avx1024. Wanted: one of ")


def test_knobs_refuse_nonsense() -> None:
    with pytest.raises(eyas_native.ArgumentError, match="isa"):
        eyas_native.set_isa("avx1024")
    for threads in (-1, 5000):
        with pytest.raises(eyas_native.ArgumentError, match="threads"):
            eyas_native.set_threads(threads)
    eyas_native.set_threads(3)
    assert eyas_native.build_info()["threads"] == 3


def test_c_abi_refuses_structs_of_another_build() -> None:
    library = ctypes.CDLL(str(Path(_C.__file__).with_name("libeyas_cpu.so")))
    text = ctypes.create_string_buffer(512)
    for name in ("tree_build", "tree_from_mask", "verify_greedy", "accept_commit", "attention_run", "kv_write",
                 "hidden_gather"):
        call = getattr(library, f"eyas_cpu_{name}")
        assert call(text) == 1, "struct_size 0 is a bad argument"
        assert call(None) == 1
    library.eyas_cpu_last_error.restype = ctypes.c_char_p
    assert library.eyas_cpu_abi() == 4
