"""Writing where others write too, and where the disk may be full or not ours to write to."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from eyas_contract import EyasError, InvalidInput

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


@contextmanager
def room_for(path: Path) -> Iterator[None]:
    """Turn a full disk into an EyasError that says that nothing committed is lost."""
    try:
        yield
    except OSError as error:
        if error.errno not in FULL:
            raise
        raise EyasError(str(path), f"no room to write ({error.strerror})", "space on this disk, by eyas-extract",
                        "What was committed is whole; make room and run the same command again.") from error


def make_folder(folder: Path) -> None:
    """Make an output folder, and see that files can be made in it: better now than after an hour's work.

    Raises:
        InvalidInput: it cannot be made or written.
        EyasError: the disk is full.
    """
    found = ""
    with room_for(folder):
        try:
            folder.mkdir(parents=True, exist_ok=True)
            if not os.access(folder, os.R_OK | os.W_OK | os.X_OK):
                found = "a folder that cannot be written"
        except OSError as error:
            if error.errno in FULL:
                raise
            found = f"a folder cannot be made here ({error.strerror})"
    if found:
        raise InvalidInput(str(folder), found, "a folder to write results into, by eyas-extract",
                           "Give another folder.")


def sync_folder(folder: Path) -> None:
    """Make renames in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
