"""Prompts -> conversations whose assistant turns are the target's own, with the token ids that it produced.

Batches follow from the input and the settings alone (sorted by length), so what a killed run repeats comes out again.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eyas_contract import InvalidInput, TargetSpec
from eyas_contract.canonical import dumps, to_plain
from eyas_contract.commands import Progress, plain_config
from eyas_contract.contract import write_text_atomic
from eyas_extract.answers import Answers, Row
from eyas_extract.config import RegenerateConfig
from eyas_extract.conversations import Conversation, Reject, RowFault, count_lines, file_sha256, read_conversations
from eyas_extract.decoding import ATTENTION, Sampling, decode
from eyas_extract.store import room_for
from eyas_extract.target import Target, load_target, pick_device
from eyas_extract.template import ChatTemplate


@dataclass
class Dialogue:
    """One conversation being answered: what is said so far, and what others still say after each answer."""

    line: int
    id: str
    tools: tuple[Any, ...] | None
    messages: list[dict[str, Any]]
    later: list[list[dict[str, Any]]] = field(default_factory=list)
    length: int = 0


@dataclass(frozen=True)
class Regenerated:
    """What a run did: rows written in all, rejects by line, tokens and seconds of this run."""

    rows: int
    rejects: list[Reject]
    new_tokens: int
    seconds: float


def regenerate(config: RegenerateConfig) -> Regenerated:
    """Answer every prompt that has no answer in the output yet.

    Raises:
        EyasError: unusable input or settings, output made with others, or a full disk.
    """
    if config.max_new_tokens < 1 or config.batch_size < 1 or config.kv_gib <= 0:
        raise InvalidInput("settings", f"max_new_tokens {config.max_new_tokens}, batch_size {config.batch_size}, "
                           f"kv_gib {config.kv_gib}", "positive values", "Correct the flags.")
    sampling = Sampling(config.temperature, config.top_p, config.top_k, config.seed)
    device = pick_device(config.device)
    answers = Answers(config.out, _settings(config, device))
    path = config.out.with_name(config.out.name + ".rejects.jsonl")
    try:
        if not answers.complete:
            return _regenerate(config, sampling, device, answers, path)
    finally:
        answers.close()
    rejects = [Reject(**json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines()]
    return Regenerated(count_lines(config.out), rejects, 0, 0.0)


def _regenerate(config: RegenerateConfig, sampling: Sampling, device: str, answers: Answers, rejects_path: Path
                ) -> Regenerated:
    """Answer what is missing and write both files."""
    target = load_target(config.target, device, config.dtype)
    template = ChatTemplate(config.target, sorted(target.stop_ids))
    dialogues, rejects = _dialogues(config, template, target)
    target.model.set_attn_implementation(ATTENTION)
    batches = _batches(dialogues, config, target)
    started, tokens = time.monotonic(), 0
    progress = Progress(len(dialogues), "rows", "regenerate", already=sum(len(b) for b in answers.batches))
    for number in range(len(answers.batches), len(batches)):
        rows, made = _answer(batches[number], number, config, sampling, target, template, progress)
        tokens += made
        answers.append(rows)
    rejects += [Reject(r["line"], r["id"], r["reject"]) for b in answers.batches for r in b if "reject" in r]
    rejects.sort(key=lambda r: r.line)
    with room_for(rejects_path):
        write_text_atomic(rejects_path, "".join(dumps(r) + "\n" for r in rejects))
    kept = answers.finish()
    progress.close(f"{tokens:,} tokens, {tokens / max(time.monotonic() - started, 1e-9):,.0f} tokens/s")
    return Regenerated(kept, rejects, tokens, round(time.monotonic() - started, 3))


def _settings(config: RegenerateConfig, device: str) -> dict[str, Any]:
    """All that an answer depends on: settings without paths, and digests of the input and the target."""
    settings = plain_config(config)
    for name in ("target", "prompts", "out"):
        del settings[name]
    return settings | {"device": device.partition(":")[0], "input_sha256": file_sha256(config.prompts),
                       "target": to_plain(TargetSpec.from_folder(config.target))}


def _dialogues(config: RegenerateConfig, template: ChatTemplate, target: Target
               ) -> tuple[list[Dialogue], list[Reject]]:
    """Every row that can be answered, and rejects for the others."""
    good, rejects = [], []
    for row in read_conversations(config.prompts):
        if isinstance(row, Reject):
            rejects.append(row)
            continue
        try:
            good.append(_dialogue(row, config, template, target))
        except RowFault as fault:
            rejects.append(Reject(row.line, row.id, str(fault)))
    return good, rejects


def _dialogue(row: Conversation, config: RegenerateConfig, template: ChatTemplate, target: Target) -> Dialogue:
    roles = [m["role"] for m in row.messages]
    if "tool" in roles or any(m.get("tool_calls") for m in row.messages):
        raise RowFault("tool calls: their results belong to the old answers, so they cannot be regenerated")
    messages = list(row.messages[:-1] if roles[-1] == "assistant" else row.messages)
    template.render(messages, row.tools, prompt=True)
    if row.order_fault:
        raise RowFault(row.order_fault)
    groups: list[list[dict[str, Any]]] = [[]]
    for message in messages:
        if message["role"] == "assistant" and config.turns == "all":
            groups.append([])
        else:
            groups[-1].append(message)
    dialogue = Dialogue(row.line, row.id, row.tools, groups[0], groups[1:])
    length = len(template.encode(template.render(messages, row.tools, prompt=True)))
    dialogue.length = length + config.max_new_tokens * len(groups)
    limit = target.spec.max_position_embeddings
    if limit and dialogue.length > limit:
        raise RowFault(f"{length} tokens of prompt and {len(groups)} answers of {config.max_new_tokens} do not fit "
                       f"the target's {limit} positions")
    return dialogue


def _batches(dialogues: Sequence[Dialogue], config: RegenerateConfig, target: Target) -> list[list[Dialogue]]:
    """Dialogues of like length, as many as keys and values have room for."""
    text = target.model.config.get_text_config()
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    bytes_per_token = 2 * text.num_hidden_layers * heads * width * target.model.dtype.itemsize
    room = config.kv_gib * 2**30 / bytes_per_token
    result: list[list[Dialogue]] = []
    for dialogue in sorted(dialogues, key=lambda d: (d.length, d.line)):
        batch = result[-1] if result else []
        if batch and len(batch) < config.batch_size and (len(batch) + 1) * dialogue.length <= room:
            batch.append(dialogue)
        else:
            result.append([dialogue])
    return result


def _answer(batch: Sequence[Dialogue], number: int, config: RegenerateConfig, sampling: Sampling, target: Target,
            template: ChatTemplate, progress: Progress) -> tuple[list[Row], int]:
    """All turns of one batch; returns its rows and the number of tokens made."""
    made, start, turn, active = 0, time.monotonic(), 0, list(batch)

    def count(tokens: int) -> None:
        nonlocal made
        made += tokens
        progress.update(0, f"{made / (time.monotonic() - start):,.0f} tokens/s")

    refused: dict[int, str] = {}
    while active:
        prompts, active = _prompts(active, template, refused)
        if not active:
            break
        outputs = decode(target.model, prompts, stop_ids=template.stop_ids, max_new_tokens=config.max_new_tokens,
                         sampling=sampling, stream=number * 1000 + turn, on_tokens=count)
        following = []
        for dialogue, ids in zip(active, outputs, strict=True):
            stopped = ids[-1] in template.stop_ids
            dialogue.messages.append({"role": "assistant", "content": template.decode(ids[:-1] if stopped else ids),
                                      "output_ids": ids, "finish_reason": "stop" if stopped else "length"})
            if dialogue.later:
                dialogue.messages += dialogue.later.pop(0)
                following.append(dialogue)
        active, turn = following, turn + 1
    progress.update(len(batch), f"{made / (time.monotonic() - start):,.0f} tokens/s")
    return [{"line": d.line, "id": d.id, "reject": refused[d.line]} if d.line in refused else
            {"line": d.line, "id": d.id, "messages": d.messages, **({"tools": list(d.tools)} if d.tools else {})}
            for d in batch], made


def _prompts(dialogues: Sequence[Dialogue], template: ChatTemplate, refused: dict[int, str]
             ) -> tuple[list[list[int]], list[Dialogue]]:
    """Token ids of what each dialogue asks now; those whose new history the template refuses go to `refused`."""
    prompts, kept = [], []
    for dialogue in dialogues:
        try:
            prompts.append(template.encode(template.render(dialogue.messages, dialogue.tools, prompt=True)))
            kept.append(dialogue)
        except RowFault as fault:
            refused[dialogue.line] = str(fault)
    return prompts, kept
