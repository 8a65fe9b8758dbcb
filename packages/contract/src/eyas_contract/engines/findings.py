"""Findings: what a check saw, in one shape for people and machines."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from eyas_contract.errors import printable

Severity = Literal["error", "warning", "note"]
_ORDER: dict[Severity, int] = {"error": 0, "warning": 1, "note": 2}


@dataclass(frozen=True)
class Finding:
    """One fact about a draft in an engine.

    Attributes:
        code: stable identifier, e.g. `tensor-dropped`.
        severity: `error` (will not work), `warning` (may not), `note` (worth knowing).
        where: file, key or flag.
        found, wanted: both sides.
        consequence: what serving would do with it.
        remedy: what to do.
    """

    code: str
    severity: Severity
    where: str
    found: str
    wanted: str
    consequence: str
    remedy: str


def verdict(findings: Iterable[Finding]) -> Literal["pass", "warn", "fail"]:
    """`fail` with any error, `warn` with any warning, else `pass`."""
    severities = {finding.severity for finding in findings}
    return "fail" if "error" in severities else "warn" if "warning" in severities else "pass"


def most_severe_first(findings: Iterable[Finding]) -> list[Finding]:
    """Errors, then warnings, then notes; stable within each."""
    return sorted(findings, key=lambda finding: _ORDER[finding.severity])


def render(findings: Iterable[Finding]) -> str:
    """Plain text for a terminal, most severe first."""
    lines = []
    for f in most_severe_first(findings):
        lines += [f"{f.severity.upper()} {f.code}: {f.where}",
                  f"  found:  {f.found}", f"  wanted: {f.wanted}",
                  f"  then:   {f.consequence}", f"  do:     {f.remedy}"]
    return printable("\n".join(lines))
