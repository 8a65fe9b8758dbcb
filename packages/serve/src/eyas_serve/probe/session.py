"""One probe of a running server: the golden tokens through it, and what its draft made of them. No torch."""

from __future__ import annotations

import json
import math
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from eyas_contract import EngineFailure, InvalidInput
from eyas_contract.engines.findings import most_severe_first
from eyas_contract.golden import GoldenRecord, load_golden
from eyas_serve.client import Client
from eyas_serve.probe.compare import StageResult, compare
from eyas_serve.probe.faults import find_faults, same_proposals
from eyas_serve.probe.protocol import ROUTE, VERSION, new_id
from eyas_serve.probe.record import Record, read_record
from eyas_serve.report import Report

API_KEY = "EYAS_API_KEY"
NEW_TOKENS = 4


@dataclass(frozen=True)
class ProbeReport(Report):
    """Findings, the table they come from, and at how many positions the first proposal is the trained one."""

    stages: tuple[StageResult, ...] = ()
    same: tuple[int, int] = (0, 0)

    def text(self, as_json: bool) -> str:
        """One JSON object, or the table and the findings."""
        if as_json:
            plain = json.loads(super().text(True))
            return json.dumps(plain | {"stages": [_plain(stage) for stage in self.stages],
                                       "proposals": {"same": self.same[0], "of": self.same[1]}}, indent=1)
        proposed = f"first proposal, as target id: the trained one at {self.same[0]} of {self.same[1]} positions"
        return "\n".join([*table(self.stages), proposed, "", super().text(False)])


def probe_client(client: Client, draft: Path | None) -> ProbeReport:
    """Probe the server of a client; see `probe`."""
    about = _require_probe(client)
    golden = load_golden(draft or _draft_of(client))
    with tempfile.TemporaryDirectory(prefix="eyas-probe-") as folder:
        record, next_token = _ask(client, golden, Path(folder))
        stages = compare(record, golden)
        findings = find_faults(record, golden, stages, next_token)
        same = same_proposals(record, golden)
    engine = f"SGLang {about.get('sglang')} at {client.url}, {record.facts.get('draft_class')} in " \
             f"{record.facts.get('dtype')}, guard {about.get('guard')}"
    return ProbeReport(engine, most_severe_first(findings), tuple(stages), same)


def _require_probe(client: Client) -> dict[str, Any]:
    status, content = client.get(ROUTE)
    if status in (401, 403):
        raise EngineFailure(client.url, f"HTTP {status}", "leave to ask", f"Set {API_KEY} to the server's API key.")
    try:
        about = json.loads(content) if status == 200 else None
    except ValueError:
        about = None
    if not isinstance(about, dict) or about.get("protocol") != VERSION:
        raise EngineFailure(client.url, f"HTTP {status} for {ROUTE}", f"a server with eyas's probe, protocol {VERSION}",
                            "Start it with eyas-serve launch, or install eyas-serve beside SGLang and start it with "
                            "EYAS_GUARD=report; several tokenizer workers or a router in between do not pass it on.")
    return about


def _draft_of(client: Client) -> Path:
    path = Path(str(client.info().get("speculative_draft_model_path") or ""))
    if not path.is_dir():
        raise InvalidInput("--draft", f"not given, and the server's draft {path} is not a folder here",
                           "a folder with a golden record", "Name one with --draft.")
    return path


def _ask(client: Client, golden: GoldenRecord, folder: Path) -> tuple[Record, int | None]:
    """Send the tokens, fetch the record. Returns it and the server's first new token."""
    rid, tokens = new_id(), list(golden.golden.input_ids)
    answer = client.generate(tokens, NEW_TOKENS, ignore_eos=True, rid=rid, extra_key=rid)
    status, content = client.get(f"{ROUTE}/{rid}")
    if status != 200:
        raise EngineFailure(client.url, f"HTTP {status}: no record of the request", "the draft's prefill, recorded",
                            "Is speculation on? With several nodes, ask the first one's server.")
    path = folder / "record.safetensors"
    path.write_bytes(content)
    return read_record(path, len(tokens)), answer.output_ids[0] if answer.output_ids else None


def table(stages: tuple[StageResult, ...]) -> list[str]:
    """The stages as aligned lines: shape, dtype, mean and std of the server's values, the golden ones, the distance."""
    head = ("stage", "shape", "dtype", "mean", "std", "golden mean", "std", "cosine", "error", "verdict")
    rows = [head]
    for stage in stages:
        golden, apart = stage.golden, stage.distance
        rows.append((stage.name, str(list(stage.shape)) if stage.shape else "-", stage.dtype or "-",
                     _number(stage.mean), _number(stage.std), _number(golden[1] if golden else None),
                     _number(golden[2] if golden else None), f"{apart.cosine:.4f}" if apart else "-",
                     f"{apart.error:.1e}" if apart else "-", stage.verdict))
    widths = [max(len(row[i]) for row in rows) for i in range(len(head))]
    return ["  ".join(cell.ljust(width) if i in (0, 1, 2, 9) else cell.rjust(width)
                      for i, (cell, width) in enumerate(zip(row, widths, strict=True))).rstrip() for row in rows]


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.4g}"


def _plain(stage: StageResult) -> dict[str, Any]:
    """For JSON, which has no NaN and no infinity."""
    def clean(value: Any) -> Any:
        if isinstance(value, float) and not math.isfinite(value):
            return str(value)
        if isinstance(value, dict):
            return {key: clean(item) for key, item in value.items()}
        return [clean(item) for item in value] if isinstance(value, list | tuple) else value

    plain: dict[str, Any] = clean(asdict(stage))
    golden = plain.pop("golden")
    return plain | {"golden": dict(zip(("shape", "mean", "std"), golden, strict=True)) if golden else None}

