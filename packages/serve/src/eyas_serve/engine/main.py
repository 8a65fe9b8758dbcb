"""The engine's main module: prepares this process, then becomes `sglang.launch_server`.

    python -m eyas_serve.engine.main <arguments of sglang.launch_server>

SGLang spawns its schedulers, and a spawned child imports the main module again (as `__mp_main__`): what a process needs
before it imports SGLang is therefore done at import, in every process alike. On a GPU nothing is changed.
"""

from __future__ import annotations

import itertools
import os
import runpy
import sys
import warnings

CPU_SWITCH = "EYAS_ENGINE_CPU"


def wants_cpu(argv: list[str]) -> bool:
    """Whether the arguments of `sglang.launch_server` name the CPU as device."""
    return "--device=cpu" in argv or any(pair == ("--device", "cpu") for pair in itertools.pairwise(argv))


def main() -> None:
    """Run SGLang's server with this process's arguments; ends with the server."""
    warnings.filterwarnings("ignore", message=".*sglang.launch_server.*")
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)


if __name__ == "__main__" and wants_cpu(sys.argv[1:]):
    os.environ[CPU_SWITCH] = "1"  # inherited by the spawned processes, whose arguments are not these
if __name__ in ("__main__", "__mp_main__") and os.environ.get(CPU_SWITCH) == "1":
    from eyas_serve.engine.cpu import prepare_cpu

    prepare_cpu()
if __name__ == "__main__":
    main()
