"""The target's weight files: all there, whole, and holding what their index and the config say.

Engines find out minutes into the load, or not at all. SGLang 0.5.20 stops at an absent shard and at a cut one; in place
of a tensor that is not where the index says, or of a layer that only the config has, it serves whatever memory held,
without a word. 0.5.16 does so for an absent shard, too (`filter_duplicate_safetensors_files`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from eyas_contract.checkpoint_files import has_weights, served
from eyas_contract.engines.checks.case import Case
from eyas_contract.engines.findings import Finding
from eyas_contract.engines.sglang_targets import HOOKS
from eyas_contract.errors import CorruptFile, InvalidInput
from eyas_contract.safetensors_header import read_header

_SHOWN = 5  # names a finding lists
_LAYER = re.compile(r"(.*?)\blayers\.(\d+)\.")
_COUNTED_OTHERWISE = ("LongcatFlashForCausalLM",)  # its config counts each layer's two attentions


def check_target_files(case: Case) -> list[Finding]:
    """From sizes and headers; nothing for a target without weights, and of files by torch.save their presence only."""
    if not has_weights(case.target):
        return []
    try:
        files, index = served(case.target)
    except InvalidInput as error:
        return [_finding(f"target: {Path(error.where).name}", error.found, error.wanted, error.remedy)]
    result, held = [], dict[str, set[str]]()
    for file in files:
        if file.suffix == ".safetensors":
            try:
                held[file.name] = set(read_header(file).tensors)
            except CorruptFile as error:
                result.append(_finding(f"target: {file.name}", error.found, error.wanted, error.remedy))
    if not result and case.spec.architecture in HOOKS and case.spec.architecture not in _COUNTED_OTHERWISE:
        result += _layers(case.spec.num_layers, (name for names in held.values() for name in names))
    lost = [f"{name} in {file}" for name, file in index.items()
            if file in held and name not in held[file] and not _made_by_engines(name, case)]
    if lost:
        result.append(_finding("target: weights", f"{len(lost)} of {len(index)} tensors are not where the index "
                               f"places them: {', '.join(sorted(lost)[:_SHOWN])}",
                               "each tensor in its file, by the Hugging Face format",
                               "Fetch the index and its shards again, from one version of the model."))
    return result


def _made_by_engines(name: str, case: Case) -> bool:
    """Tables of rope, and a head that is the embedding."""
    return "rotary_emb." in name or (case.spec.tie_word_embeddings and name.endswith("lm_head.weight"))


def _layers(wanted: int, names: Iterable[str]) -> list[Finding]:
    """Layers of the config of which no file has a tensor; nothing where the names show no layers."""
    towers: dict[str, set[int]] = {}
    for name in names:
        if match := _LAYER.match(name):
            towers.setdefault(match[1], set()).add(int(match[2]))
    absent = min((set(range(wanted)) - layers for layers in towers.values()), key=len, default=set())
    if not absent:
        return []
    return [_finding("target: config.json", f"num_hidden_layers {wanted}, no tensor of {len(absent)} of these: "
                     f"{', '.join(map(str, sorted(absent)[:_SHOWN]))}", "weights of every layer that the config has",
                     "Restore the config of these weights, or fetch the others.")]


def _finding(where: str, found: str, wanted: str, remedy: str) -> Finding:
    return Finding("target-files", "error", where, found, wanted,
                   "the server stops in the midst of the load, or serves random weights in place of the absent ones",
                   remedy)
