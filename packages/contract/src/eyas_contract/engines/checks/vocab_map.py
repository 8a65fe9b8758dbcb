"""The draft's vocabulary: `d2t` as offsets, inside the target's vocabulary, agreeing with `t2d`."""

from __future__ import annotations

import itertools
import json
from pathlib import Path

from eyas_contract.engines.checks.case import MAX_JSON_BYTES, Case
from eyas_contract.engines.findings import Finding
from eyas_contract.engines.loaders import Loader
from eyas_contract.engines.wanted import head_rows
from eyas_contract.safetensors_header import TensorInfo, read_values

MAX_VOCABULARY = 4_000_000  # entries read into memory at most


def check_vocab_map(case: Case, loader: Loader) -> list[Finding]:
    """Source: SGLang `load_weights`: `hot_token_id = d2t + arange`; `t2d` is read by no engine."""
    size, vocab = head_rows(case.config), case.spec.vocab_size
    if size > vocab:
        return [Finding("vocab-size", "error", "config.json: draft_vocab_size", str(size),
                        f"at most {vocab}, the target's vocabulary", "draft ids have no token in the target",
                        "Correct draft_vocab_size.")]
    d2t, t2d = _special(case, loader, "d2t"), _special(case, loader, "t2d")
    if d2t is None:
        return [] if size == vocab else [_missing(case, size)]
    where = f"{d2t.file.name}: {d2t.name}"
    if loader.engine == "vllm" and size == vocab:
        return [Finding("d2t-unneeded", "error", where, f"present in a draft of the full vocabulary ({vocab})",
                        f"absent: {loader.name} has no such parameter then", "the server stops while loading",
                        "Leave d2t and t2d out: eyas-draft convert --to vllm does.")]
    if d2t.dtype not in ("I64", "I32") or d2t.shape != (size,) or size > MAX_VOCABULARY:
        return [Finding("d2t-shape", "error", where, f"{d2t.dtype} {list(d2t.shape)}",
                        f"I64 [{size}], one offset per draft token",
                        "the server fails, or maps draft ids to wrong tokens", "Write d2t again.")]
    values = read_values(d2t)
    mapped = [i + offset for i, offset in enumerate(values)]
    marked = _marked(t2d, vocab)
    if len(set(mapped)) < size or min(mapped) < 0 or max(mapped) >= vocab:
        return [_wrong(where, values, mapped, marked, vocab)]
    trained = case.contract.vocab.target_ids if case.contract and case.contract.vocab else None
    if trained is not None and list(trained) != mapped:
        same = len(set(trained) & set(mapped))
        return [Finding("d2t-not-trained", "error", where, f"{same} of {size} target ids are those of training",
                        f"the {len(trained)} ids of contract.json, in order",
                        "rows of the head stand for other tokens than in training", "Export again.")]
    if trained is None and marked != sorted(mapped):
        risen = _strictly_rising(values, marked, where)
        if risen:
            return risen
    if trained is None and t2d is None and not any(values) and 2 * size <= vocab:
        return [_unset(where, size, vocab)]
    return _order(mapped, where) + _t2d(t2d, marked, mapped, vocab)


def _unset(where: str, size: int, vocab: int) -> Finding:
    """A buffer as it was allocated; a vocabulary that only leaves padding out is more than half of the target's."""
    return Finding("d2t-values", "warning", where, f"all {size} offsets are 0: the first {size} of {vocab} tokens",
                   "the offsets of the tokens trained on, usually the most frequent ones",
                   "if the map was never filled, nearly every proposal is a wrong token, without a message",
                   "Rebuild d2t from the training vocabulary, unless that is its beginning.")


def _special(case: Case, loader: Loader, kind: str) -> TensorInfo | None:
    return next((info for name, info in case.tensors.items() if loader.place(name) == kind), None)


def _marked(t2d: TensorInfo | None, vocab: int) -> list[int] | None:
    if t2d is None or t2d.dtype not in ("BOOL", "U8", "I64", "I32") or t2d.shape != (vocab,) or vocab > MAX_VOCABULARY:
        return None
    return [i for i, value in enumerate(read_values(t2d)) if value]


def _missing(case: Case, size: int) -> Finding:
    vocab = case.spec.vocab_size
    side = side_files(case.draft, size, vocab)
    remedy = "Write d2t (int64 offsets: target = draft + d2t[draft]) into the checkpoint"
    if side:
        name, count = side[0]
        remedy += (f"; {name} beside it holds {count} distinct, ascending ids below {vocab}: the likely source. "
                   f"eyas-draft convert DRAFT OUT --to sglang --vocab-from {name} writes d2t and t2d from it.")
    else:
        remedy += ", from the ids that training kept in its side file (d2t.npy, token map, cache)."
    return Finding("d2t-missing", "error", f"{case.weights}: d2t", "absent",
                   f"offsets for a draft vocabulary of {size} in {vocab}",
                   "draft ids are taken for target ids: nearly every proposal is a wrong token, without a message",
                   remedy)


def side_files(folder: Path, size: int, vocab: int) -> list[tuple[str, int]]:
    """JSON files of a draft folder that hold one list of `size` distinct, ascending ids below `vocab`."""
    result = []
    for path in sorted(folder.glob("*.json")):
        if path.is_file() and path.stat().st_size < MAX_JSON_BYTES and path.name != "contract.json":
            ids = target_ids_in(path, size, vocab)
            if ids:
                result.append((path.name, len(ids)))
    return result


def target_ids_in(path: Path, size: int, vocab: int) -> list[int]:
    """The first list in a JSON file that can be a draft's target ids: `size` distinct, ascending ones below `vocab`."""
    try:
        plain = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError):
        return []
    candidates = [plain, *(plain.values() if isinstance(plain, dict) else [])]
    return next((c for c in candidates if isinstance(c, list) and len(c) == size and all(type(i) is int for i in c)
                 and c == sorted(set(c)) and c[0] >= 0 and c[-1] < vocab), [])


def _wrong(where: str, values: list[int], mapped: list[int], marked: list[int] | None, vocab: int) -> Finding:
    size, outside = len(values), sum(not 0 <= m < vocab for m in mapped)
    first = next((i for i, m in enumerate(mapped) if not 0 <= m < vocab), None)
    facts = [f"{outside} of {size} land outside 0..{vocab - 1}" + (f" (draft id {first} maps to {mapped[first]})"
                                                                    if first is not None else ""),
             f"{size - len(set(mapped))} doubles"]
    absolute = values == sorted(set(values)) and values[0] >= 0 and values[-1] < vocab
    if marked is not None:
        facts.insert(0, f"i + d2t[i] meets t2d on {len(set(marked) & set(mapped))} of {size} tokens")
    if absolute:
        same = marked is not None and marked == values
        facts.append("d2t itself is " + ("the sorted positions of t2d" if same else "a list of ascending target ids"))
    full = size == vocab
    remedy = "For a full vocabulary write zeros, or leave d2t and t2d out." if full and absolute else \
        f"d2t holds absolute ids: subtract 0..{size - 1}." if absolute else \
        "Rebuild d2t from the training vocabulary."
    return Finding("d2t-absolute" if absolute else "d2t-values", "error", where, "; ".join(facts),
                   "offsets: target id = draft id + d2t[draft id], distinct and inside the vocabulary",
                   "proposals are mapped to wrong tokens, or out of the vocabulary", remedy)


def _strictly_rising(values: list[int], marked: list[int] | None, where: str) -> list[Finding]:
    """Offsets rise only where tokens are left out; offsets that always rise leave out a token after every one."""
    steps = {b - a for a, b in itertools.pairwise(values)}
    if len(values) < 8 or min(steps) < 1:
        return []
    identity = steps == {1} and values[0] == 0
    found = "d2t is 0, 1, 2, ...: draft id i maps to 2i" if identity else \
        "d2t rises at every id, so no two neighbouring tokens of the target are in it"
    if marked == values:
        found += "; it is the sorted positions of t2d"
    sure = identity or marked == values or len(steps) > 1
    return [Finding("d2t-absolute", "error" if sure else "warning", where, found,
                    "offsets: they rise only where target tokens are left out",
                    "absolute ids: proposals are mapped to wrong tokens, without a message",
                    f"If d2t holds absolute ids, subtract 0..{len(values) - 1}; t2d, or the training vocabulary, "
                    "tells.")]


def _order(mapped: list[int], where: str) -> list[Finding]:
    if mapped == sorted(mapped):
        return []
    falls = sum(a > b for a, b in itertools.pairwise(mapped))
    return [Finding("d2t-order", "warning", where, f"target ids fall {falls} times along the draft ids",
                    "ascending target ids, as every known trainer writes them",
                    "served as written; a map from another checkpoint or a shuffled head looks like this",
                    "Check that d2t and lm_head come from the same training run.")]


def _t2d(t2d: TensorInfo | None, marked: list[int] | None, mapped: list[int], vocab: int) -> list[Finding]:
    if t2d is None:
        return []
    where = f"{t2d.file.name}: {t2d.name}"
    if marked is None:
        return [Finding("t2d-shape", "warning", where, f"{t2d.dtype} {list(t2d.shape)}", f"BOOL [{vocab}]",
                        "no engine reads t2d, but trainers do; it may belong to another target", "Write t2d again.")]
    if marked == sorted(mapped):
        return []
    agree = len(set(marked) & set(mapped))
    return [Finding("t2d-disagrees", "error", where,
                    f"{len(marked)} tokens marked, {agree} of the {len(mapped)} in d2t among them",
                    f"exactly the tokens of d2t, in {vocab}",
                    "engines read d2t alone: one of the two is not what was trained",
                    "Rebuild both from the training vocabulary.")]
