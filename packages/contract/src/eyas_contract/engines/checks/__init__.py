"""`check`: everything that would go wrong when an engine serves a draft, from configs and headers, in seconds.

One room per subject; each takes the Case and returns findings. `check` answers for one known version, or, where the
version is not known, for every known one, and says where the answers differ.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

from eyas_contract.engines import sglang, vllm
from eyas_contract.engines.checks.aux_layers import check_aux_layers
from eyas_contract.engines.checks.capacity import check_capacity
from eyas_contract.engines.checks.case import Case, read_case
from eyas_contract.engines.checks.config import architecture_of, check_class, check_config
from eyas_contract.engines.checks.head import check_head
from eyas_contract.engines.checks.norms import check_norms
from eyas_contract.engines.checks.placing import place
from eyas_contract.engines.checks.rope import check_rope
from eyas_contract.engines.checks.serving import check_serving
from eyas_contract.engines.checks.target_files import check_target_files
from eyas_contract.engines.checks.tensors import check_tensors
from eyas_contract.engines.checks.training import check_training
from eyas_contract.engines.checks.values import check_values
from eyas_contract.engines.checks.vocab_map import check_vocab_map
from eyas_contract.engines.findings import Finding, Severity, most_severe_first, verdict
from eyas_contract.engines.flags import ServerFlags
from eyas_contract.engines.hardware import find_gpu
from eyas_contract.engines.loaders import Version, draft_kind, loader
from eyas_contract.errors import InvalidInput

ENGINES = {"sglang": sglang.KNOWN, "vllm": vllm.KNOWN}


def check(draft: str | Path, target: str | Path, engine: str = "sglang", version: str | None = "0.5.20",
          algorithm: str | None = None, *, flags: ServerFlags | None = None, gpu: str = "", tp: int = 1,
          record: Path | None = None) -> list[Finding]:
    """Everything that would go wrong when `engine` serves `draft` for `target`, most severe first.

    Args:
        draft, target: Hugging Face folders.
        engine: `sglang` or `vllm`.
        version: the engine's version; None or one that is not known answers for every known version.
        algorithm: value of `--speculative-algorithm` (default EAGLE3).
        flags: further launch flags.
        gpu, tp: name of the GPU (memory, backends), and how many share the models.
        record: another tool's training record (JSON); by default `train_meta.json` in or beside the draft.

    Raises:
        InvalidInput, CorruptFile: a folder that cannot be read at all.
    """
    if engine not in ENGINES:
        raise InvalidInput("engine", repr(engine), f"one of {sorted(ENGINES)}, by eyas-contract",
                           "Name a supported engine.")
    flags = flags or ServerFlags()
    if algorithm is not None:
        flags = dataclasses.replace(flags, speculative_algorithm=algorithm)
    tp = max(tp, flags.tp_size or 1)
    case = dataclasses.replace(read_case(Path(draft), Path(target), engine, record), flags=flags, gpu_name=gpu,
                               gpu=find_gpu(gpu) if gpu else None, tp=tp)
    parsed = sglang.parse_version(version) if version is not None else None
    alike = check_values(case) + check_target_files(case)  # in every version
    if parsed in ENGINES[engine]:
        return most_severe_first(_rooms(case, parsed) + alike)
    return most_severe_first(_every_version(case, version) + alike)


def _rooms(case: Case, version: Version) -> list[Finding]:
    kind = draft_kind(case.engine, architecture_of(case.config))
    opened = loader(case.engine, version, kind) if kind else None
    case = case.at(version, opened)
    result = check_class(case) + check_config(case)
    if any(finding.code in ("config-keys", "config-value") for finding in result):
        return result + check_training(case)
    readable = opened or loader(case.engine, version, "llama")
    if readable is not None and case.tensors and kind is not None and opened is not None:
        placed = place(case, opened)
        result += check_tensors(case, opened, placed) + check_head(case, opened, placed)
        result += check_vocab_map(case, opened)
    if opened is not None:
        result += check_norms(case, opened)
    return result + check_aux_layers(case) + check_rope(case) + check_serving(case) + check_capacity(case) \
        + check_training(case)


def _every_version(case: Case, asked: str | None) -> list[Finding]:
    """The answer per range of known versions that agree, and a finding that says so."""
    versions = ENGINES[case.engine]
    answers = [_rooms(case, version) for version in versions]
    ranges: list[tuple[Version, Version, list[Finding]]] = []
    for version, findings in zip(versions, answers, strict=True):
        if ranges and _codes(ranges[-1][2]) == _codes(findings):
            ranges[-1] = (ranges[-1][0], version, findings)
        else:
            ranges.append((version, version, findings))
    verdicts = {verdict(findings) for _, _, findings in ranges}
    parts = [f"{_span(first, last)}: {verdict(findings)}"
             + (f" ({', '.join(bad)})" if (bad := sorted({f.code for f in findings if f.severity == 'error'})) else "")
             for first, last, findings in ranges]
    known = _span(versions[0], versions[-1])
    severity: Severity = "warning" if asked is not None or len(verdicts) > 1 else "note"
    summary = Finding("engine-version-unknown", severity, "--engine-version", asked or "not given",
                      f"one of {case.engine} {known}",
                      f"the answer {'depends on it' if len(verdicts) > 1 else 'is the same in every known version'}: "
                      + "; ".join(parts), "Give the version of the installed engine.")
    return [summary, *_merged(ranges)]


def _merged(ranges: list[tuple[Version, Version, list[Finding]]]) -> list[Finding]:
    """Findings of all ranges, once each; an error of some versions only becomes a warning that names them."""
    spans: dict[tuple[str, str], list[str]] = {}
    first_seen: dict[tuple[str, str], Finding] = {}
    for first, last, findings in ranges:
        for finding in findings:
            key = (finding.code, finding.where)
            spans.setdefault(key, [])
            if _span(first, last) not in spans[key]:
                spans[key].append(_span(first, last))
            kept = first_seen.get(key)
            if kept is None or (kept.severity != "error" and finding.severity == "error"):
                first_seen[key] = finding
    result = []
    for key, finding in first_seen.items():
        if len(spans[key]) < len(ranges):
            severity: Severity = "warning" if finding.severity == "error" else finding.severity
            finding = dataclasses.replace(finding, severity=severity,
                                          where=f"{finding.where} (in {', '.join(spans[key])})")
        result.append(finding)
    return result


def _codes(findings: list[Finding]) -> list[tuple[str, str, str]]:
    return sorted((f.code, f.severity, f.where) for f in findings)


def _span(first: Version, last: Version) -> str:
    a, b = sglang.version_text(first), sglang.version_text(last)
    return a if a == b else f"{a} to {b}"
