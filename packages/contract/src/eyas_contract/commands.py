"""What every eyas command does alike: config files under flags, errors as exit codes, progress with ETA.

Standard library only; the parser (tyro) is handed in by the package whose command it is.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
import tomllib
import typing
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from eyas_contract.canonical import to_plain
from eyas_contract.contract import write_text_atomic
from eyas_contract.errors import EyasError, InvalidInput


def expand_config(argv: Sequence[str], commands: Mapping[str, type]) -> list[str]:
    """Replace `--config FILE.toml` by the flags it stands for, placed before the given ones, which so win.

    Args:
        argv: words after the program's name: subcommand first.
        commands: subcommand -> its config dataclass; keys of the file are its field names (`-` or `_`). A field that is
            a dataclass itself has its own fields as flags: they may stand in a table of its name, or beside the others.

    Raises:
        InvalidInput: unreadable file, keys that the command does not know (all named), or the flag before the command.
    """
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--config=") else (word,))]
    if words[:1] == ["--config"]:
        raise InvalidInput("--config", "before the command", f"after it, one of {', '.join(commands)}", "Move it.")
    if "--config" not in words or words[0] not in commands:
        return words
    at = words.index("--config")
    if at + 1 >= len(words):
        raise InvalidInput("--config", "no file name after it", "the path of a TOML file", "Name the file.")
    path = Path(words[at + 1])
    flags = [word for key, value in load_toml(commands[words[0]], path).items() for word in _as_flags(key, value)]
    return [words[0], *flags, *words[1:at], *words[at + 2:]]


def load_toml(config: type, path: Path) -> dict[str, Any]:
    """A TOML file's keys, checked against the fields of the dataclass `config`.

    Raises:
        InvalidInput: missing or malformed file, or unknown keys (all named).
    """
    assert dataclasses.is_dataclass(config)
    nested = _nested(config)
    hints = typing.get_type_hints(config, include_extras=True)
    # What a command takes by its place among the words (tyro marks it by an annotation) has no flag to stand for it.
    by_place = {name for name, hint in hints.items() if typing.get_origin(hint) is typing.Annotated}
    known = {field.name for field in dataclasses.fields(config)}.union(*nested.values()) - by_place
    wanted = f"a TOML file with keys of {sorted(known)}"
    if not path.is_file():
        raise InvalidInput(str(path), "no such file", wanted, "Check the path given to --config.")
    try:
        plain = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise InvalidInput(str(path), f"not TOML ({error})", wanted, "Correct the file.") from error
    values: dict[str, Any] = {}
    unknown = []
    for key, value in plain.items():
        name = key.replace("-", "_")
        if name in nested and isinstance(value, dict):
            inner = {inner.replace("-", "_"): item for inner, item in value.items()}
            unknown += [f"{key}.{inner}" for inner in sorted(set(inner) - nested[name])]
            values |= inner
        elif name in nested or name not in known:
            unknown.append(key)
        else:
            values[name] = value
    if unknown:
        unknown.sort()
        raise InvalidInput(str(path), f"unknown keys {unknown}", wanted, "Correct or remove them.")
    return values


def _nested(config: type) -> dict[str, set[str]]:
    """Fields of a config that are dataclasses themselves -> names of their fields."""
    hints = typing.get_type_hints(config)
    return {field.name: {inner.name for inner in dataclasses.fields(hints[field.name])}
            for field in dataclasses.fields(config) if dataclasses.is_dataclass(hints[field.name])}


def _as_flags(key: str, value: Any) -> list[str]:
    name = key.replace("_", "-")
    if isinstance(value, bool):
        return [f"--{name}" if value else f"--no-{name}"]
    if isinstance(value, list):
        return [f"--{name}", *map(str, value)]
    if isinstance(value, dict):
        return [f"--{name}", *(str(word) for pair in value.items() for word in pair)]
    return [f"--{name}={value}"]  # one word: the value itself may begin with a dash


def save_config(config: Any, folder: Path, name: str = "config.resolved.json") -> None:
    """Write the resolved config beside an artefact, paths as text."""
    write_text_atomic(folder / name, json.dumps(plain_config(config), indent=1, sort_keys=True) + "\n")


def plain_config(config: Any) -> dict[str, Any]:
    """A config as JSON gives it back: tuples as lists, paths as text."""
    plain: dict[str, Any] = json.loads(json.dumps(to_plain(config), default=str))
    return plain


def run_command(main: Callable[[], int | None]) -> int:
    """Run a command's body; an EyasError ends it with its four facts on stderr and exit code 1, Ctrl-C with 130, a
    reader that closed the pipe (`| head`) quietly with 141."""
    try:
        code = main() or 0
        sys.stdout.flush()
        return code
    except EyasError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201 - the command's output
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)  # noqa: T201
        return 130
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter complains at its end
        return 141


class Progress:
    """Rate, ETA and the number that matters: one line rewritten on a terminal, else a line every few seconds.

    Args:
        total: units in all, 0 where unknown.
        unit: what is counted, e.g. `tokens`.
        label: name of the work.
        already: units done before this run (resume); they count for the share, not for the rate.
    """

    def __init__(self, total: int, unit: str, label: str, *, already: int = 0, every: float = 5.0,
                 stream: TextIO | None = None) -> None:
        self.total, self.unit, self.label, self.done, self.already = total, unit, label, already, already
        self.stream = stream or sys.stderr
        self.every = 0.2 if self.stream.isatty() else every
        self.start = time.monotonic()
        self.last = self.start

    def update(self, amount: int, note: str = "") -> None:
        """Count `amount` more units; `note` is the number that matters now, e.g. `loss 2.31`."""
        self.done += amount
        now = time.monotonic()
        if now - self.last >= self.every:
            self.last = now
            self._write(self.line(now - self.start, note))

    def close(self, note: str = "") -> None:
        """Write the last line."""
        self._write(self.line(time.monotonic() - self.start, note))
        if self.stream.isatty():
            self.stream.write("\n")

    def line(self, seconds: float, note: str = "") -> str:
        """The text: label, share, amount, rate, ETA, note."""
        rate = (self.done - self.already) / seconds if seconds > 0 else 0.0
        parts = [f"{self.label}:"]
        if self.total:
            parts.append(f"{100 * self.done / self.total:3.0f} %")
        parts.append(f"{self.done:,}" + (f"/{self.total:,}" if self.total else "") + f" {self.unit}")
        parts.append(f"{rate:,.1f}/s" if rate < 100 else f"{rate:,.0f}/s")
        if self.total and rate > 0:
            parts.append(f"ETA {duration((self.total - self.done) / rate)}")
        return "  ".join(parts) + (f"  {note}" if note else "")

    def _write(self, text: str) -> None:
        self.stream.write(f"\r\x1b[2K{text}" if self.stream.isatty() else f"{text}\n")
        self.stream.flush()


def duration(seconds: float) -> str:
    """`75` -> `1:15`, `4000` -> `1:06:40`."""
    whole = max(0, round(seconds))
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
