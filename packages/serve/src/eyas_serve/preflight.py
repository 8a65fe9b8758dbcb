"""`eyas-serve preflight` and `eyas-serve read-log`: a verdict in seconds, before a target is loaded."""

from __future__ import annotations

from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed_version
from pathlib import Path
from typing import Annotated, Literal

import tyro

from eyas_contract.engines import Finding, ServerFlags, check
from eyas_contract.engines.logs import check_log
from eyas_contract.errors import InvalidInput
from eyas_serve.report import Report


@dataclass(frozen=True)
class PreflightConfig:
    """Check any draft against any target and engine, from configs and headers, before anything is loaded."""

    draft: tyro.conf.Positional[Path]
    """The draft's folder."""
    target: Path
    """The target's folder."""
    engine: Literal["sglang", "vllm"] = "sglang"
    """The serving engine."""
    engine_version: str | None = None
    """Its version; without it the one installed beside eyas-serve, else the answer for every known version."""
    gpu: str = ""
    """Name of the GPU, e.g. "RTX PRO 6000": checks memory and attention backends."""
    tp: int = 1
    """GPUs that share the models (tensor parallel)."""
    training_record: Path | None = None
    """Another tool's record of training (JSON); by default train_meta.json in or beside the draft."""
    launch: Path | None = None
    """File with the launch command, whose flags are taken over; flags given here win."""
    log: Path | None = None
    """A server's log to read as well."""
    server: Annotated[ServerFlags, tyro.conf.OmitArgPrefixes] = field(default_factory=ServerFlags)
    """Launch flags of the server, by its own names."""


@dataclass(frozen=True)
class ReadLogConfig:
    """Say what a server's log shows about its draft."""

    log: tyro.conf.Positional[Path]
    """The log file."""


def preflight(config: PreflightConfig) -> Report:
    """Run all checks.

    Raises:
        InvalidInput, CorruptFile: a folder, flag or version that cannot be read (exit code 2).
    """
    flags = config.server
    if config.launch is not None:
        flags = flags.over(ServerFlags.from_command(_read(config.launch)))
    version = config.engine_version or _installed(config.engine)
    findings = check(config.draft, config.target, config.engine, version, flags=flags, gpu=config.gpu, tp=config.tp,
                     record=config.training_record)
    if config.log is not None:
        findings = sorted([*findings, *read_log(config.log)],
                          key=lambda f: ("error", "warning", "note").index(f.severity))
    return Report(f"{config.engine} {version or '(version not given)'}", findings)


def read_log(path: Path) -> list[Finding]:
    """Findings of a server's log. Raises InvalidInput where there is no such file."""
    if not path.is_file():
        raise InvalidInput(str(path), "no such file", "a server's log", "Check the path.")
    with path.open(encoding="utf-8", errors="replace") as lines:
        return check_log(lines)


def _installed(engine: str) -> str | None:
    try:
        return installed_version(engine)
    except PackageNotFoundError:
        return None


def _read(path: Path) -> str:
    if not path.is_file() or path.stat().st_size > 1_000_000:
        raise InvalidInput(str(path), "no such file, or too large", "a launch command", "Check --launch.")
    return path.read_text(encoding="utf-8", errors="replace")
