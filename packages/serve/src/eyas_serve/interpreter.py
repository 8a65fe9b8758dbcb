"""The interpreter that has SGLang: which it is, and what is installed there."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from eyas_contract import EngineFailure
from eyas_contract.interpreters import located

VARIABLE = "EYAS_ENGINE_PYTHON"
_PROBE = """
import importlib.metadata as m, importlib.util as u, json
def version(name):
    try: return m.version(name)
    except m.PackageNotFoundError: return None
print(json.dumps({n: version(n) for n in ("sglang", "torch", "eyas-native")} |
      {"plugin": u.find_spec("eyas_serve") is not None and any(
          e.name == "eyas_serve" for e in m.entry_points(group="sglang.srt.plugins"))}))
"""


@dataclass(frozen=True)
class Interpreter:
    """A Python with SGLang.

    Attributes:
        python: its path, absolute.
        sglang, torch: versions there.
        native: eyas-native's version there, or None.
    """

    python: Path
    sglang: str
    torch: str | None
    native: str | None


def find_interpreter(given: Path | None, device: str) -> Interpreter:
    """Ask the configured interpreter what it has; imports nothing heavy there.

    Raises:
        EngineFailure: it does not run, or lacks sglang, the eyas-serve plug-in, or (for a CPU) eyas-native.
    """
    python = located(given or os.environ.get(VARIABLE) or sys.executable)
    where = f"engine interpreter {python}"
    choose = f"Name the interpreter that has sglang with --engine-python or ${VARIABLE}."
    try:
        done = subprocess.run([str(python), "-c", _PROBE], capture_output=True, text=True, timeout=60, check=True)
        found = json.loads(done.stdout.splitlines()[-1])
    except OSError as error:
        raise EngineFailure(where, f"cannot be run ({error.strerror})", "a Python with sglang", choose) from error
    except (subprocess.SubprocessError, ValueError, IndexError) as error:
        raise EngineFailure(where, f"does not answer ({error})", "a Python with sglang", choose) from error
    if not found["sglang"]:
        raise EngineFailure(where, "sglang is not installed there", "sglang 0.5.16 to 0.5.23, by eyas-serve", choose)
    missing = [name for name, there in (("eyas-serve", found["plugin"]),
                                        ("eyas-native", found["eyas-native"] or device != "cpu")) if not there]
    if missing:
        raise EngineFailure(where, f"{' and '.join(missing)} not installed there",
                            "the guard beside sglang, and on a CPU the kernels, by eyas-serve",
                            f"Run in a checkout of eyas: {python} -m pip install packages/contract . packages/serve")
    return Interpreter(python, found["sglang"], found["torch"], found["eyas-native"])
