"""The error of this package. eyas-native stands alone, so it does not share eyas-contract's classes."""

from __future__ import annotations


class ArgumentError(ValueError):
    """An argument that an operation refuses; nothing has crashed, and the message says what to change.

    Args:
        where: the argument, or several.
        found: what is there.
        wanted: what should be there, and by whom.
        remedy: what the caller can do now.
    """

    def __init__(
        self, where: str, found: str, wanted: str, remedy: str = "Correct the argument; docstrings give the shapes."
    ) -> None:
        super().__init__(where, found, wanted, remedy)
        self.where, self.found, self.wanted, self.remedy = where, found, wanted, remedy

    def __str__(self) -> str:
        return f"{self.where}: {self.found}. Wanted: {self.wanted}. {self.remedy}"
