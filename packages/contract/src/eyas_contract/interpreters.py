"""Interpreters that a user names: on a command line, or by a variable of the environment."""

from __future__ import annotations

import os
import shutil
from pathlib import Path


def located(name: Path | str) -> Path:
    """The interpreter's absolute path: Path shortens `./python3` to a bare name, which a process looks up on PATH.

    So a bare name is the working folder's file and, only where there is none, a command on PATH. Symbolic links stay:
    a virtual environment's Python is one, and knows by its own path which environment it belongs to.
    """
    path = Path(name)
    bare = os.sep not in str(name) and not path.is_file()
    return Path((shutil.which(name) if bare else None) or path).absolute()
