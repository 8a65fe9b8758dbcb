"""Errors for users. Each states four facts: where, what was found, what was wanted and by whom, what to do."""

from __future__ import annotations

from dataclasses import dataclass


def printable(text: str) -> str:
    """Text that any UTF-8 stream takes: halves of surrogate pairs, which JSON may hold, are written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")


class EyasError(Exception):
    """Base of every error a user may meet.

    Args:
        where: file, field, argument or process concerned.
        found: what is there.
        wanted: what should be there, and who wants it.
        remedy: what the reader can do now.
    """

    def __init__(self, where: str, found: str, wanted: str, remedy: str) -> None:
        super().__init__(where, found, wanted, remedy)
        self.where, self.found, self.wanted, self.remedy = where, found, wanted, remedy

    def __str__(self) -> str:
        found = self.found.rstrip(".\n")  # of others' words, too, which may end in either
        stop = "\n" if "\n" in found else ". "
        return printable(f"{self.where}: {found}{stop}Wanted: {self.wanted}. {self.remedy}")


class InvalidInput(EyasError, ValueError):  # noqa: N818 - names what the user gave
    """A file, row, flag or config value that cannot be used."""


class CorruptFile(EyasError, ValueError):  # noqa: N818
    """A file whose bytes are not what was written: cut, flipped, or not of its format."""


class EngineFailure(EyasError, RuntimeError):  # noqa: N818
    """The serving engine did not start, died, or answered with an error."""


@dataclass(frozen=True)
class Mismatch:
    """One field on which two contracts differ.

    Attributes:
        field: dotted path, e.g. ``capture.aux_layer_ids``.
        found, wanted: both values, as text.
        found_in, wanted_by: the two sources, e.g. file names.
    """

    field: str
    found: str
    wanted: str
    found_in: str
    wanted_by: str

    def __str__(self) -> str:
        return f"{self.field}: {self.found} in {self.found_in}, but {self.wanted} in {self.wanted_by}"


class ContractMismatch(EyasError, ValueError):  # noqa: N818
    """Two artefacts that do not belong together; lists every difference, never the first alone."""

    def __init__(self, mismatches: tuple[Mismatch, ...], consequence: str, remedy: str) -> None:
        assert mismatches
        where = f"{mismatches[0].found_in} against {mismatches[0].wanted_by}"
        found = f"{len(mismatches)} difference(s):\n  " + "\n  ".join(str(m) for m in mismatches)
        super().__init__(where, found, f"equal values; {consequence}", remedy)
        self.mismatches = mismatches
        self.args = (mismatches, consequence, remedy)  # what pickle calls __init__ with
