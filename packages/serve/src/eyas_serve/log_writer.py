"""Keeps an engine's output whole: `python -m eyas_serve.log_writer LOG BYTES`, its standard input the engine's output.

A process of its own, so that neither a launcher stopped with Ctrl-Z nor a killed one holds up the engine. At BYTES the
file becomes LOG.1, LOG.2, ... (1 the oldest); nothing is deleted. Words in $EYAS_LOG_HIDE (one a line) are starred out.
A full disk loses lines, and says how many bytes once it can, but never ends the engine. Standard library only.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path

HIDE = "EYAS_LOG_HIDE"
CHUNK = 1 << 20


def newest(path: Path) -> int:
    """The highest number that a log's older parts have, 0 where there is none."""
    return max((int(old.suffix[1:]) for old in path.parent.glob(f"{path.name}.*") if old.suffix[1:].isdigit()),
               default=0)


def put_aside(path: Path) -> None:
    """Give an earlier run's log the next number."""
    if path.exists():
        path.rename(f"{path}.{newest(path) + 1}")


class Writer:
    """A file that is renamed to the next number at `limit` bytes.

    Args:
        path: the current file.
        limit: bytes; a line is never cut.
    """

    def __init__(self, path: Path, limit: int) -> None:
        self.path, self.limit, self.lost = path, limit, 0
        self.number = newest(path)
        self.file = path.open("ab", buffering=0)
        self.size = self.file.tell()

    def write(self, data: bytes) -> None:
        """Append, and begin a new file where this one is full."""
        end = data.rfind(b"\n") + 1
        if self.size + len(data) > self.limit and end:
            self._append(data[:end])
            self._rotate()
            data = data[end:]
        self._append(data)

    def _append(self, data: bytes) -> None:
        if self.lost:
            data = b"[eyas] %d bytes of this log were lost: no space left\n" % self.lost + data
        view = memoryview(data)
        while view:
            try:
                written = self.file.write(view)
            except OSError:
                self.lost += len(view)
                return
            self.size += written or 0
            view = view[written or 0:]
        self.lost = 0

    def _rotate(self) -> None:
        self.size = 0  # where it fails, it is tried again a whole file later
        fresh = Path(f"{self.path}.next")
        try:
            file = fresh.open("ab", buffering=0)  # first what a full disk refuses: until then the old one is written to
            self.path.rename(f"{self.path}.{self.number + 1}")
            fresh.rename(self.path)
        except OSError:
            return
        self.file.close()
        self.file, self.number = file, self.number + 1


def spellings(word: str) -> list[bytes]:
    """A word as it stands in a log, as Python shows it (SGLang logs its settings so) and as JSON does."""
    return [text.encode() for text in dict.fromkeys((word, repr(word)[1:-1], json.dumps(word)[1:-1]))]


def hide(data: bytes, words: list[bytes]) -> bytes:
    """Star out every word."""
    for word in words:
        data = data.replace(word, b"*" * 8)
    return data


def pump(source: int, writer: Writer, words: list[bytes]) -> None:
    """Until the end of `source`. With words to hide, only whole lines are passed on, so that none is cut in two; a
    progress bar's end with a carriage return."""
    kept = b""
    while data := os.read(source, CHUNK):
        if not words:
            writer.write(data)
            continue
        kept = hide(kept + data, words)
        end = max(kept.rfind(b"\n"), kept.rfind(b"\r")) + 1
        if end:
            writer.write(kept[:end])
            kept = kept[end:]
    if kept:
        writer.write(kept)


def main() -> None:
    """The engine's end closes the pipe and ends this process; signals for the launcher's group do not."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    words = [text for word in os.environ.pop(HIDE, "").split("\n") if word for text in spellings(word)]
    pump(sys.stdin.fileno(), Writer(Path(sys.argv[1]), int(sys.argv[2])), words)


if __name__ == "__main__":
    main()
