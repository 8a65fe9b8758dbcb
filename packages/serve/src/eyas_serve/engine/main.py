"""The engine's main module: prepares this process, then becomes `sglang.launch_server`.

    python -m eyas_serve.engine.main <arguments of sglang.launch_server>

SGLang spawns its schedulers, and a spawned child imports the main module again (as `__mp_main__`): what a process needs
before it imports SGLang is therefore done at import, in every process alike. (On a CPU they are forked instead, unless
EYAS_CPU_SPAWN is 1.) On a GPU nothing is changed, but for `eyas` as an attention backend, which SGLang's own parser
would not know.
"""

from __future__ import annotations

import itertools
import os
import runpy
import sys
import warnings

from eyas_serve.plugin import ATTENTION_SWITCH

CPU_SWITCH = "EYAS_ENGINE_CPU"
ATTENTION_FLAGS = ("--attention-backend", "--decode-attention-backend", "--prefill-attention-backend",
                   "--speculative-draft-attention-backend")


def says(argv: list[str], flag: str, value: str) -> bool:
    """Whether the arguments of `sglang.launch_server` give a flag this value."""
    return f"{flag}={value}" in argv or any(pair == (flag, value) for pair in itertools.pairwise(argv))


def main() -> None:
    """Run SGLang's server with this process's arguments; ends with the server."""
    warnings.filterwarnings("ignore", message=".*sglang.launch_server.*")
    if os.environ.get(ATTENTION_SWITCH) == "1":
        from sglang.srt.server_args import add_attention_backend_choices

        add_attention_backend_choices(["eyas"])  # the ranks' plug-in registers the backend itself
    runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=False)


if __name__ == "__main__":  # both inherited by the spawned processes, whose arguments are not these
    if says(sys.argv[1:], "--device", "cpu"):
        os.environ[CPU_SWITCH] = "1"
    if any(says(sys.argv[1:], flag, "eyas") for flag in ATTENTION_FLAGS):
        os.environ[ATTENTION_SWITCH] = "1"
if __name__ in ("__main__", "__mp_main__") and os.environ.get(CPU_SWITCH) == "1":
    from eyas_serve.engine.cpu import prepare_cpu

    prepare_cpu()
if __name__ == "__main__":
    main()
