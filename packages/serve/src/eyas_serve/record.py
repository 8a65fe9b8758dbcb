"""What is written down of a launch: the command, the environment that matters, versions and the machine."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from eyas_contract.contract import write_text_atomic
from eyas_serve.config import AnyConfig
from eyas_serve.interpreter import Interpreter

MATTERS = re.compile(r"^(?:NCCL|CUDA|TORCH|PYTORCH|SGLANG|SGL|EYAS|OMP|MKL|HF|FLASHINFER|TRITON|GLOO|NVIDIA|LD_|VLLM)")
SECRET = re.compile(r"KEY|TOKEN|SECRET|PASSWORD", re.IGNORECASE)


def starred(environment: Mapping[str, str]) -> dict[str, str]:
    """The same variables; what may be a secret by its name is starred out."""
    return {name: "********" if SECRET.search(name) else value for name, value in environment.items()}


def shareable(config: AnyConfig) -> AnyConfig:
    """The settings as they may be written down and passed on."""
    return dataclasses.replace(config, environment=starred(config.environment))


def environment_record(environment: Mapping[str, str]) -> dict[str, str]:
    """The variables that change how an engine runs; what may be a secret is starred out."""
    return {name: value for name, value in sorted(starred(environment).items()) if MATTERS.match(name)}


def write_record(folder: Path, command: Sequence[str], environment: Mapping[str, str], declared: Mapping[str, str],
                 engine: Interpreter) -> None:
    """Write `engine.json` beside the log."""
    plain = {"command": list(command), "environment": environment_record({**environment, **declared}),
             "declared": starred(declared),
             "sglang": engine.sglang, "torch": engine.torch, "eyas_native": engine.native,
             "host": platform.node(), "kernel": platform.release(), "cores": os.cpu_count()}
    write_text_atomic(folder / "engine.json", json.dumps(plain, indent=1) + "\n")
