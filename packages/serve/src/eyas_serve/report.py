"""Findings as a command shows them: text or JSON, and the exit code."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from eyas_contract.engines import Finding, render, verdict

PASSED, FAILED, NOT_CHECKED = 0, 1, 2


@dataclass(frozen=True)
class Report:
    """Findings with the engine they are for."""

    engine: str
    findings: list[Finding]

    def code(self) -> int:
        """Exit code: 0 pass or warn, 1 fail."""
        return FAILED if verdict(self.findings) == "fail" else PASSED

    def text(self, as_json: bool) -> str:
        """One JSON object, or text with the verdict first and the most severe finding next."""
        if as_json:
            return json.dumps({"verdict": verdict(self.findings), "engine": self.engine,
                               "findings": [asdict(finding) for finding in self.findings]}, indent=1)
        counts = {name: sum(f.severity == name for f in self.findings) for name in ("error", "warning", "note")}
        head = f"{verdict(self.findings)} for {self.engine}: " + ", ".join(
            f"{count} {name}{'s' if count != 1 else ''}" for name, count in counts.items())
        return "\n".join([head, *([render(self.findings)] if self.findings else [])])
