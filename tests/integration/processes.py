"""What the tests of killed engines ask about processes that may end while they are asked."""

from __future__ import annotations

import os

import psutil


def title(process: psutil.Process) -> str:
    """Its command line; empty once it is gone."""
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""


def capture_settings(process: psutil.Process) -> str:
    """The capture settings that another, living process was started with; empty for any other."""
    try:
        alive = process.pid != os.getpid() and process.status() != psutil.STATUS_ZOMBIE
        return process.environ().get("EYAS_CAPTURE", "") if alive else ""
    except psutil.Error:
        return ""
