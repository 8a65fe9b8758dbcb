"""What can be known of the kernels on sm_120 without such a card: registers, spills, memory, occupancy, instructions.

Nothing here runs on a GPU. The kernels have never been executed on sm_120.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
NVCC = shutil.which("nvcc")
GATES = {1: 4, 2: 4, 4: 6}  # of cuda_gates.cu, and the number of their kernels
pytestmark = pytest.mark.skipif(NVCC is None, reason="nvcc is not installed here, so no kernel can be compiled")


def nvcc(*arguments: str) -> subprocess.CompletedProcess[str]:
    includes = [f"-I{ROOT / 'native/include'}", f"-I{ROOT / 'native/src/cuda'}"]
    return subprocess.run(
        [str(NVCC), "-std=c++17", "-O3", *includes, *arguments], capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="module")
def cubins(tmp_path_factory: pytest.TempPathFactory) -> dict[int, tuple[Path, str]]:
    """Cubin and ptxas report of each GATE."""
    folder = tmp_path_factory.mktemp("gates")

    def build(gate: int) -> tuple[Path, str]:
        out = folder / f"{gate}.cubin"
        done = nvcc(
            "-arch=sm_120", "-cubin", "-Xptxas", "-v", f"-DGATE={gate}", str(HERE / "cuda_gates.cu"), "-o", str(out)
        )
        assert done.returncode == 0, done.stderr
        return out, done.stderr

    with ThreadPoolExecutor(2) as pool:
        return dict(zip(GATES, pool.map(build, GATES), strict=True))


@pytest.mark.parametrize("gate", GATES)
def test_registers_and_spills(cubins: dict[int, tuple[Path, str]], gate: int) -> None:
    report = cubins[gate][1]
    frames = re.findall(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", report)
    registers = [int(r) for r in re.findall(r"Used (\d+) registers", report)]
    assert len(frames) == len(registers) == GATES[gate]
    assert all(frame == ("0", "0", "0") for frame in frames), report
    assert all(r <= 255 for r in registers)


def disassembler() -> str | None:
    found = shutil.which("cuobjdump")
    if found is None:
        roots = {Path(sysconfig.get_paths()["purelib"]), *ROOT.glob(".venv/engine/lib/python*/site-packages")}
        paths = [p for root in roots for p in root.glob("triton/backends/nvidia/bin/cuobjdump")]
        found = str(paths[0]) if paths else None
    return found


@pytest.mark.skipif(disassembler() is None, reason="no cuobjdump here, neither CUDA's nor triton's")
@pytest.mark.parametrize("gate", GATES)
def test_instructions(cubins: dict[int, tuple[Path, str]], gate: int) -> None:
    command = [str(disassembler()), "-sass", str(cubins[gate][0])]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    kernels = text.split("Function : ")[1:]
    assert len(kernels) == GATES[gate]
    for kernel in kernels:
        count = {op: len(re.findall(rf"\b{op}[ .]", kernel)) for op in ("HMMA", "LDSM", "LDGSTS", "LDL", "STL")}
        assert count["HMMA"] >= 32, count
        assert count["LDSM"] >= 12, count
        assert count["LDGSTS"] >= 4, count
        assert count["LDL"] == count["STL"] == 0, count
        assert not re.search(r"\b(WGMMA|HGMMA|UTCHMMA|UTMALDG)\b", kernel)  # portable instructions only


def test_shared_memory_fits_and_the_compiler_would_say_so(tmp_path: Path) -> None:
    gate = ["-gencode", "arch=compute_120a,code=sm_120a", "-cubin", "-DGATE=3", str(HERE / "cuda_gates.cu"), "-o"]
    fits = nvcc("-DEXTRA=101376", *gate, str(tmp_path / "a.cubin"))
    assert fits.returncode == 0, fits.stderr
    over = nvcc("-DEXTRA=101377", *gate, str(tmp_path / "b.cubin"))
    assert over.returncode != 0
    assert "too much shared data" in over.stderr


def test_occupancy(tmp_path: Path) -> None:
    tool = tmp_path / "occupancy"
    done = nvcc("-cudart", "static", "-x", "cu", str(HERE / "cuda_occupancy.cpp"), "-o", str(tool))
    assert done.returncode == 0, done.stderr
    # The GQA tile at 128 rows; the MLA tile at 32; a small block, alone for its 16 barriers; one byte too many.
    lines = "256 255 99328 16\n128 254 100368 16\n128 168 49152 1\n128 168 49152 16\n256 255 101377 16\n"
    out = subprocess.run([str(tool)], input=lines, capture_output=True, text=True, check=True).stdout.split()
    assert out == ["1", "1", "2", "1", "0"]
