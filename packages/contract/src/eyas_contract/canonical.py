"""Frozen dataclasses of plain values <-> canonical JSON, and digests of it.

Canonical: keys sorted, no spaces, ASCII, tuples as lists. Equal values give equal bytes on every platform.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import types
import typing
from typing import Any, TypeVar

from eyas_contract.errors import InvalidInput

T = TypeVar("T")
_SCALARS = (str, int, float, bool)
LATER: dict[str, bool] = {"later": True}
"""Metadata of a field that joined a frozen schema: left out at its default, so that older values keep their digest."""


def to_plain(value: Any) -> Any:
    """Dataclasses to dicts and tuples to lists, recursively."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)
                if not (f.metadata.get("later") and getattr(value, f.name) == f.default)}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    return value


def dumps(value: Any) -> str:
    """Canonical JSON text of a dataclass or plain value."""
    return json.dumps(to_plain(value), sort_keys=True, separators=(",", ":"), allow_nan=False)


def digest(value: Any) -> str:
    """SHA-256 (hex) of the canonical JSON."""
    return hashlib.sha256(dumps(value).encode("ascii")).hexdigest()


def from_plain(cls: type[T], plain: Any, where: str) -> T:
    """Build the dataclass `cls` from parsed JSON, refusing unknown, missing and ill-typed fields.

    Raises:
        InvalidInput: with every fault found, each with its dotted path.
    """
    faults: list[str] = []
    value = _build(cls, plain, where, faults)
    if faults:
        raise InvalidInput(where, "; ".join(faults), f"the fields of {cls.__name__}, by eyas-contract",
                           "Write this file with eyas, or correct the named fields.")
    return typing.cast(T, value)


def _build(kind: Any, plain: Any, path: str, faults: list[str]) -> Any:
    if type(plain) is kind and kind in _SCALARS:  # a manifest has hundreds of thousands of them
        return plain
    origin = typing.get_origin(kind)
    if origin in (typing.Union, types.UnionType):
        options = [k for k in typing.get_args(kind) if k is not type(None)]
        if plain is None and len(options) < len(typing.get_args(kind)):
            return None
        for option in options:
            attempt: list[str] = []
            built = _build(option, plain, path, attempt)
            if not attempt:
                return built
        faults.extend(attempt)
        return None
    if dataclasses.is_dataclass(kind):
        return _build_dataclass(kind, plain, path, faults)
    if origin is tuple:
        return _build_tuple(kind, plain, path, faults)
    if origin is typing.Literal:
        if plain not in typing.get_args(kind):
            faults.append(f"{path} is {plain!r}, not one of {list(typing.get_args(kind))}")
        return plain
    if kind is float and isinstance(plain, int) and not isinstance(plain, bool):
        try:
            return float(plain)
        except OverflowError:
            faults.append(f"{path} is a whole number beyond every float")
            return 0.0
    if not isinstance(plain, kind) or (kind in (int, float) and isinstance(plain, bool)):
        faults.append(f"{path} is {type(plain).__name__}, not {kind.__name__}")
    return plain


def _build_dataclass(kind: Any, plain: Any, path: str, faults: list[str]) -> Any:
    if not isinstance(plain, dict):
        faults.append(f"{path} is {type(plain).__name__}, not an object")
        return None
    fields = _fields(kind)
    faults += [f"{path}.{name} is unknown" for name in sorted(plain.keys() - fields.keys())]
    before, values = len(faults), {}
    for name, (hint, optional) in fields.items():
        if name in plain:
            values[name] = _build(hint, plain[name], f"{path}.{name}", faults)
        elif not optional:
            faults.append(f"{path}.{name} is missing")
    if len(faults) > before:
        return None
    try:
        return kind(**values)
    except ValueError as error:
        faults.append(f"{path}: {error}")
        return None


@functools.cache
def _fields(kind: Any) -> dict[str, tuple[Any, bool]]:
    """Name -> type and whether it has a default, of a dataclass."""
    hints = typing.get_type_hints(kind)
    return {f.name: (hints[f.name], f.default is not dataclasses.MISSING
                     or f.default_factory is not dataclasses.MISSING) for f in dataclasses.fields(kind)}


def _build_tuple(kind: Any, plain: Any, path: str, faults: list[str]) -> Any:
    if not isinstance(plain, list):
        faults.append(f"{path} is {type(plain).__name__}, not a list")
        return ()
    args = typing.get_args(kind)
    if len(args) == 2 and args[1] is Ellipsis:
        return tuple(_build(args[0], item, f"{path}[{i}]", faults) for i, item in enumerate(plain))
    if len(args) != len(plain):
        faults.append(f"{path} has {len(plain)} items, not {len(args)}")
        return ()
    return tuple(_build(arg, item, f"{path}[{i}]", faults)
                 for i, (arg, item) in enumerate(zip(args, plain, strict=True)))
