"""What makes eyas-native's wheel one for CUDA: its version, and a build that keeps the promise. Nothing is compiled."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import eyas_native

ROOT = Path(__file__).parent.parent.parent
VERSION = """
import sys
from scikit_build_core.build import prepare_metadata_for_build_wheel as prepare
print(prepare(sys.argv[1]))
"""
NVCC = shutil.which("nvcc")
KNOWN = (f"-DCMAKE_CUDA_COMPILER={NVCC}", "-DCMAKE_CUDA_COMPILER_WORKS=ON")  # saves CMake two trial builds
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="nvcc is not installed here")


@pytest.mark.parametrize(("wheel", "suffix"), [(None, ""), ("cu130", "+cu130")])
def test_version(tmp_path: Path, wheel: str | None, suffix: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "EYAS_WHEEL"}
    environment |= {"EYAS_WHEEL": wheel} if wheel else {}
    command = [sys.executable, "-c", VERSION, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[-1] == f"eyas_native-{eyas_native.__version__}{suffix}.dist-info"


def configure(folder: Path, version: str, *defines: str, **environment: str) -> subprocess.CompletedProcess[str]:
    ask = [sys.executable, "-m", "pybind11", "--cmakedir"]
    pybind11 = subprocess.run(ask, capture_output=True, text=True, check=True).stdout.strip()
    facts = {"SKBUILD": "ON", "SKBUILD_PROJECT_VERSION_FULL": version, "pybind11_DIR": pybind11,
             "Python_EXECUTABLE": sys.executable, "EYAS_CUDA": "ON"}
    command = ["cmake", "-S", str(ROOT), "-B", str(folder), "-G", "Ninja", *defines]
    command += [f"-D{name}={value}" for name, value in facts.items()]
    return subprocess.run(command, capture_output=True, text=True, check=False, env={**os.environ, **environment})


@needs_nvcc
def test_several_architectures_reach_the_build(tmp_path: Path) -> None:
    done = configure(tmp_path, "0.1.0", *KNOWN, "-DEYAS_CUDA_ARCHS=90-real;120-virtual")
    assert done.returncode == 0, done.stderr
    rules = (tmp_path / "build.ninja").read_text(encoding="utf-8")
    assert "code=[sm_90]" in rules
    assert "code=[compute_120]" in rules
    assert 'EYAS_CUDA_ARCHS="\\"90-real 120-virtual\\""' in rules, "as one definition"


@needs_nvcc
def test_a_wheel_of_another_cuda_than_its_version_says_is_refused(tmp_path: Path) -> None:
    done = configure(tmp_path, "0.1.0+cu118", *KNOWN, "-DEYAS_CUDA_ARCHS=90-real")
    assert done.returncode != 0
    assert "promises cu118, but nvcc is" in " ".join(done.stderr.split())


def test_a_cuda_wheel_without_nvcc_is_refused(tmp_path: Path) -> None:
    done = configure(tmp_path, "0.1.0+cu130", "-DCMAKE_CUDA_COMPILER=NOTFOUND")
    assert done.returncode != 0
    assert "no CUDA compiler was found" in " ".join(done.stderr.split())


def test_a_wheel_that_pyproject_does_not_know_is_refused(tmp_path: Path) -> None:
    done = configure(tmp_path, "0.1.0", EYAS_WHEEL="cu999")
    assert done.returncode != 0
    assert "EYAS_WHEEL is 'cu999', which pyproject.toml does not know" in " ".join(done.stderr.split())
