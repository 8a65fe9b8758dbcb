"""Answers by servers, many conversations at a time: SGLang by token ids, or any OpenAI-compatible endpoint by text.

Rows are kept as they come, so that a kill costs what is in flight. Sampled answers depend on what else the server
computes, so only greedy ones come out the same again.
"""

from __future__ import annotations

import itertools
import json
import os
import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol

from eyas_contract.commands import Progress
from eyas_extract.answers import Answers, Row
from eyas_extract.config import RegenerateConfig
from eyas_extract.conversations import RowFault
from eyas_extract.dialogue import Dialogue
from eyas_extract.engine_process import Engine, EngineSettings
from eyas_extract.server import Refused, Server, ServerLost
from eyas_extract.template import ChatTemplate

KEEP_EVERY = 0.5  # seconds between two syncs of the output
PAUSES = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0)  # seconds, before a server that is gone is asked again
RUN_DIR = ".engine"
CLOSED = (401, 402, 404, 405, 407)  # HTTP: a wrong key, no credit, a wrong place. They would refuse every row


class Speaker(Protocol):
    """Gives the assistant's next message and its number of tokens."""

    def __call__(self, dialogue: Dialogue, number: int) -> tuple[dict[str, Any], int]: ...


@contextmanager
def speaker(config: RegenerateConfig, template: ChatTemplate, device: str, dtype: str) -> Iterator[Speaker]:
    """What answers: `--endpoint`, `--servers`, or an engine of our own for as long as the block lasts."""
    if config.endpoint:
        yield _by_endpoint(config)
    elif config.servers:
        yield _by_tokens([Server(url) for url in config.servers], config, template)
    else:
        run_dir = config.out.with_name(config.out.name + RUN_DIR)
        engine = Engine(EngineSettings(config.target, device.partition(":")[0], dtype, config.tp, config.engine_python,
                                       extra=config.engine_args), None, run_dir)
        try:
            yield _by_tokens([engine.server], config, template)
        finally:
            engine.stop()


def _by_tokens(servers: Sequence[Server], config: RegenerateConfig, template: ChatTemplate) -> Speaker:
    """SGLang, by its own `/generate`: the tokens that it made are kept."""
    turn = itertools.count()

    def speak(dialogue: Dialogue, number: int) -> tuple[dict[str, Any], int]:
        prompt = template.encode(template.render(dialogue.messages, dialogue.tools, prompt=True))
        sampling: dict[str, Any] = {"temperature": config.temperature, "top_p": config.top_p, "max_new_tokens":
                                    config.max_new_tokens, "stop_token_ids": sorted(template.stop_ids)}
        if config.top_k:
            sampling["top_k"] = config.top_k
        if config.temperature > 0:
            sampling["sampling_seed"] = config.seed * 1_000_003 + dialogue.line * 64 + number
        server = servers[next(turn) % len(servers)]
        ids = _patiently(lambda: _output_ids(server, {"input_ids": prompt, "sampling_params": sampling}))
        stopped = bool(ids) and ids[-1] in template.stop_ids
        return {"role": "assistant", "content": template.decode(ids[:-1] if stopped else ids), "output_ids": list(ids),
                "finish_reason": "stop" if stopped else "length"}, len(ids)

    return speak


def _by_endpoint(config: RegenerateConfig) -> Speaker:
    """Chat completions: reasoning and tool calls are kept as the endpoint tells them apart."""
    server = Server(config.endpoint, api_key=os.environ.get(config.api_key_variable, ""))

    def speak(dialogue: Dialogue, number: int) -> tuple[dict[str, Any], int]:
        body = {"model": config.model, "messages": [_sent(m) for m in dialogue.messages],
                "temperature": config.temperature, "top_p": config.top_p, "max_tokens": config.max_new_tokens,
                "seed": config.seed * 1_000_003 + dialogue.line * 64 + number}
        if dialogue.tools:
            body["tools"] = list(dialogue.tools)
        if config.top_k:
            body["top_k"] = config.top_k
        choice, count = _patiently(lambda: _choice(server, body))
        message = {"role": "assistant", "content": choice["message"].get("content") or "",
                   "finish_reason": choice.get("finish_reason")}
        reasoning = choice["message"].get("reasoning_content") or choice["message"].get("reasoning")
        if reasoning:
            message["reasoning_content"] = reasoning
        if choice["message"].get("tool_calls"):
            message["tool_calls"] = choice["message"]["tool_calls"]
        return message, count

    return speak


def _output_ids(server: Server, body: dict[str, Any]) -> list[int]:
    """The tokens of SGLang's answer. Raises ServerLost for an answer that is none or was cut off by an abort."""
    plain = server.post("/generate", body)
    ids, meta = (plain.get("output_ids"), plain.get("meta_info") or {}) if isinstance(plain, dict) else (None, {})
    if not isinstance(ids, list) or (meta.get("finish_reason") or {}).get("type") == "abort":
        raise _no_answer(server, plain)
    return ids


def _choice(server: Server, body: dict[str, Any]) -> tuple[dict[str, Any], int]:
    """The first choice of a chat completion and its number of tokens. Raises ServerLost as `_output_ids` does."""
    plain = server.post("/chat/completions", body)
    try:
        choice, count = plain["choices"][0], int((plain.get("usage") or {}).get("completion_tokens") or 0)
        if isinstance(choice["message"], dict) and choice.get("finish_reason") != "abort":
            return choice, count
    except (LookupError, TypeError, ValueError, AttributeError):
        pass
    raise _no_answer(server, plain)


def _no_answer(server: Server, plain: Any) -> ServerLost:
    return ServerLost(server.url, f"an aborted answer, or none: {json.dumps(plain)[:300]}", "a whole answer",
                      "See the server's log, and whether this is its URL.")


def _sent(message: dict[str, Any]) -> dict[str, Any]:
    """A message without what only we record."""
    return {key: value for key, value in message.items() if key not in ("output_ids", "finish_reason")}


def _patiently(ask: Callable[[], Any]) -> Any:
    """The answer, asked for again while the server is gone, busy or broken. Raises what it met last in the end."""
    for pause in PAUSES:
        try:
            return ask()
        except ServerLost:
            time.sleep(pause)
        except Refused as refusal:
            if not _passing(refusal):
                raise
            time.sleep(pause)
    return ask()


def _passing(refusal: Refused) -> bool:
    """Whether an error may be gone the next time, and does not concern the request."""
    return refusal.status in (408, 429) or refusal.status >= 500


def answer_all(dialogues: Sequence[Dialogue], answers: Answers, speak: Speaker, concurrency: int, progress: Progress
               ) -> int:
    """Answer what is not answered yet; returns the number of tokens made.

    Raises:
        EngineFailure: a server that is gone for good; what was answered is kept.
    """
    known = {int(row["line"]) for batch in answers.batches for row in batch}
    todo = iter([d for d in dialogues if d.line not in known])
    done: queue.SimpleQueue[tuple[Row, int] | BaseException | None] = queue.SimpleQueue()
    lock, stop = threading.Lock(), threading.Event()

    def work() -> None:
        while not stop.is_set():
            with lock:
                dialogue = next(todo, None)
            if dialogue is None:
                break
            try:
                done.put(_answered(dialogue, speak))
            except BaseException as error:
                done.put(error)
                break
        done.put(None)

    threads = [threading.Thread(target=work, daemon=True) for _ in range(concurrency)]
    for thread in threads:
        thread.start()
    try:
        return _keep(answers, done, len(threads), progress)
    finally:
        stop.set()


def _keep(answers: Answers, done: queue.SimpleQueue[tuple[Row, int] | BaseException | None], running: int,
          progress: Progress) -> int:
    """Write rows as they come, until every worker has ended."""
    rows: list[Row] = []
    tokens, start, kept = 0, time.monotonic(), time.monotonic()
    failure: BaseException | None = None
    while running:
        try:
            item = done.get(timeout=KEEP_EVERY)
        except queue.Empty:
            item = ()  # type: ignore[assignment]
        if item is None:
            running -= 1
        elif isinstance(item, BaseException):
            failure = failure or item
        elif item:
            rows.append(item[0])
            tokens += item[1]
            progress.update(1, f"{tokens / (time.monotonic() - start):,.0f} tokens/s")
        if rows and (not running or failure or time.monotonic() - kept > KEEP_EVERY):
            answers.append(rows)
            rows, kept = [], time.monotonic()
        if failure is not None:
            raise failure
    return tokens


def _answered(dialogue: Dialogue, speak: Speaker) -> tuple[Row, int]:
    """All turns of one conversation. A call of a tool ends it: nobody knows what the tool would say."""
    made = 0
    try:
        for number in itertools.count():
            message, count = speak(dialogue, number)
            dialogue.messages.append(message)
            made += count
            if not dialogue.later or message.get("tool_calls"):
                break
            dialogue.messages += dialogue.later.pop(0)
    except RowFault as fault:
        return {"line": dialogue.line, "id": dialogue.id, "reject": str(fault)}, made
    except Refused as refusal:
        if _passing(refusal) or refusal.status in CLOSED:
            raise
        return {"line": dialogue.line, "id": dialogue.id, "reject": f"the server refuses: {refusal.found[:300]}"}, made
    return {"line": dialogue.line, "id": dialogue.id, "messages": dialogue.messages,
            **({"tools": list(dialogue.tools)} if dialogue.tools else {})}, made
