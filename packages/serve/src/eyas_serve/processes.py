"""The engine's processes from outside: which live, what they do, and where their Python stands."""

from __future__ import annotations

import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import psutil

DUMP_SECONDS = 10.0


def running(pid: int) -> bool:
    """Whether a process lives; a zombie does not."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


@dataclass(frozen=True)
class Use:
    """What a process has used so far: seconds of CPU, bytes read from disk, and its state."""

    cpu: float
    read: int
    state: str
    waits_in: str


def use_of(pid: int) -> Use | None:
    """Now; None where it is gone."""
    try:
        process = psutil.Process(pid)
        with process.oneshot():
            times, state = process.cpu_times(), process.status()
            read = process.io_counters().read_bytes
        waits = Path(f"/proc/{pid}/wchan").read_text(encoding="utf-8").strip("0\n")
    except (psutil.Error, OSError):
        return None
    return Use(times.user + times.system, read, state, waits)


def compare_use(pid: int, before: Use | None, seconds: float) -> str:
    """What it did since `before`, for a person: a process that reads or computes is slow, one that waits is stuck."""
    now = use_of(pid)
    if now is None:
        return "gone"
    if before is None:
        return f"{now.state}{f' in {now.waits_in}' if now.waits_in else ''}"
    cpu, read = 100 * (now.cpu - before.cpu) / max(seconds, 0.1), (now.read - before.read) / 2**20
    where = f" in {now.waits_in}" if now.waits_in and cpu < 5 else ""
    return f"{now.state}{where}, {cpu:.0f} % CPU and {read:,.0f} MiB read in {seconds:.0f} s"


def find_py_spy(engine_python: Path) -> str | None:
    """py-spy beside the engine's interpreter, else on the path."""
    beside = engine_python.parent / "py-spy"
    return str(beside) if beside.is_file() else shutil.which("py-spy")


def dump_stacks(tool: str | None, pids: dict[str, int], out: Path) -> str:
    """Write every rank's Python stacks into a file; returns where they are, or why there are none."""
    if tool is None:
        return "no stacks: py-spy is not installed (pip install py-spy beside sglang)"
    started = {name: subprocess.Popen([tool, "dump", "--pid", str(pid)], stdout=subprocess.PIPE,
                                      stderr=subprocess.STDOUT, text=True, errors="replace")
               for name, pid in pids.items()}
    parts = []
    for name, process in started.items():
        try:
            text, _ = process.communicate(timeout=DUMP_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.communicate()
            text = f"py-spy did not answer within {DUMP_SECONDS:.0f} s"
        parts.append(f"== {name} ({pids[name]})\n{text}")
    try:
        out.write_text("\n".join(parts), encoding="utf-8")
    except OSError as error:
        return f"no stacks: {out} cannot be written ({error.strerror})"
    return f"stacks: {out}"


def innermost(dump: Path) -> dict[str, str]:
    """Rank -> the innermost Python frame of its main thread in a dump; ranks without one are left out."""
    found: dict[str, str] = {}
    rank = ""
    for line in dump.read_text(encoding="utf-8").splitlines() if dump.exists() else []:
        if line.startswith("== "):
            rank = line[3:].partition(" ")[0]
        elif line.startswith("    ") and rank and rank not in found:
            found[rank] = line.strip()
    return found


def oom_kills() -> int:
    """How many processes the kernel has killed for want of memory since it started; 0 where it does not say."""
    try:
        for line in Path("/proc/vmstat").read_text(encoding="utf-8").splitlines():
            if line.startswith("oom_kill "):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return 0
