"""Judges a folder of another tool's hidden states, one safetensors file a sample, before anyone trains on them.

Headers, tokens and values of every file, all faults at once; and on the first whole file a proof of which side of the
final norm the last state was taken, for shapes do not tell.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch

from eyas_contract import CorruptFile, InvalidInput, TargetSpec
from eyas_contract.engines import Finding
from eyas_contract.safetensors_header import TensorInfo, read_header
from eyas_contract.target_tensors import TargetTensors
from eyas_extract.check import read_tensor
from eyas_extract.dtypes import STORE_DTYPES

IDS, AUX, LAST = "input_ids", "aux_hidden_states", "last_hidden_state"
AGREES = 0.9  # share of rows in which the head must choose the teacher's token


@dataclass(frozen=True)
class LooseReport:
    """What was found.

    Attributes:
        files: all, `bad`: those with an error.
        last_state: `pre_norm`, `post_norm`, `neither`, or `not checked`.
        findings: every fault, by file.
    """

    files: int
    bad: tuple[str, ...]
    last_state: str
    findings: tuple[Finding, ...]


@dataclass(frozen=True)
class _Usual:
    """What most files of the folder have: dtype and width of the aux states."""

    dtype: str
    width: int


def check_files(folder: Path, target: Path, prompts: Path | None, teacher: Path | None) -> LooseReport:
    """Check every `*.safetensors` of a folder.

    Args:
        folder: files with `input_ids` [T], `aux_hidden_states` [T, K*H], `last_hidden_state` [T, H].
        target: its folder; config, and for the norm's proof also final norm and head.
        prompts: JSON, sample number -> token ids that its `input_ids` must begin with.
        teacher: JSON, `{"top1": [...]}`: the target's own next tokens in the first file; else the first file's tokens.

    Raises:
        InvalidInput: no such folder, no files, or unreadable prompts, teacher or target.
    """
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        raise InvalidInput(str(folder), "no *.safetensors files", "hidden states, one file a sample", "Check the path.")
    spec = TargetSpec.from_folder(target)
    wanted = _prompts(prompts) if prompts is not None else None
    chosen = _top1(teacher) if teacher is not None else None
    findings: list[Finding] = []
    headers: dict[Path, dict[str, TensorInfo]] = {}
    for path in paths:
        try:
            headers[path] = read_header(path).tensors
        except (CorruptFile, OSError) as error:
            found = error.found if isinstance(error, CorruptFile) else error.strerror or str(error)
            findings.append(_bad("states-file", path, "", found, "a whole file",
                                 "a memory-mapping loader may read the missing part as zeros", "Extract it again."))
    usual = _usual(headers, spec)
    for path, tensors in headers.items():
        findings += _file(path, tensors, usual, spec, wanted)
    bad = tuple(sorted({finding.where.split(":")[0] for finding in findings if finding.severity == "error"}))
    first = next((path for path in headers if path.name not in bad), None)
    state, proof = _norm(first, headers[first], target, spec, chosen) if first else ("not checked", [])
    return LooseReport(len(paths), bad, state, tuple(findings + proof))


def _usual(headers: dict[Path, dict[str, TensorInfo]], spec: TargetSpec) -> _Usual:
    aux = [info for tensors in headers.values() if (info := tensors.get(AUX)) and len(info.shape) == 2
           and info.dtype in STORE_DTYPES]
    dtypes, widths = Counter(info.dtype for info in aux), Counter(info.shape[1] for info in aux)
    return _Usual(dtypes.most_common(1)[0][0] if dtypes else "BF16",
                  widths.most_common(1)[0][0] if widths else 3 * spec.hidden_size)


def _file(path: Path, tensors: dict[str, TensorInfo], usual: _Usual, spec: TargetSpec, prompts: Any) -> list[Finding]:
    absent = [name for name in (IDS, AUX, LAST) if name not in tensors]
    if absent:
        return [_bad("states-file", path, "", f"no {', '.join(absent)}", f"{IDS}, {AUX}, {LAST}",
                     "nothing to train on", "Extract it again.")]
    faults, aux = _form(path, tensors), tensors[AUX]
    if faults:  # no rows to be counted, or values that nobody here can read
        return faults
    tokens = tensors[IDS].shape[0]
    for name in (AUX, LAST):
        rows = tensors[name].shape[0]
        if rows != tokens:
            what = f"{tokens - rows} rows missing at the front; was a prefix cache on?" if rows < tokens else \
                f"{rows - tokens} rows too many"
            faults.append(_bad("states-rows", path, name, f"{rows} rows for {tokens} tokens: {what}", f"{tokens} rows",
                               "states belong to other tokens",
                               "Extract it again with the prefix cache switched off. Do not pad."))
    if tensors[LAST].shape[1] != spec.hidden_size:
        faults.append(_bad("states-width", path, LAST, f"{list(tensors[LAST].shape)}", f"{spec.hidden_size} wide, as "
                           "the target's states are", "the head does not fit", "Extract it again with this target."))
    if aux.shape[1] != usual.width:
        count, usually = aux.shape[-1] // spec.hidden_size, usual.width // spec.hidden_size
        faults.append(_bad("states-width", path, AUX, f"{list(aux.shape)}: {count} states of {spec.hidden_size}",
                           f"{usually} states, as in the other files", "`fc` does not fit",
                           "Extract it again with all layers."))
    if aux.dtype != usual.dtype:
        faults.append(_bad("states-dtype", path, AUX, aux.dtype, f"{usual.dtype}, as in the other files",
                           "a training run stops when it meets this file", f"Convert it to {usual.dtype}."))
    faults += _tokens(path, tensors[IDS], prompts) if prompts is not None else []
    return faults + _values(path, tensors, spec.hidden_size)


def _form(path: Path, tensors: dict[str, TensorInfo]) -> list[Finding]:
    """Axes and dtypes that no reader of such files takes."""
    faults = []
    for name, axes, dtypes in ((IDS, 1, ("I64", "I32")), (AUX, 2, tuple(STORE_DTYPES)), (LAST, 2, tuple(STORE_DTYPES))):
        info = tensors[name]
        if len(info.shape) != axes:
            faults.append(_bad("states-file", path, name, f"shape {list(info.shape)}", f"{axes} axes, tokens first",
                               "its rows cannot be told", "Store one sample a file, without a batch axis."))
        if info.dtype not in dtypes:
            faults.append(_bad("states-dtype", path, name, info.dtype, " or ".join(dtypes),
                               "a training run stops when it meets this file", f"Convert it to {dtypes[0]}."))
    return faults


def _tokens(path: Path, info: TensorInfo, prompts: dict[str, list[int]]) -> list[Finding]:
    number = re.findall(r"\d+", path.stem)
    ids = read_tensor(info).tolist()
    prompt = prompts.get(str(int(number[-1]))) if number else None
    if prompt is None or ids[:len(prompt)] == prompt:
        return []
    owner = next((key for key, other in prompts.items() if ids[:len(other)] == other), "")
    return [_bad("states-tokens", path, IDS, "its tokens are not those of its prompt" + (
        f": they are those of prompt {owner}" if owner else ""), f"the tokens of prompt {int(number[-1])}",
        "right shapes, another request's content", "Extract it again; check how the extractor splits batches.")]


def _values(path: Path, tensors: dict[str, TensorInfo], hidden: int) -> list[Finding]:
    result = []
    for name in (AUX, LAST):
        values = read_tensor(tensors[name]).float()
        bad = (~torch.isfinite(values)).nonzero().tolist()
        if bad:
            places = ", ".join(f"row {row} index {column} (state {column // hidden})" for row, column in bad[:6])
            kinds = f"{int(values.isnan().sum())} NaN, {int(values.isinf().sum())} infinite"
            result.append(_bad("states-nonfinite", path, name, f"{kinds}: {places}", "finite values",
                               "one such row spoils every weight", "Leave the file out, or extract it again."))
        elif not values.any():
            result.append(_bad("states-zero", path, name, "all zero", "states of the target",
                               "a stand-in, or a file that was never written", "Leave the file out."))
    return result


def _norm(path: Path, tensors: dict[str, TensorInfo], target: Path, spec: TargetSpec,
          teacher: list[int] | None) -> tuple[str, list[Finding]]:
    """Whether head(norm(h)) or head(h) chooses the target's own tokens."""
    if not any(target.glob("*.safetensors")):
        return "not checked", []
    weights = TargetTensors(target, spec)
    try:
        norm, head = weights.norm(), weights.head()
    except InvalidInput:  # no such tensors, or a norm that is computed otherwise: no proof either way
        return "not checked", []
    states, matrix = read_tensor(tensors[LAST]).float(), read_tensor(head).float()
    factors = read_tensor(norm).float() + int(weights.adds_one)
    if teacher is not None:
        wanted = torch.tensor(teacher, dtype=torch.int64)
    else:
        wanted, states = read_tensor(tensors[IDS]).long()[1:], states[:-1]
    rows = min(len(wanted), len(states))
    scaled = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + spec.rms_norm_eps)
    counts = {kind: int(((value[:rows] @ matrix.T).argmax(-1) == wanted[:rows]).sum())
              for kind, value in (("pre_norm", scaled * factors), ("post_norm", states))}
    best = max(counts, key=lambda kind: counts[kind])
    facts = f"head(norm(h)) chooses the target's token in {counts['pre_norm']} of {rows} rows, head(h) in " \
            f"{counts['post_norm']}"
    if counts[best] < AGREES * rows:
        if teacher is None:
            return "not checked", []  # a text that is not the target's own proves nothing
        return "neither", [_bad("states-norm", path, LAST, facts, f"{rows} of {rows} for one of them",
                                "these are not this target's last states", "Extract them again with this target.")]
    advice = "These states are pre-norm: apply the final norm before the head." if best == "pre_norm" else \
        "These states are post-norm: apply the head alone."
    return best, [Finding("states-norm", "note", f"{path.name}: {LAST}", facts, "one convention, proved",
                          "training with the other one learns from wrong targets", advice)]


def _json(path: Path) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidInput(str(path), f"unreadable ({error})", "a JSON file", "Check the path.") from error


def _prompts(path: Path) -> dict[str, list[int]]:
    value = _json(path)
    if not isinstance(value, dict) or not all(map(_are_ids, value.values())):
        raise InvalidInput(str(path), "something else", "a JSON object, sample number -> list of token ids",
                           "Check the path.")
    return value


def _top1(path: Path) -> list[int]:
    value = _json(path)
    if not isinstance(value, dict) or not _are_ids(ids := value.get("top1")):
        raise InvalidInput(str(path), "something else", 'a JSON object {"top1": [token ids]}', "Check the path.")
    return ids


def _are_ids(value: Any) -> TypeGuard[list[int]]:
    return isinstance(value, list) and all(type(each) is int for each in value)


def _bad(code: str, path: Path, field: str, found: str, wanted: str, consequence: str, remedy: str) -> Finding:
    return Finding(code, "error", f"{path.name}: {field}" if field else path.name, found, wanted, consequence, remedy)
