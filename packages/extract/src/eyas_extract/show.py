"""The tokens of one sample, those that are trained on marked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from eyas_contract import InvalidInput
from eyas_extract.check import read_sample
from eyas_extract.config import ShowConfig
from eyas_extract.conversations import Reject, read_conversations
from eyas_extract.mask import Sample, encode
from eyas_extract.target import stop_ids
from eyas_extract.template import ChatTemplate, first_day


@dataclass(frozen=True)
class Shown:
    """One sample's tokens: ids, the text of each, whether each is trained on; and the supervised text."""

    id: str
    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    trained: tuple[bool, ...]
    supervised: str


def show(config: ShowConfig) -> Shown:
    """Read one sample of a store, or make it from a conversations file.

    Raises:
        InvalidInput: neither or both of data and store, no such sample, or a row that makes none (with its reason).
    """
    if (config.data is None) == (config.store is None):
        raise InvalidInput("show", "--data and --store" if config.data else "neither --data nor --store",
                           "one of them", "Name a conversations file or a store.")
    template = ChatTemplate(config.target, sorted(stop_ids(config.target)))
    if config.store is not None:
        try:
            name, ids, mask = read_sample(config.store, config.index, config.id)
        except LookupError as error:
            raise _absent(config.store, config) from error
    else:
        assert config.data is not None
        template.day = first_day(config.target, config.data)
        name, ids, mask = _from_data(config.data, config, template)
    pieces = tuple(template.decode([i]) for i in ids)
    return Shown(name, tuple(ids), pieces, tuple(bool(m) for m in mask), supervised(template, ids, mask))


def supervised(template: ChatTemplate, ids: list[int], mask: list[int]) -> str:
    """The text of the trained tokens, runs apart by ` | `."""
    runs: list[list[int]] = []
    for at, (token, bit) in enumerate(zip(ids, mask, strict=True)):
        if bit:
            if not runs or not mask[at - 1]:
                runs.append([])
            runs[-1].append(token)
    return " | ".join(template.decode(run) for run in runs)


def _from_data(path: Path, config: ShowConfig, template: ChatTemplate) -> tuple[str, list[int], list[int]]:
    number = 0
    samples: list[Sample]
    for row in read_conversations(path):
        if isinstance(row, Reject):
            samples, reasons = [], [row.reason]
        else:
            samples, reasons = encode(row, template, max_length=config.max_length, overlong=config.overlong)
        for sample in samples:
            if config.id in (sample.id, row.id) if config.id else number == config.index:
                return sample.id, list(sample.input_ids), list(sample.loss_mask)
            number += 1
        if config.id and row.id == config.id:
            raise InvalidInput(f"{path}, line {row.line}", "; ".join(reasons), "a row that can be trained on",
                               "Correct the row.")
    raise _absent(path, config)


def _absent(path: Path, config: ShowConfig) -> InvalidInput:
    wanted = f"sample {config.id!r}" if config.id else f"sample number {config.index}"
    return InvalidInput(str(path), f"no {wanted}", "a sample that is there", "Samples are numbered from 0.")


def text(shown: Shown, *, colour: bool) -> str:
    """For people: trained tokens in green on a terminal, in brackets elsewhere."""
    opening, closing = ("\x1b[1;32m", "\x1b[0m") if colour else ("[", "]")
    parts = [f"{opening}{token}{closing}" if trained else token
             for token, trained in zip(shown.tokens, shown.trained, strict=True)]
    return (f"{shown.id}: {len(shown.ids)} tokens, {sum(shown.trained)} trained\n{''.join(parts)}\n"
            f"supervised: {shown.supervised!r}")
