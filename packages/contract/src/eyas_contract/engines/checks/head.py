"""Where the draft's head and embedding come from: its own, the target's, or nowhere."""

from __future__ import annotations

from eyas_contract.engines.checks.case import Case
from eyas_contract.engines.checks.placing import SILENT, Placed
from eyas_contract.engines.findings import Finding
from eyas_contract.engines.loaders import Loader
from eyas_contract.engines.wanted import head_rows, target_width

_NULL = "draft_vocab_size: null makes SGLang's Llama class (0.5.10 to 0.5.23) and MLA class (0.5.12 to 0.5.23) take " \
    "the target's head"


def check_head(case: Case, loader: Loader, placed: Placed) -> list[Finding]:
    """`lm_head.weight` and `embed_tokens.weight`.

    Sources: SGLang `LlamaForCausalLMEagle3.__init__`, `init_lm_head` of its EAGLE worker, `set_embed`; vLLM
    `v1/spec_decode/llm_base_proposer.py` (`_maybe_share_lm_head`).
    """
    result = _tied(case, loader, placed) if loader.engine == "sglang" and case.config.get("tie_word_embeddings") \
        else _own_head(case, loader, placed)
    head = placed.found.get("lm_head.weight")
    shape = placed.wanted["lm_head.weight"]
    if head is not None and head.shape != shape:
        result.append(Finding("tensor-shape", "error", f"{case.weights}: lm_head.weight", str(list(head.shape)),
                              f"{list(shape)}: one row per draft token (draft_vocab_size "
                              f"{case.config.get('draft_vocab_size')})", "the server fails while loading, or pads the "
                              "head with random rows", "Correct draft_vocab_size, or export the head again."))
    return result + _embedding(case, loader, placed)


def _own_head(case: Case, loader: Loader, placed: Placed) -> list[Finding]:
    head, result = "lm_head.weight" in placed.found, []
    if loader.engine == "sglang" and loader.kind == "llama" and "draft_vocab_size" not in case.config:
        result.append(Finding("config-keys", "error", "config.json", "no draft_vocab_size",
                              f"the key, by {loader.name}'s LlamaForCausalLMEagle3, which reads it without a default",
                              "the server stops with AttributeError",
                              "Write the number of rows of the head, or null to take the target's head."))
    declared = case.config.get("draft_vocab_size")
    if loader.engine == "sglang" and declared is None:
        if head:
            result.append(Finding("head-replaced", "warning", "config.json: draft_vocab_size",
                                  "null, and the file has lm_head.weight", "a size, where the draft's own head is "
                                  "wanted", "the server takes the target's head in place of the file's",
                                  f"Write draft_vocab_size {placed.found['lm_head.weight'].shape[0]}, or leave the "
                                  "head out."))
        return result
    if head:
        return result
    if loader.engine == "vllm" and head_rows(case.config) == case.spec.vocab_size:
        return [*result, Finding("head-shared", "note", case.weights, "no lm_head.weight",
                                 "nothing: vLLM lends the target's head to a full-vocabulary draft",
                                 "the target's head is used", "Nothing, if the draft was trained with it.")]
    full = declared == case.spec.vocab_size
    fix = f"Export the head. If the draft was trained with the target's own head: {_NULL}." if full else \
        "Export the head: a reduced vocabulary cannot borrow the target's."
    return [*result, Finding("head-missing", "error", f"{case.weights}: lm_head.weight",
                             f"absent, while config.json declares draft_vocab_size {declared}",
                             f"[{head_rows(case.config)}, {case.config['hidden_size']}], by {loader.name}",
                             f"the head keeps random values: every proposal is noise; {SILENT}", fix)]


def _tied(case: Case, loader: Loader, placed: Placed) -> list[Finding]:
    head = "lm_head.weight" in placed.found
    reduced = head_rows(case.config) != case.spec.vocab_size
    if not head and not reduced and case.spec.tie_word_embeddings:
        return []
    found = "true, and the file has its own lm_head.weight" if head else \
        f"true, with a draft vocabulary of {head_rows(case.config)} in {case.spec.vocab_size}" if reduced else \
        "true, while the target's head is not its embedding"
    return [Finding("head-tied", "error", "config.json: tie_word_embeddings", found, "false, for a draft with its head",
                    f"{loader.name} uses the target's embedding as the draft's head and drops the file's; {SILENT}",
                    "Set tie_word_embeddings to false" + ("." if head else " and export the head."))]


def _embedding(case: Case, loader: Loader, placed: Placed) -> list[Finding]:
    config, own, result = case.config, "embed_tokens.weight" in placed.found, []
    width, hidden = target_width(config), config["hidden_size"]
    if width != case.spec.hidden_size:
        result.append(Finding("target-hidden-size", "error", "config.json: "
                              + ("target_hidden_size" if config.get("target_hidden_size") else "hidden_size"),
                              f"{width}: the width of a target state that `fc` expects",
                              f"{case.spec.hidden_size}, by the target's config",
                              "the states do not fit `fc`: the server stops, or skips `fc`",
                              "Serve the target that the draft was trained for, or write its hidden_size into "
                              "target_hidden_size."))
    if "target_hidden_size" in config and config["target_hidden_size"] is None and loader.engine == "sglang" \
            and loader.kind == "llama":  # the MLA class takes hidden_size then
        result.append(Finding("config-value", "error", "config.json: target_hidden_size", "null", "a number, or no key",
                              "the server stops while it builds `fc`", "Remove the key."))
    if width != hidden and not own:
        result.append(Finding("embedding-missing", "error", f"{case.weights}: embed_tokens.weight",
                              f"absent, while the draft is {hidden} wide and the target {width}",
                              "the draft's own embedding: the target's does not fit",
                              "the embedding keeps random values; acceptance is nil", "Export the embedding."))
    if width == hidden and own and case.engine == "sglang":
        result.append(Finding("embedding-replaced", "note", f"{case.weights}: embed_tokens.weight", "present",
                              "nothing: the server lends the target's embedding to a draft of the same width",
                              "the file's embedding is not used", "Nothing, if training used the target's embedding."))
    if config["vocab_size"] != case.spec.vocab_size:
        result.append(Finding("vocab-size", "error", "config.json: vocab_size", str(config["vocab_size"]),
                              f"{case.spec.vocab_size}, the target's", "the embedding lent by the target has other "
                              "rows, and token ids may fall outside",
                              "Serve the target that the draft was trained for, or correct vocab_size."))
    return result
