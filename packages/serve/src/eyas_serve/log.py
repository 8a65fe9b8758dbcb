"""Reading the engine's log while it grows: phases, counters, every rank's first exception, and its last words."""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path

from eyas_serve.log_writer import newest

PHASES = (  # a line of SGLang's log -> what it is doing; for ranks that have not reported yet
    (re.compile(r"Load weight begin"), "loading weights"),
    (re.compile(r"Load weight end"), "weights loaded"),
    (re.compile(r"KV Cache is allocated"), "KV cache allocated"),
    (re.compile(r"Capture .*graph.* begin"), "capturing graphs"),
    (re.compile(r"Application startup complete|The server is fired up"), "server up"),
)
PLUGIN_FAULT = re.compile(r"Failed to (?:load plugin eyas_serve|execute general plugin: eyas_serve|apply hooks to .*)")
_ERROR_LINE = re.compile(r"^(?:\[[^\]]*\] )?[A-Za-z_][\w.]*(?:Error|Exception|Failure|Interrupt|Exit|Input|Mismatch)\b")
_USAGE = re.compile(r"^[\w. -]+: error: ")  # argparse's last line, after a page of flags
_BEGIN = re.compile(r"hit an exception|^(?:\[[^\]]*\] )?Traceback \(most recent call last\)")
_PREFIX = re.compile(r"^\[[^\]]*\]\s*")
_SPEAKER = re.compile(r"(\[[^\[\]]*\]) (?:Scheduler|DataParallelController|TokenizerManager) hit an exception")
_RANK = re.compile(r"\b(TP|PP|DP)(\d+)")
_BAR = re.compile(r"(Loading|loading|Capturing)[^|]*\|.*?(\d+)/(\d+) \[")
_KV = re.compile(r"KV Cache is allocated\. (.*)")
_KEYS = (b"Load weight", b"oading", b"KV Cache", b"Captur", b"startup complete", b"fired up", b"exception",
         b"Traceback", b"Failed to")  # whatever `_see` looks for has one of these
_KEY = re.compile(b"|".join(map(re.escape, _KEYS)))
CHUNK = 1 << 24
BLOCK = 80  # lines beside its frames, after which an exception's own line is no longer waited for


@dataclass
class RankException:
    """An exception in the log. `rank` is e.g. `tp5-pp0-dp0`, or empty where the line's prefix names none; `ends` where
    SGLang says that it ended a rank; `lines` its own and what follows, without the trace; `others` how many lines were
    no frame of it."""

    rank: str
    ends: bool = False
    lines: list[str] = field(default_factory=list)
    others: int = 0

    @property
    def error(self) -> str:
        """Its own line or lines."""
        return _message(self.lines)

    def take(self, line: str) -> None:
        """The next line: a frame, of which a compiler's trace has hundreds, or another."""
        self.others += not line.startswith("  ")
        if self.lines or _ERROR_LINE.match(line):
            self.lines.append(line)


class LogReader:
    """Follows a log file through its rotation.

    Attributes:
        size: bytes read of the current part.
        phase: by the log.
        bars: name of a progress bar -> done and total, e.g. `Loading` -> (3, 64).
        cache: what it says of the KV cache.
        exceptions: in the order of the log, the first of every rank.
        plugin_fault: SGLang's complaint about our plug-in.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.size, self._rest, self._number = path, 0, b"", newest(path)
        self.phase = self.cache = self.plugin_fault = ""
        self.bars: dict[str, tuple[int, int]] = {}
        self.exceptions: list[RankException] = []
        self._open: RankException | None = None
        self._shapes: deque[str] = deque(maxlen=500)

    def poll(self) -> bool:
        """Read what is new, at most 16 MiB at a time; whether it showed progress.

        A line that differs from earlier ones only by its numbers, such as one that says how long it has waited, is
        none, unless it is a progress bar's.
        """
        data = self._read()
        text = (self._rest + data).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        whole, _, self._rest = text.rpartition(b"\n")
        self._rest = self._rest[-65536:]
        if not whole:
            return False
        lines = whole.split(b"\n")
        if self._open is not None or any(key in whole for key in _KEYS):
            before = (self.phase, dict(self.bars), len(self.exceptions))
            for line in lines:
                if self._open is not None or _KEY.search(line):  # a flood holds many others
                    self._see(line[:4096].decode("utf-8", "replace"))
            if before != (self.phase, self.bars, len(self.exceptions)):
                return True
        return self._novel(lines[-50:])

    def finish(self) -> None:
        """Read to the end, whatever the lines say."""
        before = None
        while before != (before := (self._number, self.size)):
            self.poll()

    def _read(self) -> bytes:
        rotated = Path(f"{self.path}.{self._number + 1}")
        source = rotated if rotated.exists() else self.path
        try:
            file = source.open("rb")
        except FileNotFoundError:  # not begun yet, or put aside since the line before
            return b""
        with file:
            if source is self.path and rotated.exists():
                return b""  # put aside just now: perhaps this is the next file already
            file.seek(self.size)
            data = file.read(CHUNK)
        self.size += len(data)
        if not data and source is rotated:
            self._number, self.size = self._number + 1, 0
            return self._read()
        return data

    def _see(self, line: str) -> None:
        for pattern, phase in PHASES:
            if pattern.search(line):
                self.phase = phase
        if bar := _BAR.search(line):
            self.bars[bar[1].capitalize()] = (int(bar[2]), int(bar[3]))
        if cache := _KV.search(line):
            self.cache = cache[1].strip()
        if PLUGIN_FAULT.search(line):
            self.plugin_fault = _PREFIX.sub("", line).strip()
        if "hit an exception" in line or (self._open is None and _BEGIN.search(line)):
            speaker = _SPEAKER.search(line)  # perhaps in the middle of another rank's line
            self._open = RankException(rank_of(f"{speaker[1]} " if speaker else line), "hit an exception" in line)
            self.exceptions.append(self._open)
        elif self._open is not None:
            ended = bool(self._open.lines) and (not line.strip() or line.startswith("["))
            if ended or self._open.others >= BLOCK:
                self._open = None
            else:
                self._open.take(line)

    def _novel(self, lines: list[bytes]) -> bool:
        new = False
        for line in lines:
            shape = re.sub(r"\d+", "", _PREFIX.sub("", line[:200].decode("utf-8", "replace")))
            if shape.strip() and shape not in self._shapes:
                self._shapes.append(shape)
                new = True
        return new


def rank_of(line: str) -> str:
    """`[2026-01-01 00:00:00 DP0 TP5] ...` -> `tp5-pp0-dp0`; empty where the prefix names no rank."""
    prefix = _PREFIX.match(line)
    found = dict(_RANK.findall(prefix[0])) if prefix else {}
    return f"tp{found.get('TP', 0)}-pp{found.get('PP', 0)}-dp{found.get('DP', 0)}" if found else ""


def _message(lines: list[str], most: int = 12) -> str:
    """An exception's line with those that belong to it."""
    tail: list[str] = []
    for line in lines[:most]:
        if not line.strip() or (tail and line.startswith(("[", "Traceback", "  File"))):
            break
        tail.append(line)
    return "\n".join(tail)


def last_words(path: Path, lines: int = 12) -> str:
    """The exception that ended the engine, else the end of its log.

    The first exception of a scheduler counts: other ranks then fail for want of it.
    """
    if not path.exists():
        return "it wrote nothing"
    with path.open("rb") as source:
        source.seek(0, 2)
        source.seek(max(source.tell() - (1 << 20), 0))
        text = source.read().decode("utf-8", "replace").splitlines()
    starts = [i for i, line in enumerate(text) if "Scheduler hit an exception" in line]
    candidates = text[starts[0]:] if starts else text
    found = [i for i, line in enumerate(candidates) if _ERROR_LINE.match(line)]
    if found:
        return _message(candidates[found[0] if starts else found[-1]:], lines)
    kept = [line for line in text if line.strip()]
    if kept and _USAGE.match(kept[-1]):
        return kept[-1]
    return "\n".join(line[:500] for line in kept[-lines:]) or "it wrote nothing"
