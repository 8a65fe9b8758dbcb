"""The engine's log: written and rotated by a process of its own, read while it grows."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from eyas_serve import log_writer
from eyas_serve.events import Event, into_file
from eyas_serve.log import LogReader
from eyas_serve.log_writer import Writer, pump
from eyas_serve.processes import dump_stacks

FRAME = '  File "/x/layer.py", line 7, in forward\n    return self.mlp(x)\n           ^^^^^^^^^^^\n'


@pytest.mark.parametrize("frames", [3, 40, 700])
def test_an_exception_is_found_under_any_number_of_frames(tmp_path: Path, frames: int) -> None:
    """A model's forward alone is some thirty frames of three lines, a compiler's trace hundreds."""
    path = tmp_path / "server.log"
    path.write_text("[x TP1] Scheduler hit an exception: Traceback (most recent call last):\n" + FRAME * frames
                    + "RuntimeError: a kernel failed\non device 1\n\n[x TP1] later\n")
    reader = LogReader(path)
    reader.finish()
    assert [(found.rank, found.error) for found in reader.exceptions] == [
        ("tp1-pp0-dp0", "RuntimeError: a kernel failed\non device 1")]


def test_an_exception_without_a_line_of_its_own_is_not_waited_for(tmp_path: Path) -> None:
    path = tmp_path / "server.log"
    path.write_text("[x TP1] Scheduler hit an exception: Traceback (most recent call last):\n" + FRAME * 3
                    + "[x TP1] Decode batch\n" * 100 + "[x TP2] Traceback (most recent call last):\n" + FRAME
                    + "ValueError: another's\n")
    reader = LogReader(path)
    reader.finish()
    assert [(found.rank, found.error) for found in reader.exceptions] == [
        ("tp1-pp0-dp0", ""), ("tp2-pp0-dp0", "ValueError: another's")]


def test_a_log_put_aside_between_two_looks_at_it_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is renamed after the reader has seen no later part, and before it opens it."""
    path = tmp_path / "server.log"
    path.write_text("first\n")
    reader, real = LogReader(path), Path.open

    def put_aside(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self == path:
            path.rename(f"{path}.1")
            monkeypatch.setattr(Path, "open", real)
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", put_aside)
    assert not reader.poll()
    path.write_text("second\n")
    assert reader.poll()
    reader.finish()
    assert (reader._number, reader.size) == (1, len("second\n"))


def test_a_disk_without_room_for_a_next_part_ends_no_engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The writer goes on with the file that it has: without it the engine would die of its next line."""
    path = tmp_path / "server.log"
    writer, real = Writer(path, 10), Path.open

    def full(self: Path, *args: Any, **kwargs: Any) -> Any:
        if self.parent == tmp_path:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(self, *args, **kwargs)

    monkeypatch.setattr(Path, "open", full)
    for line in (b"one two\n", b"three four\n", b"five six\n"):
        writer.write(line)
    monkeypatch.setattr(Path, "open", real)
    writer.write(b"seven eight\n")
    writer.write(b"nine\n")
    writer.file.close()
    assert {part.name: part.read_bytes() for part in tmp_path.iterdir()} == {
        "server.log.1": b"one two\nthree four\nfive six\nseven eight\n", "server.log": b"nine\n"}


def test_parts_are_numbered_on_and_end_with_a_line(tmp_path: Path) -> None:
    """A log that is there is gone on with, its bytes counted; `.next` is a part that was begun and never named."""
    path = tmp_path / "server.log"
    for name, content in (("", "12345678\n"), (".4", "old\n"), (".next", "")):
        Path(f"{path}{name}").write_text(content)
    writer = Writer(path, 10)
    for data in (b"ab\n", b"c" * 20, b"d\ne", b"\n"):
        writer.write(data)
    writer.file.close()
    assert {part.suffix: part.read_bytes() for part in tmp_path.iterdir()} == {
        ".4": b"old\n", ".5": b"12345678\nab\n", ".6": b"c" * 20 + b"d\n", ".log": b"e\n"}


def test_how_much_a_full_disk_lost_is_said_once_there_is_room(tmp_path: Path) -> None:
    class Full:
        def write(self, data: memoryview) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    writer = Writer(tmp_path / "server.log", 1000)
    file, writer.file = writer.file, Full()  # type: ignore[assignment]
    writer.write(b"gone\n")
    writer.file = file
    for line in (b"one\n", b"two\n"):
        writer.write(line)
    file.close()
    assert (tmp_path / "server.log").read_text() == (
        "[eyas] 5 bytes of this log were lost: no space left\none\ntwo\n")


def test_last_words_without_a_line_end_are_kept_and_hidden_in(tmp_path: Path) -> None:
    source, sink = os.pipe()
    os.write(sink, b"first\nkilled with secret-word")
    os.close(sink)
    writer = Writer(tmp_path / "server.log", 1000)
    pump(source, writer, [b"secret-word"])
    os.close(source)
    writer.file.close()
    assert (tmp_path / "server.log").read_text() == "first\nkilled with ********"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no device that is always full")
def test_a_full_disk_hides_no_verdict() -> None:
    """The record of events and the stacks of a stall lie beside the logs, of which nothing is deleted."""
    full = Path("/dev/full")
    into_file(full)(Event("verdict", "a rank died"))
    assert dump_stacks(shutil.which("true"), {"tp0-pp0-dp0": 1}, full) == (
        "no stacks: /dev/full cannot be written (No space left on device)")


@pytest.mark.parametrize("words", [[], [b"secret-word"]])
def test_a_progress_bar_is_seen_while_it_moves(tmp_path: Path, words: list[bytes]) -> None:
    """With an API key to hide too: graphs that take long to capture were taken for a stall."""
    path = tmp_path / "server.log"
    reader, writer, (source, sink) = LogReader(path), Writer(path, 1 << 20), os.pipe()
    pumping = threading.Thread(target=pump, args=(source, writer, words), daemon=True)
    pumping.start()
    seen = list[tuple[int, int]]()
    try:
        for done in (1, 2, 3):
            os.write(sink, b"\rCapturing batches (secr")
            os.write(sink, b"et-word):  10%%|#   | %d/50 [00:01<00:49]\r" % done)
            deadline = time.monotonic() + 10
            while not reader.poll() and time.monotonic() < deadline:
                time.sleep(0.01)
            seen += reader.bars.values()
    finally:
        os.close(sink)
        pumping.join(10)
        os.close(source)
        writer.file.close()
    assert seen == [(1, 50), (2, 50), (3, 50)]
    assert words == [] or b"secret-word" not in path.read_bytes()


@pytest.mark.parametrize("key", ["plain-word-1", "back\\slash-1", "it's\"quoted-1"])
def test_a_key_is_hidden_however_it_is_spelt(tmp_path: Path, key: str) -> None:
    path, settings = tmp_path / "server.log", {"api_key": key}
    text = f"server_args={settings} {key}\n"
    subprocess.run([sys.executable, "-m", log_writer.__name__, str(path), "1000"], input=text.encode(), check=True,
                   env={**os.environ, log_writer.HIDE: key})
    assert path.read_text() == text.replace(repr(key)[1:-1], "*" * 8).replace(key, "*" * 8)
