"""Prompts -> conversations whose assistant turns are the target's own, with the token ids that it produced.

Batches follow from the input and the settings alone (sorted by length), so what a killed run repeats comes out again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas_contract import InvalidInput
from eyas_contract.canonical import dumps, to_plain
from eyas_contract.commands import Progress, plain_config
from eyas_contract.contract import write_text_atomic
from eyas_extract.answers import Answers, Row
from eyas_extract.config import RegenerateConfig
from eyas_extract.conversations import Reject, RowFault, count_lines, file_sha256, none_left, read_rejects
from eyas_extract.decoding import ATTENTION, Sampling, decode
from eyas_extract.dialogue import Dialogue, dialogues_of
from eyas_extract.disk import room_for
from eyas_extract.remote import answer_all, speaker
from eyas_extract.target import Target, load_target, pick_device, read_spec, stop_ids
from eyas_extract.template import DAY, ChatTemplate, first_day


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
        EyasError: unusable input or settings, output made with others, not one row that can be answered, or a full
            disk.
    """
    faults = [f"{name} {value}" for name in ("max_new_tokens", "batch_size", "kv_gib", "concurrency", "tp")
              if (value := getattr(config, name)) <= 0]
    if faults:
        raise InvalidInput("settings", ", ".join(faults), "positive values", "Correct the flags.")
    named = [bool(config.endpoint), bool(config.model)]
    if named != [config.engine == "endpoint"] * 2:
        raise InvalidInput("settings", f"engine {config.engine}, endpoint {config.endpoint!r}, model {config.model!r}",
                           "--endpoint and --model with --engine endpoint, without it neither", "Correct the flags.")
    sampling = Sampling(config.temperature, config.top_p, config.top_k, config.seed)
    device = pick_device(config.device)
    answers = Answers(config.out, _settings(config, device))
    path = config.out.with_name(config.out.name + ".rejects.jsonl")
    try:
        if not answers.complete:
            return _regenerate(config, sampling, device, answers, path)
    finally:
        answers.close()
    return Regenerated(count_lines(config.out), read_rejects(path), 0, 0.0)


def _regenerate(config: RegenerateConfig, sampling: Sampling, device: str, answers: Answers, rejects_path: Path
                ) -> Regenerated:
    """Answer what is missing and write both files."""
    spec = read_spec(config.target)
    template = ChatTemplate(config.target, sorted(stop_ids(config.target)))
    template.day = answers.settings.get(DAY, "")
    dialogues, rejects = dialogues_of(config, template, spec.max_position_embeddings)
    progress = Progress(len(dialogues), "rows", "regenerate", already=sum(len(b) for b in answers.batches))
    started = time.monotonic()
    if config.engine == "hf":
        tokens = _by_hugging_face(config, sampling, device, template, dialogues, answers, progress)
    else:
        with speaker(config, template, device, spec.dtype if config.dtype == "auto" else config.dtype) as speak:
            tokens = answer_all(dialogues, answers, speak, config.concurrency, progress)
    rejects += [Reject(r["line"], r["id"], r["reject"]) for b in answers.batches for r in b if "reject" in r]
    rejects.sort(key=lambda r: r.line)
    with room_for(rejects_path):
        write_text_atomic(rejects_path, "".join(dumps(r) + "\n" for r in rejects))
    if not any("reject" not in row for batch in answers.batches for row in batch):
        raise none_left(config.prompts, "answered", rejects, "conversations with room for --max-new-tokens "
                        f"{config.max_new_tokens} an answer", f"{rejects_path} names each row's reason.")
    kept = answers.finish()
    progress.close(f"{tokens:,} tokens, {tokens / max(time.monotonic() - started, 1e-9):,.0f} tokens/s")
    return Regenerated(kept, rejects, tokens, round(time.monotonic() - started, 3))


def _by_hugging_face(config: RegenerateConfig, sampling: Sampling, device: str, template: ChatTemplate,
                     dialogues: Sequence[Dialogue], answers: Answers, progress: Progress) -> int:
    """Batch after batch in this process; returns the number of tokens made."""
    target = load_target(config.target, device, config.dtype)
    target.model.set_attn_implementation(ATTENTION)
    batches, tokens = _batches(dialogues, config, target), 0
    for number in range(len(answers.batches), len(batches)):
        rows, made = _answer(batches[number], number, config, sampling, target, template, progress)
        tokens += made
        answers.append(rows)
    return tokens


def _settings(config: RegenerateConfig, device: str) -> dict[str, Any]:
    """All that an answer depends on: settings without paths and addresses, and digests of the input and the target."""
    settings = plain_config(config)
    elsewhere = ("target", "prompts", "out", "servers", "endpoint", "api_key_variable", "concurrency", "engine_python",
                 "engine_args", "tp", "json")
    for name in (*elsewhere, *(("model",) if config.engine != "endpoint" else ("device", "dtype"))):
        del settings[name]
    for name in ("batch_size", "kv_gib") if config.engine != "hf" else ():
        del settings[name]
    if config.engine == "endpoint":
        device = "endpoint"
    day = first_day(config.target) if config.engine != "endpoint" else ""  # an endpoint's template has its own
    return settings | ({DAY: day} if day else {}) | {
        "device": device.partition(":")[0], "input_sha256": file_sha256(config.prompts),
        "target": to_plain(read_spec(config.target))}


def _batches(dialogues: Sequence[Dialogue], config: RegenerateConfig, target: Target) -> list[list[Dialogue]]:
    """Dialogues of like length, as many as keys and values have room for."""
    text = target.model.config.get_text_config()
    heads = getattr(text, "num_key_value_heads", None) or text.num_attention_heads
    if getattr(text, "kv_lora_rank", None):  # MLA: transformers keeps every head's keys and values, written out
        widths = text.qk_nope_head_dim + text.qk_rope_head_dim + text.v_head_dim
    else:
        widths = 2 * (getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads)
    bytes_per_token = text.num_hidden_layers * heads * widths * target.model.dtype.itemsize
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
