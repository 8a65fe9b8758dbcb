"""Many requests at a time, while somebody keeps an eye on the server."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

Item = TypeVar("Item")
Answer = TypeVar("Answer")
EVERY = 1.0  # seconds between two looks at the server


class _Work(Generic[Item, Answer]):
    """The items still to do, what came of the others, and the first error."""

    def __init__(self, work: Callable[[Item], Answer], items: Sequence[Item]) -> None:
        self.work, self.items, self.waiting = work, items, iter(range(len(items)))
        self.answers: dict[int, Answer] = {}
        self.error: BaseException | None = None
        self.lock, self.over = threading.Lock(), threading.Event()

    def go(self) -> None:
        """One item after the other, until none is left or one failed."""
        while not self.over.is_set():
            with self.lock:
                at = next(self.waiting, None)
            if at is None:
                return
            try:
                self.answers[at] = self.work(self.items[at])
            except BaseException as error:
                self.error = self.error or error
                self.over.set()
            if len(self.answers) == len(self.items):
                self.over.set()


def in_flight(work: Callable[[Item], Answer], items: Sequence[Item], at_a_time: int,
              look: Callable[[], None]) -> list[Answer]:
    """`work` of each item, in the items' order, `at_a_time` of them at once; `look` meanwhile, every second.

    Whatever ends the waiting, an error, a look that raises or Ctrl-C, ends it at once: the threads are daemons, begin
    nothing more, and are not waited for. Their requests end with the server or with this process.

    Raises:
        the first error of `work`, or what `look` raises.
    """
    begun = _Work(work, items)
    for _ in range(min(at_a_time, len(items))):
        threading.Thread(target=begun.go, daemon=True).start()
    try:
        while items and not begun.over.wait(EVERY):
            look()
    finally:
        begun.over.set()
    if begun.error is not None:
        look_twice(look)
        raise begun.error
    return [begun.answers[i] for i in range(len(items))]


def look_twice(look: Callable[[], None]) -> None:
    """A request fails before its server is seen to be dead, and what killed the server says more."""
    look()
    time.sleep(EVERY)
    look()
