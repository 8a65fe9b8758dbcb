"""`eyas-serve read-rounds`: acceptance from a list of rounds, every number with its definition."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from eyas_contract import InvalidInput
from eyas_contract.contract import read_json
from eyas_serve.acceptance import Acceptance

KEY = "accepted_draft_tokens_per_round"


@dataclass(frozen=True)
class ReadRoundsConfig:
    """Acceptance length and rates from rounds recorded elsewhere: two sources compared by one definition."""

    rounds: tyro.conf.Positional[Path]
    """JSON with accepted_draft_tokens_per_round, a number a round (or the list alone)."""
    meta: Path | None = None
    """JSON with completion_tokens and spec_verify_ct, as a server reports them."""


def read_rounds(config: ReadRoundsConfig) -> dict[str, dict[str, Any]]:
    """Name -> `value` and `definition`.

    Raises:
        InvalidInput: files that hold no such numbers.
    """
    plain = read_json(config.rounds, "rounds")
    rounds = plain.get(KEY) if isinstance(plain, dict) else plain
    if not isinstance(rounds, list) or not rounds or not all(type(n) is int and 0 <= n <= 1000 for n in rounds):
        raise InvalidInput(str(config.rounds), f"no {KEY}", "a list of numbers of accepted draft tokens, one a round",
                           "Write the rounds of one or more requests, in any order.")
    counts, steps = Counter(rounds), (plain.get("num_steps") or 0) if isinstance(plain, dict) else 0
    if type(steps) is not int or not 0 <= steps <= 1000:
        raise InvalidInput(str(config.rounds), f"num_steps {steps!r}", "the number of draft steps, or nothing",
                           "Correct it, or leave it out.")
    steps = max(max(rounds), steps)
    seen = Acceptance(tuple(counts[k] for k in range(steps + 1)))
    numbers: dict[str, tuple[Any, str]] = {
        "acceptance_length": (seen.length, "tokens a round, the target's bonus token counted: 1 + accepted / rounds, "
                                           "over all rounds (no mean of requests' ratios)"),
        "accepted_per_round": (seen.length - 1, "draft tokens accepted a round, the bonus token not counted"),
        "conditional_rates": (seen.conditional_rates(), "accepted at position k of those accepted at all positions "
                                                        "before it"),
        "plain_rates": (seen.plain_rates(), "accepted at position k of all rounds"),
        "rounds": (seen.rounds, "verifications by the target")}
    if config.meta is not None:
        numbers |= _of_server(config.meta)
    return {name: {"value": value, "definition": definition} for name, (value, definition) in numbers.items()}


def _of_server(path: Path) -> dict[str, tuple[Any, str]]:
    meta = read_json(path, "a server's counts")
    counts = [meta.get(name) if isinstance(meta, dict) else None for name in ("completion_tokens", "spec_verify_ct")]
    if not all(type(n) is int and n > 0 for n in counts):
        raise InvalidInput(str(path), "no completion_tokens and spec_verify_ct", "both, above 0",
                           "Take them from the answer's meta_info.")
    tokens, verified = int(counts[0] or 0), int(counts[1] or 0)
    return {"server_ratio": (tokens / verified, f"completion tokens / verifications, {tokens} / {verified}: SGLang's "
                                                "own figure; counts the first token too, which the prompt pass made"),
            "server_rounds_only": ((tokens - 1) / verified, f"({tokens} - 1) / {verified}: the rounds' tokens only")}


def text(numbers: dict[str, dict[str, Any]], as_json: bool) -> str:
    """One JSON object, or a line a number."""
    if as_json:
        return json.dumps(numbers, indent=1)
    width = max(map(len, numbers))
    lines = []
    for name, number in numbers.items():
        value = number["value"]
        shown = ", ".join(f"{v:.3f}" for v in value) if isinstance(value, list) else \
            f"{value:.3f}" if isinstance(value, float) else str(value)
        lines.append(f"{name:<{width}}  {shown:<22}  {number['definition']}")
    return "\n".join([*lines, "Ask of another source which of these its number is before comparing."])
