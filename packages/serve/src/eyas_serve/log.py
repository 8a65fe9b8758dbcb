"""Reading the engine's log while it grows, and its last words when it dies."""

from __future__ import annotations

import re
from pathlib import Path

PHASES = (  # a line of SGLang's log -> what it is doing; for ranks that have not reported yet
    (re.compile(r"Load weight begin"), "loading weights"),
    (re.compile(r"Load weight end"), "weights loaded"),
    (re.compile(r"KV Cache is allocated"), "KV cache allocated"),
    (re.compile(r"Capture .*graph.* begin"), "capturing graphs"),
    (re.compile(r"Application startup complete|The server is fired up"), "server up"),
)
PLUGIN_FAULT = re.compile(r"Failed to (?:load plugin eyas_serve|execute general plugin: eyas_serve|apply hooks to .*)")
_ERROR_LINE = re.compile(r"^(?:\[[^\]]*\] )?[A-Za-z_][\w.]*(?:Error|Exception|Failure|Interrupt|Exit|Input|Mismatch)\b")
_PREFIX = re.compile(r"^\[[^\]]*\]\s*")


class LogReader:
    """Follows a log file. `size` is what has been read, in bytes."""

    def __init__(self, path: Path) -> None:
        self.path, self.size, self._rest = path, 0, b""
        self.phase = ""
        self.plugin_fault = ""

    def poll(self) -> bool:
        """Read what is new, at most 16 MiB at a time; whether there was any."""
        with self.path.open("rb") as source:
            source.seek(self.size)
            data = source.read(1 << 24)
        self.size += len(data)
        lines = (self._rest + data).split(b"\n")
        self._rest = lines.pop()[-65536:]
        for line in lines:
            self._see(line[:4096].decode("utf-8", "replace"))
        return bool(data)

    def _see(self, line: str) -> None:
        for pattern, phase in PHASES:
            if pattern.search(line):
                self.phase = phase
        if PLUGIN_FAULT.search(line):
            self.plugin_fault = _PREFIX.sub("", line).strip()


def last_words(path: Path, lines: int = 12) -> str:
    """The exception that ended the engine, else the end of its log.

    The first exception of a scheduler counts: other ranks then fail for want of it.
    """
    with path.open("rb") as source:
        source.seek(0, 2)
        source.seek(max(source.tell() - (1 << 20), 0))
        text = source.read().decode("utf-8", "replace").splitlines()
    starts = [i for i, line in enumerate(text) if "Scheduler hit an exception" in line]
    candidates = text[starts[0]:] if starts else text
    found = [(i, line) for i, line in enumerate(candidates) if _ERROR_LINE.match(line)]
    if found:
        at = found[0][0] if starts else found[-1][0]
        tail: list[str] = []
        for line in candidates[at:at + lines]:
            if not line.strip() or (tail and (line.startswith(("[", "Traceback", "  File")))):
                break
            tail.append(line)
        return "\n".join(tail)
    kept = [line for line in text if line.strip()]
    return "\n".join(kept[-lines:]) or "it wrote nothing"
