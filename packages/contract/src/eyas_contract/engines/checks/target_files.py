"""The target's weight files: all there, whole, and holding what their index says.

Engines find out minutes into the load, or not at all. SGLang 0.5.20 stops at an absent shard and at a cut one; in place
of a tensor that is not where the index says it serves whatever memory held, without a word. 0.5.16 does so for an
absent shard, too (`filter_duplicate_safetensors_files`).
"""

from __future__ import annotations

from pathlib import Path

from eyas_contract.checkpoint_files import has_weights, served_files, weight_map
from eyas_contract.engines.checks.case import Case
from eyas_contract.engines.findings import Finding
from eyas_contract.errors import CorruptFile, InvalidInput
from eyas_contract.safetensors_header import read_header

_SHOWN = 5  # names a finding lists


def check_target_files(case: Case) -> list[Finding]:
    """From sizes and headers; nothing for a target without weights, and of files by torch.save their presence only."""
    if not has_weights(case.target):
        return []
    try:
        files, mapping = served_files(case.target), weight_map(case.target)
    except InvalidInput as error:
        return [_finding(f"target: {Path(error.where).name}", error.found, error.wanted, error.remedy)]
    result, held = [], dict[str, set[str]]()
    for file in files:
        if file.suffix == ".safetensors":
            try:
                held[file.name] = set(read_header(file).tensors)
            except CorruptFile as error:
                result.append(_finding(f"target: {file.name}", error.found, error.wanted, error.remedy))
    lost = [f"{name} in {file}" for name, file in mapping.items() if file in held and name not in held[file]]
    if lost:
        result.append(_finding("target: weights", f"{len(lost)} of {len(mapping)} tensors are not where the index "
                               f"places them: {', '.join(sorted(lost)[:_SHOWN])}",
                               "each tensor in its file, by the Hugging Face format",
                               "Fetch the index and its shards again, from one version of the model."))
    return result


def _finding(where: str, found: str, wanted: str, remedy: str) -> Finding:
    return Finding("target-files", "error", where, found, wanted,
                   "the server stops in the midst of the load, or serves random weights in place of the absent ones",
                   remedy)
