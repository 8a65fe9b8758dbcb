"""`eyas-serve watch URL`: acceptance and throughput of a running server, from its Prometheus metrics."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import tyro

from eyas_contract import EngineFailure
from eyas_serve.client import Client

API_KEY = "EYAS_API_KEY"
ALARM = 3
_LINE = re.compile(r"^(sglang[:_][\w:]+)(\{[^}]*\})?\s+(\S+)", re.MULTILINE)
# With priorities SGLang gives of these each one's share beside the whole; counters it gives by priority alone.
_SHARE = re.compile(r'sglang[:_]num_(?:running|queue)_reqs\{(?:.*,)?priority="[^"]')


@dataclass(frozen=True)
class WatchConfig:
    """Watch a server started with --metrics. Exit code 3 after an alarm with --stop-on-alarm."""

    url: tyro.conf.Positional[str]
    """The server's address. A key for it is read from EYAS_API_KEY."""
    every: float = 5.0
    """Seconds between two looks."""
    floor: float = 1.2
    """Alarm where the acceptance length stays below this: chat template, tokenizer or prompts have drifted."""
    patience: int = 3
    """So many looks in a row, with traffic and below the floor, or without an answer, make an alarm."""
    looks: int = 0
    """End after so many; 0 goes on."""
    stop_on_alarm: bool = False
    """End at the first alarm."""


@dataclass(frozen=True)
class Look:
    """The metrics at one moment; counters since the server's start, summed over its replicas."""

    time: float
    tokens: float
    rounds: float
    length: float | None
    running: float
    queued: float
    cache: float


def parse(text: str, now: float) -> Look:
    """Prometheus text -> a Look. Raises EngineFailure where it is no SGLang's."""
    values: dict[str, list[float]] = {}
    for name, labels, value in _LINE.findall(text):
        if not _SHARE.match(name + labels):
            values.setdefault(name.replace("sglang_", "sglang:"), []).append(float(value))

    def total(name: str) -> float:
        return sum(values.get(f"sglang:{name}", []))

    if not values:
        raise EngineFailure("/metrics", "no metric of SGLang", "a server started with --metrics, by eyas-serve watch",
                            "Start it with eyas-serve launch, or with --enable-metrics.")
    lengths = [value for value in values.get("sglang:spec_accept_length", []) if value > 0]
    return Look(now, total("generation_tokens_total"), total("spec_verify_calls_total"),
                sum(lengths) / len(lengths) if lengths else None, total("num_running_reqs"), total("num_queue_reqs"),
                max(values.get("sglang:token_usage", [0.0])))


@dataclass
class Alarm:
    """Counts looks below the floor; a look without traffic says nothing."""

    floor: float
    patience: int
    low: int = 0

    def look(self, length: float | None, traffic: bool) -> bool:
        """Whether this look completes an alarm."""
        if length is None or not traffic:
            return False
        self.low = self.low + 1 if length < self.floor else 0
        return self.low >= self.patience


def restarted(before: Look, now: Look) -> bool:
    """Whether a counter went back: the server, or one of its replicas, began anew between the two looks."""
    return now.tokens < before.tokens or now.rounds < before.rounds


def interval(before: Look, now: Look) -> tuple[float | None, float | None]:
    """Tokens/s and acceptance length between two looks: the engine's own average, else tokens over rounds.

    After a restart there are no tokens/s: when the counters began anew is unknown.
    """
    if restarted(before, now):
        return None, now.length
    rate = (now.tokens - before.tokens) / max(now.time - before.time, 1e-9)
    rounds = now.rounds - before.rounds
    return rate, now.length if now.length is not None else (now.tokens - before.tokens) / rounds if rounds > 0 else None


def watch(config: WatchConfig, say: Callable[[str], None], as_json: bool) -> int:
    """Until interrupted, `looks` are done or an alarm stops it. A server that answered once may be gone for a while.

    Raises:
        EngineFailure: no metrics at the first look.
    """
    client = Client(config.url, timeout=10, api_key=os.environ.get(API_KEY, ""))
    alarm = Alarm(config.floor, config.patience)
    before, seen, missed = look(client), 0, 0
    while True:
        time.sleep(config.every)
        seen += 1
        try:
            now, missed = look(client), 0
        except EngineFailure as error:
            missed, alarm.low = missed + 1, 0
            rang = missed >= config.patience
            _say_missed(say, as_json, error, missed, rang)
        else:
            rang = _say_look(say, as_json, before, now, alarm)
            before = now
        if rang and config.stop_on_alarm:
            return ALARM
        if config.looks and seen >= config.looks:
            return 0


def _say_missed(say: Callable[[str], None], as_json: bool, error: EngineFailure, missed: int, rang: bool) -> None:
    if as_json:
        say(json.dumps({"time": time.time(), "tokens_per_second": None, "acceptance_length": None, "running": None,
                        "queued": None, "kv_usage": None, "alarm": rang, "restarted": False, "down": error.found}))
    else:
        say(f"{'ALARM' if rang else 'DOWN'}: no metrics at {missed} look{'s' * (missed > 1)} in a row: {error.found}")


def _say_look(say: Callable[[str], None], as_json: bool, before: Look, now: Look, alarm: Alarm) -> bool:
    """Whether the alarm rang."""
    anew, (rate, length) = restarted(before, now), interval(before, now)
    if anew:
        alarm.low = 0  # what was low was another run of the server
    rang = alarm.look(length, bool(rate))
    if as_json:
        say(json.dumps({"time": time.time(), "tokens_per_second": rate, "acceptance_length": length,
                        "running": now.running, "queued": now.queued, "kv_usage": now.cache, "alarm": rang,
                        "restarted": anew, "down": None}))
        return rang
    speed, shown = "-" if rate is None else f"{rate:.1f}", "-" if length is None else f"{length:.2f}"
    say(f"{time.strftime('%H:%M:%S')}  {speed:>9} tokens/s  acceptance length {shown:>5}  {now.running:.0f} "
        f"running, {now.queued:.0f} queued, KV cache {100 * now.cache:.0f} % full")
    if anew:
        say("RESTART: the server's counters went back: it was started anew since the look before. When is unknown, so "
            "this look has no tokens/s.")
    if rang:
        say(f"ALARM: acceptance length {length:.2f} below {alarm.floor:.2f} for {alarm.low} looks: have the chat "
            "template, the tokenizer, the target or the prompts changed? `eyas-serve probe` says whether the draft is "
            "well.")
    return rang


def look(client: Client) -> Look:
    """Ask now."""
    status, content = client.get("/metrics")
    if status != 200:
        raise EngineFailure(client.url, f"HTTP {status} for /metrics", "metrics, by eyas-serve watch",
                            "Start the server with --metrics.")
    return parse(content.decode("utf-8", "replace"), time.monotonic())
