"""Checkpoints hold a CRC-32 of each record: torch saves tensors in ZIP archives, and reads them without comparing."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import IO


def require_whole(archive: Path | IO[bytes]) -> None:
    """Read an archive through, which takes about a second a gigabyte.

    Raises:
        ValueError: a record that is not what was written, or no archive.
    """
    try:
        with zipfile.ZipFile(archive) as records:
            damaged = records.testzip()
    except (zipfile.BadZipFile, NotImplementedError, EOFError) as error:
        raise ValueError(str(error)) from error
    if damaged is not None:
        raise ValueError(f"record {damaged} is not what was written (CRC-32)")
