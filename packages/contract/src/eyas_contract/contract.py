"""The contract: what each stage did, as sections that are only ever added to, and compared on entry."""

from __future__ import annotations

import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas_contract import canonical
from eyas_contract.capture import CaptureSpec
from eyas_contract.draft import DraftSpec
from eyas_contract.errors import ContractMismatch, InvalidInput, Mismatch
from eyas_contract.target import TargetSpec
from eyas_contract.vocab import VocabMap

SCHEMA_VERSION = 1
FILE_NAME = "contract.json"
SECTIONS = ("target", "capture", "vocab", "draft")


@dataclass(frozen=True)
class Contract:
    """All that a draft depends on. `vocab` and `draft` are absent until training; nothing is ever removed."""

    target: TargetSpec
    capture: CaptureSpec
    vocab: VocabMap | None = None
    draft: DraftSpec | None = None
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        faults = []
        if self.schema_version != SCHEMA_VERSION:
            faults.append(f"schema_version {self.schema_version}, but this eyas-contract reads {SCHEMA_VERSION}")
        if self.capture.hidden_size != self.target.hidden_size:
            faults.append(f"capture.hidden_size {self.capture.hidden_size}, target's {self.target.hidden_size}")
        if self.capture.aux_layer_ids[-1] >= self.target.num_layers:
            faults.append(f"capture.aux_layer_ids {self.capture.aux_layer_ids} in {self.target.num_layers} layers")
        if self.vocab and self.vocab.target_vocab_size != self.target.vocab_size:
            faults.append(f"vocab.target_vocab_size {self.vocab.target_vocab_size}, target's {self.target.vocab_size}")
        if self.draft:
            faults += self._draft_faults(self.draft)
        if faults:
            raise ValueError("; ".join(faults))

    def _draft_faults(self, draft: DraftSpec) -> list[str]:
        pairs = [("target_hidden_size", draft.target_hidden_size, self.target.hidden_size),
                 ("num_aux", draft.num_aux, len(self.capture.aux_layer_ids)),
                 ("target_vocab_size", draft.target_vocab_size, self.target.vocab_size),
                 ("draft_vocab_size", draft.draft_vocab_size,
                  self.vocab.size if self.vocab else self.target.vocab_size)]
        return [f"draft.{name} {found}, but the other sections say {wanted}"
                for name, found, wanted in pairs if found != wanted]

    def digests(self) -> dict[str, str]:
        """SHA-256 per section that is present; adding a section leaves the others' unchanged."""
        return {name: canonical.digest(getattr(self, name)) for name in SECTIONS if getattr(self, name) is not None}

    def with_sections(self, *, vocab: VocabMap | None = None, draft: DraftSpec | None = None) -> Contract:
        """A contract with sections added; one already present may only be restated, not changed."""
        for name, value in (("vocab", vocab), ("draft", draft)):
            present = getattr(self, name)
            if value is not None and present is not None and value != present:
                raise ValueError(f"section {name} is already present and different")
        return dataclasses.replace(self, vocab=vocab or self.vocab, draft=draft or self.draft)

    def save(self, folder: str | Path) -> Path:
        """Write `contract.json` into `folder`, atomically; returns its path."""
        path = Path(folder) / FILE_NAME
        write_text_atomic(path, json.dumps(canonical.to_plain(self), sort_keys=True, indent=1) + "\n")
        return path

    @classmethod
    def load(cls, folder: str | Path) -> Contract:
        """Read `contract.json` of a folder (or the file itself).

        Raises:
            InvalidInput: no such file, not JSON, or fields unknown, missing or contradictory (all named).
        """
        path = Path(folder)
        path = path / FILE_NAME if path.is_dir() else path
        return canonical.from_plain(cls, read_json(path, "a contract, by eyas-contract"), str(path))


def compare(found: Contract, wanted: Contract, found_in: str, wanted_by: str,
            sections: tuple[str, ...] = SECTIONS) -> tuple[Mismatch, ...]:
    """Every field on which two contracts differ; sections absent on either side are passed over.

    Args:
        found, wanted: the two contracts.
        found_in, wanted_by: names of their sources, for the messages.
        sections: which sections to compare.
    """
    result: list[Mismatch] = []
    for name in sections:
        a, b = getattr(found, name), getattr(wanted, name)
        if a is None or b is None:
            continue
        for field in dataclasses.fields(a):
            x, y = getattr(a, field.name), getattr(b, field.name)
            if x != y:
                result.append(Mismatch(f"{name}.{field.name}", _short(x), _short(y), found_in, wanted_by))
    return tuple(result)


def require_equal(found: Contract, wanted: Contract, found_in: str, wanted_by: str, *,
                  sections: tuple[str, ...] = SECTIONS, consequence: str, remedy: str) -> None:
    """Raise ContractMismatch listing every difference, if there is one."""
    mismatches = compare(found, wanted, found_in, wanted_by, sections)
    if mismatches:
        raise ContractMismatch(mismatches, consequence, remedy)


def _short(value: Any) -> str:
    text = canonical.dumps(value)
    return text if len(text) <= 120 else f"{text[:90]}... (sha256 {canonical.digest(value)[:12]})"


def read_json(path: Path, wanted: str) -> Any:
    """Parse a JSON file; InvalidInput where it is missing or not JSON."""
    if not path.is_file():
        raise InvalidInput(str(path), "no such file", wanted, "Check the path.")
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidInput(str(path), f"not JSON ({error})", wanted, "Restore the file.") from error


def write_text_atomic(path: Path, text: str) -> None:
    """Write to a temporary name beside `path`, sync, rename: readers see the old file or the whole new one."""
    temporary = path.with_name(f".{path.name}.tmp")
    with temporary.open("w", encoding="utf-8") as sink:
        sink.write(text)
        sink.flush()
        os.fsync(sink.fileno())
    temporary.replace(path)
