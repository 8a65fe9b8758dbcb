"""Where results are written: never over what somebody else, or an earlier run, has left there."""

from __future__ import annotations

import fcntl
import itertools
import os
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from eyas_contract.errors import InvalidInput


def require_own(folder: Path, ours: Collection[str], wanted: str) -> None:
    """Refuse an output folder that holds anything but our own files; one that is absent or empty will do.

    Args:
        folder: to be written into.
        ours: names that an interrupted run of the same command may have left, their temporary files included.
        wanted: what the folder should be, for the message.

    Raises:
        InvalidInput: a file in its place, or strangers in it, named.
    """
    if folder.exists() and not folder.is_dir():
        raise InvalidInput(str(folder), "a file", wanted, "Give another --out.")
    strangers = sorted(path.name for path in folder.iterdir() if path.name not in ours) if folder.exists() else []
    if strangers:
        more = f" and {len(strangers) - 5} more" if len(strangers) > 5 else ""
        raise InvalidInput(str(folder), f"not empty: {', '.join(strangers[:5])}{more}", wanted, "Give another --out.")


def require_place(path: Path, wanted: str, taken: Collection[str] = ()) -> None:
    """Make the folder of a file that long work will write at its end, so that it does not end for nothing.

    Args:
        taken: suffixes that files beside it will have.

    Raises:
        InvalidInput: a folder in its place, one of those suffixes, or a folder that nothing can be written to.
    """
    found = "a folder" if path.is_dir() else f"a name that ends in {path.suffix}" if path.suffix in taken else ""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        found = f"in a folder that cannot be made ({error.strerror})"
    if not found and not os.access(path.parent, os.W_OK):
        found = "in a folder that cannot be written to"
    if found:
        raise InvalidInput(str(path), found, wanted, "Give another place.")


def lock(path: Path) -> int:
    """Hold a file or folder against other writers, until the returned handle is closed or this process ends.

    Raises:
        InvalidInput: another process holds it.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise InvalidInput(str(path), "another process of eyas writes to it now", "one writer at a time",
                           "Wait for its end, or give another place.") from error
    return handle


@contextmanager
def held(path: Path) -> Iterator[None]:
    """`lock` for as long as the block lasts. Raises InvalidInput as it does."""
    handle = lock(path)
    try:
        yield
    finally:
        os.close(handle)


def with_temporary(*names: str) -> set[str]:
    """The names, and those of the files that become them (`write_text_atomic`)."""
    return {*names, *(f".{name}.tmp" for name in names)}


def set_aside(*paths: Path) -> list[Path]:
    """Rename those of an earlier report's files that are there, all under one new number: `bench.json`, `bench.html`
    -> `bench.1.json`, `bench.1.html`. Returns the new names."""
    present = [path for path in paths if path.exists()]
    if not present:
        return []
    number = next(n for n in itertools.count(1) if not any(_numbered(path, n).exists() for path in paths))
    return [path.rename(_numbered(path, number)) for path in present]


def _numbered(path: Path, number: int) -> Path:
    return path.with_name(f"{path.stem}.{number}{path.suffix}")
