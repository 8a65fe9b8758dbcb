"""The input cut into what each shard will hold, the same way every time, so that a run can go on where it stopped."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

from eyas_contract.commands import Progress
from eyas_extract.config import RunConfig
from eyas_extract.conversations import Reject, read_conversations
from eyas_extract.encoding import encoded, processes
from eyas_extract.mask import Sample
from eyas_extract.store import LONGEST
from eyas_extract.template import DAY, ChatTemplate

Config = TypeVar("Config", bound=RunConfig)


@dataclass
class Pending:
    """What the next shard will hold: samples, rejects among its lines, and the line after them."""

    samples: list[Sample] = field(default_factory=list)
    rejects: list[Reject] = field(default_factory=list)
    next_line: int = 1

    @property
    def tokens(self) -> int:
        """Tokens of the samples."""
        return sum(len(s.input_ids) for s in self.samples)


def settled(config: Config, template: ChatTemplate, source: Mapping[str, str | int]) -> Config:
    """The settings by which a store's rows are encoded, its template's date pinned: what its source says holds."""
    template.day = str(source.get(DAY, ""))
    return dataclasses.replace(config, max_length=min(config.max_length, int(source.get(LONGEST, config.max_length))))


def shards(config: RunConfig, template: ChatTemplate, first_line: int, progress: Progress | None = None
           ) -> Iterator[Pending]:
    """Cut the input, from a line on, into shards: at the first row with which a shard has `shard_tokens`."""
    pending = Pending(next_line=first_line)
    rows = read_conversations(config.data, first_line)
    for row, samples, reasons in encoded(rows, config, template, processes(config, first_line)):
        if isinstance(row, Reject):
            pending.rejects.append(row)
        else:
            pending.samples += samples
            pending.rejects += [Reject(row.line, row.id, reason) for reason in reasons]
        if progress:
            progress.total += max(0, len(samples) - 1)
            progress.update(0 if samples else 1)
        pending.next_line = row.line + 1
        if pending.tokens >= config.shard_tokens:
            yield pending
            pending = Pending(next_line=pending.next_line)
    if pending.samples or pending.rejects:
        yield pending
