"""Launch flags: steps, topk and draft tokens together; attention backends against trees, MLA and the GPU."""

from __future__ import annotations

from eyas_contract.engines.checks.case import Case
from eyas_contract.engines.findings import Finding
from eyas_contract.engines.hardware import BACKENDS, MLA_TARGETS, PAGED_TREES, TREE_BY_DEFAULT, Backend
from eyas_contract.engines.overrides import FLAG, overridden
from eyas_contract.engines.sglang import version_text

_NUMBERS = ("speculative_num_steps", "speculative_eagle_topk", "speculative_num_draft_tokens")


def check_serving(case: Case) -> list[Finding]:
    """SGLang's launch flags (source: `arg_groups/speculative_hook.py`, `speculative/draft_utils.py`)."""
    if case.engine != "sglang":
        return []
    flags = case.flags
    given = {name: getattr(flags, name) for name in _NUMBERS if getattr(flags, name) is not None}
    if 0 < len(given) < len(_NUMBERS):
        missing = [f"--{name.replace('_', '-')}" for name in _NUMBERS if name not in given]
        result = [Finding("speculation-partial", "error", "server flags",
                          ", ".join(f"--{n.replace('_', '-')} {v}" for n, v in given.items()),
                          f"all three; {', '.join(missing)} missing", "the server stops at start with an assertion",
                          "Give all three (a chain: steps n, topk 1, draft tokens n + 1), or none.")]
        topk = int(flags.speculative_eagle_topk or 1)
    else:
        steps, topk, tokens = (given[name] for name in _NUMBERS) if given else _defaults(case)
        result = check_shape(steps, topk, tokens, "" if given else f" ({case.server}'s defaults)")
    if flags.speculative_token_map:
        result.append(Finding("token-map-ignored", "warning", "--speculative-token-map", flags.speculative_token_map,
                              "no token map: EAGLE-3 takes d2t from the checkpoint", "the flag is ignored",
                              "Leave it out."))
    return result + _overridden(case) + _backends(case, topk)


def _overridden(case: Case) -> list[Finding]:
    changed = overridden(case.raw, case.flags.json_model_override_args)
    if not changed:
        return []
    return [Finding("config-overridden", "error", FLAG, "; ".join(changed),
                    "no key that the draft's config has otherwise: the flag is laid over both models' configs",
                    "the draft computes another function than the one trained (other angles, other sizes), without a "
                    "message", "Write these keys into the config.json of a copy of the target's folder, in place of "
                    "the flag.")]


def _defaults(case: Case) -> tuple[int, int, int]:
    return (5, 4, 8) if case.spec.architecture in TREE_BY_DEFAULT else (3, 1, 4)


def largest_tree(steps: int, topk: int) -> int:
    """Nodes with the root where every level after the first keeps topk x topk candidates."""
    return 1 + topk + (steps - 1) * topk * topk


def check_shape(steps: int, topk: int, tokens: int, origin: str = "") -> list[Finding]:
    """Whether a tree of these numbers can be built as asked."""
    found = f"steps {steps}, topk {topk}, draft tokens {tokens}{origin}"
    where = "--speculative-num-steps, --speculative-eagle-topk, --speculative-num-draft-tokens"
    if min(steps, topk) < 1 or tokens < 2:
        return [Finding("speculation-shape", "error", where, found, "steps and topk of 1 or more, 2 tokens or more",
                        "the server cannot start, or drafts nothing", "For a chain give topk 1, tokens = steps + 1.")]
    if topk == 1 and tokens != steps + 1:
        return [Finding("speculation-shape", "error", where, found,
                        f"draft tokens {steps + 1}: a chain of {steps} steps has {steps + 1} tokens with the root",
                        f"SGLang sets draft tokens to {steps + 1} and says so in one warning; other builds verify "
                        "tokens that nobody drafted", f"Give {steps + 1}, or topk above 1 for a tree.")]
    most = largest_tree(steps, topk)
    if tokens > most:
        levels = " + ".join(["1", str(topk), *[str(topk * topk)] * (steps - 1)]) if steps <= 8 else \
            f"1 + {topk} + {steps - 1} x {topk * topk}"
        return [Finding("speculation-shape", "error", where, found,
                        f"at most {most} draft tokens: {levels}, where every level keeps topk x topk candidates",
                        "the tree asks for more nodes than were drafted", f"Give {most} or fewer, or more steps.")]
    if topk > 1:
        return [Finding("tree-backend", "note", where, f"{found}: a tree of {tokens} nodes (at most {most})",
                        "an attention backend that does trees, on this GPU",
                        "trees need such a backend, and often lose to chains at higher concurrency",
                        "Name the backend with --attention-backend, and measure against topk 1.")]
    return []


def _backends(case: Case, topk: int) -> list[Finding]:
    flags, result = case.flags, []
    named = {"--attention-backend": flags.attention_backend,
             "--speculative-draft-attention-backend": flags.speculative_draft_attention_backend}
    for flag, name in named.items():
        if name is None:
            continue
        backend = BACKENDS.get(name)
        if backend is None:
            result.append(Finding("backend-unknown", "warning", flag, name, f"one of {', '.join(sorted(BACKENDS))}",
                                  "whether it can draft is not known here", "Check it with the engine's release."))
            continue
        drafts = flag.startswith("--spec") or flags.speculative_draft_attention_backend is None
        result += _backend(case, flag, name, backend, topk, drafts)
    if topk > 1 and (flags.page_size or 1) > 1 and flags.attention_backend:
        since = PAGED_TREES.get(flags.attention_backend)
        if since is None or case.version < since:
            able = sorted(n for n, v in PAGED_TREES.items() if case.version >= v)
            result.append(Finding("backend-page-size", "error", "--page-size", f"{flags.page_size} with topk {topk} on "
                                  f"{flags.attention_backend}", f"page size 1, or one of {able} in {case.server}",
                                  "the server refuses to start", "Give --page-size 1."))
    if topk > 1 and not flags.attention_backend and case.gpu is not None and case.gpu.sm >= 120 and _mla(case):
        result.append(Finding("tree-backend", "warning", "--attention-backend", f"not given, topk {topk}, MLA target, "
                              f"{case.gpu.name} (SM{case.gpu.sm})", "triton: the one backend with MLA trees there",
                              "another backend refuses topk above 1, or has no code for this GPU",
                              "Give --attention-backend triton, or topk 1."))
    return result


def _mla(case: Case) -> bool:
    return case.spec.architecture in MLA_TARGETS


def _backend(case: Case, flag: str, name: str, backend: Backend, topk: int, drafts: bool) -> list[Finding]:
    result = []
    absent = backend.since is None or case.version < backend.since or (
        backend.until is not None and case.version > backend.until)
    if drafts and absent:
        span = "in no version" if backend.since is None else f"from {version_text(backend.since)}" + (
            f" to {version_text(backend.until)}" if backend.until else "")
        result.append(Finding("backend-no-draft", "error", flag, name, f"a backend with a draft part ({name}: {span})",
                              f"{case.server} cannot build the draft's attention and stops at start",
                              "Give --speculative-draft-attention-backend triton or flashinfer."))
    if topk > 1 and (backend.tree == "no" or (backend.tree == "mha" and _mla(case))):
        result.append(Finding("backend-tree", "error", flag, f"{name} with topk {topk}",
                              f"topk 1: {name} cannot attend along a tree"
                              + (" of an MLA model" if backend.tree == "mha" else ""),
                              "the server refuses to start", "Use triton, or topk 1."))
    elif topk > 1 and backend.tree in ("reported", "unknown"):
        why = "SGLang lists it as able, a public report says that it did topk 1 only" if backend.tree == "reported" \
            else "whether it attends along a tree was not read in its source"
        result.append(Finding("backend-tree", "warning", flag, f"{name} with topk {topk}",
                              f"a backend that attends along trees; {why}",
                              "proposals off the first branch may be verified wrongly, or the server stops",
                              "Compare greedy answers with and without speculation, or use triton."))
    if (backend.model == "mla" and not _mla(case)) or (backend.model == "mha" and _mla(case)):
        kind = "an MLA model" if _mla(case) else "not an MLA model"
        result.append(Finding("backend-model", "error", flag, f"{name}; the target is {kind}",
                              f"a backend for this attention ({name} is for {backend.model.upper()})",
                              "the server refuses to start", "Use triton or flashinfer."))
    if case.gpu is not None and backend.gpus and case.gpu.sm not in backend.gpus:
        result.append(Finding("backend-gpu", "error", flag, f"{name} on {case.gpu.name} (SM{case.gpu.sm})",
                              f"a GPU of {', '.join(f'SM{sm}' for sm in sorted(backend.gpus))}",
                              "there is no code for this GPU: the server refuses to start, or fails at graph capture",
                              "Use triton" + ("." if _mla(case) else " or flashinfer.")))
    return result
