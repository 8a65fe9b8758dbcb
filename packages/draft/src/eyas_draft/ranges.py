"""Settings that cannot be: refused at once and together, before a command reads or writes anything."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from eyas_contract import InvalidInput
from eyas_draft.config import TrainConfig
from eyas_draft.ranks import Ranks

LEAST = {
    **dict.fromkeys(("num_layers", "ttt_steps", "epochs", "tokens_per_batch", "accumulate", "chain", "decode_tokens",
                     "gpus", "mean_length", "samples", "max_new_tokens", "batch_size"), 1),
    **dict.fromkeys(("vocab_size", "intermediate_size", "max_steps", "decode_prompts", "checkpoint_every", "keep",
                     "max_bad_samples", "max_bad_steps", "weight_decay", "log_seconds", "tokens", "flops_per_second",
                     "limit"), 0)}
"""Field -> its least value, which may be it."""

ABOVE_ZERO = ("lr", "clip")
SHARES = {**dict.fromkeys(("decay", "warmup", "final_lr"), (True, True)),
          **dict.fromkeys(("beta2", "holdout"), (True, False)),
          **dict.fromkeys(("fraction", "trained_share", "mfu"), (False, True))}
"""Field between 0 and 1 -> whether it may be 0, and whether it may be 1."""


def require_in_range(config: Any) -> None:
    """Look at every field of a subcommand's settings that has a range: those of one name mean the same everywhere.

    Raises:
        InvalidInput: numbers outside their ranges, all of them named.
    """
    faults = [(f"--{field.name.replace('_', '-')}", getattr(config, field.name), wanted)
              for field in dataclasses.fields(config)
              if (wanted := _wanted(field.name, getattr(config, field.name)))]
    if faults:
        raise InvalidInput("the settings", ", ".join(f"{flag} {value}" for flag, value, _ in faults),
                           "; ".join(f"{flag} {wanted}" for flag, _, wanted in faults), "Correct the flags.")


def require_possible(config: TrainConfig, ranks: Ranks) -> None:
    """Refuse what settings that are in range cannot be together, before anything is written. Raises InvalidInput."""
    if config.decode_prompts and not config.holdout:
        raise InvalidInput("--decode-prompts", f"{config.decode_prompts}, with --holdout 0", "samples held out, whose "
                           "prompts are decoded", "Give a --holdout above 0, or leave --decode-prompts at 0.")
    if config.accumulate < ranks.world:
        raise InvalidInput("--accumulate", f"{config.accumulate}, with {ranks.world} processes",
                           "a batch of every step for each process",
                           f"Give {ranks.world} or a multiple, or start fewer processes.")
    if config.shapes != "fixed":
        return
    if config.accumulate % ranks.world:
        raise InvalidInput("--accumulate", f"{config.accumulate}, with {ranks.world} processes",
                           "as many batches for each, by --shapes fixed", "Give a multiple, or leave --shapes at auto.")
    if ranks.device.type == "cuda" and config.precision != "bf16":
        raise InvalidInput("--shapes", f"fixed, in {config.precision} on a GPU", "bf16, or ragged shapes",
                           "Give --precision bf16, or leave --shapes at auto.")


def _wanted(name: str, value: Any) -> str:
    """What a field's value should be; empty where it is that, or where any will do."""
    if name in LEAST:
        return "" if LEAST[name] <= value < math.inf else f"at least {LEAST[name]}"
    if name in ABOVE_ZERO:
        return "" if 0 < value < math.inf else "above 0"
    if name in SHARES:
        zero, one = SHARES[name]
        inside = 0 < value < 1 or (zero and value == 0) or (one and value == 1)
        return "" if inside else f"{'at least' if zero else 'above'} 0 and {'at most' if one else 'below'} 1"
    return ""
