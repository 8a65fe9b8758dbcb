"""What a run will need: bytes a token, all bytes, disk, time. Reads the input as a run does, and writes nothing."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from eyas_contract import CaptureSpec
from eyas_extract.capture import Capture
from eyas_extract.config import PlanConfig
from eyas_extract.dtypes import STORE_DTYPES
from eyas_extract.mask import Sample
from eyas_extract.pending import settled, shards
from eyas_extract.run import batches, describe, fill, say_limit
from eyas_extract.store import LONGEST
from eyas_extract.target import load_target, pick_device, stop_ids
from eyas_extract.template import ChatTemplate

WIDTHS = {"BF16": 2, "F16": 2, "F32": 4, "I32": 4, "I64": 8, "U8": 1, "F8_E4M3": 1}


@dataclass(frozen=True)
class Plan:
    """The answer.

    Attributes:
        samples, tokens, trained_tokens, rejected: of the input.
        bytes_per_token, bytes: of the store.
        free_bytes: on its disk.
        fits: whether that is enough.
        tokens_per_second, seconds: measured on one batch; 0 without a probe.
    """

    samples: int
    tokens: int
    trained_tokens: int
    rejected: int
    bytes_per_token: int
    bytes: int
    free_bytes: int
    fits: bool
    tokens_per_second: float
    seconds: float


def plan(config: PlanConfig) -> Plan:
    """Count the input, compute the sizes, time one batch. Raises EyasError as `run` does."""
    device = pick_device(config.device)
    contract, source = describe(config, device)
    template = ChatTemplate(config.target, sorted(stop_ids(config.target)))
    config = settled(config, template, source)
    if LONGEST in source:
        say_limit(config, contract.target)
    samples = tokens = trained = rejected = 0
    first: list[Sample] = []
    for pending in shards(config, template, 1):
        first = first or pending.samples
        samples, tokens = samples + len(pending.samples), tokens + pending.tokens
        trained, rejected = trained + sum(s.trained for s in pending.samples), rejected + len(pending.rejects)
    each = bytes_per_token(contract.capture)
    total, free = each * tokens + 8 * samples, shutil.disk_usage(_existing(config.out)).free
    rate = _probe(config, device, contract.capture, first) if config.probe and first else 0.0
    return Plan(samples, tokens, trained, rejected, each, total, free, total < free, round(rate, 1),
                round(tokens / rate, 1) if rate else 0.0)


def bytes_per_token(capture: CaptureSpec) -> int:
    """Bytes of all tensors that have an axis of tokens."""
    sizes = {"K*H": capture.aux_width, "H": capture.hidden_size, "K": len(capture.aux_layer_ids)}
    return sum(WIDTHS[spec.dtype] * (sizes.get(spec.dims[1], 1) if len(spec.dims) > 1 else 1)
               for spec in capture.tensors if spec.dims[0] == "T")


def _existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path


def _probe(config: PlanConfig, device: str, stored: CaptureSpec, samples: Sequence[Sample]) -> float:
    """Tokens a second of the middle batch, after one that warms up."""
    target = load_target(config.target, device, config.dtype)
    groups = batches(samples, config.batch_tokens)
    chosen = [samples[i] for i in groups[len(groups) // 2]]
    with Capture(target, stored.aux_layer_ids) as capture:
        capture.check(chosen[0].input_ids)
        start = time.perf_counter()
        fill(capture, chosen, config.batch_tokens, STORE_DTYPES[stored.tensors[2].dtype])
    return sum(len(s.input_ids) for s in chosen) / (time.perf_counter() - start)
