"""Where our packages are on PYTHONPATH only, as on a borrowed GPU host: SGLang finds plug-ins by entry points alone."""

from __future__ import annotations

import os
from importlib.metadata import entry_points
from pathlib import Path


def expose_plugin(folder: Path, distribution: str) -> None:
    """Give this process and its children the entry point that an installation of `eyas-serve` or the like has."""
    module = distribution.replace("-", "_")
    if any(entry.name == module for entry in entry_points(group="sglang.srt.plugins")):
        return
    info = folder / f"{module}-0.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{module} = {module}.plugin:activate\n")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
