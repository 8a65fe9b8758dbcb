"""The attention kernels' own source, run on a CPU: every thread a fiber, the GPU's instructions replaced by emulation/.

It shows what a kernel computes, whether it stays inside its shared memory and whether its barriers suffice. It does not
show what a GPU makes of the instructions; for that there is cuda_fuzz.py. PART 3 and 4 hold other tiles:

    g++ -std=c++17 -O1 -DPART=3 -Itests/native/emulation -Inative/include -Inative/src/cuda -include cuda.h \\
      tests/native/emulation/emulate.cpp -o emulate && ./emulate 100 1
"""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
EMULATION = Path(__file__).parent / "emulation"
COMPILER = shutil.which("g++")


@pytest.mark.skipif(COMPILER is None, reason="g++ is not installed here")
@pytest.mark.parametrize(("part", "cases"), [(1, 2), (2, 2)], ids=["gqa", "mla"])
def test_kernels_agree(part: int, cases: int, tmp_path: Path) -> None:
    program = tmp_path / "emulate"
    folders = [f"-I{folder}" for folder in (EMULATION, ROOT / "native/include", ROOT / "native/src/cuda")]
    command = [str(COMPILER), "-std=c++17", "-O1", "-w", f"-DPART={part}", *folders, "-include", "cuda.h"]
    subprocess.run([*command, str(EMULATION / "emulate.cpp"), "-o", str(program)], check=True)
    done = subprocess.run([str(program), str(cases), "1"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
