"""The machine that a benchmark runs on: what it is, and its engine's way to our plug-ins. No torch here."""

from __future__ import annotations

import os
import platform
import subprocess
from importlib.metadata import entry_points
from pathlib import Path


def expose_plugin(folder: Path, distribution: str) -> None:
    """Give this process and its children the entry point that an installation of `eyas-serve` or the like has.

    For a host where our packages are on PYTHONPATH only: SGLang finds plug-ins by entry points alone.
    """
    module = distribution.replace("-", "_")
    if any(entry.name == module for entry in entry_points(group="sglang.srt.plugins")):
        return
    info = folder / f"{module}-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{module} = {module}.plugin:activate\n")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])


def nvidia_smi(query: str) -> list[list[str]]:
    """A row for each GPU that CUDA_VISIBLE_DEVICES leaves. Raises OSError or CalledProcessError where there is none."""
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    done = subprocess.run(["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits",
                           *([f"--id={chosen}"] if chosen else [])], capture_output=True, text=True, check=True)
    return [[value.strip() for value in line.split(",")] for line in done.stdout.splitlines()]


def processor() -> str:
    """The processor's name."""
    info = Path("/proc/cpuinfo")
    names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor()
