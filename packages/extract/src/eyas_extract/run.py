"""The extraction loop: conversations -> samples -> states -> shards, continued where it stopped.

A shard's samples follow from the input's order and the settings, and its batches from its samples, so an interrupted
run and an undisturbed one write the same bytes.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from eyas_contract import (
    CaptureSpec,
    Contract,
    InvalidInput,
    SampleRecord,
    TargetSpec,
    default_aux_layer_ids,
    store_tensors,
)
from eyas_contract.commands import Progress, save_config
from eyas_extract.capture import Capture, States
from eyas_extract.config import RunConfig
from eyas_extract.conversations import Reject, by_reason, count_lines, file_sha256, none_left
from eyas_extract.dtypes import STORE_DTYPES
from eyas_extract.inside.gather import by_torch
from eyas_extract.mask import Sample
from eyas_extract.pending import settled, shards
from eyas_extract.store import LONGEST, Source, StoreWriter
from eyas_extract.target import DTYPES, Target, load_target, pick_device, positions, read_spec, stop_ids
from eyas_extract.template import DAY, ChatTemplate, first_day
from eyas_extract.values import layer_fault


@dataclass(frozen=True)
class Summary:
    """What a store holds after a run.

    Attributes:
        rows: input lines.
        samples, tokens, trained_tokens: kept; trained are those with loss mask 1.
        rejected: reason (numbers as N) and how often.
        bytes: of all shards.
        check: what the first check of the target found; empty where nothing was left to do.
        new_tokens, seconds: of this run.
    """

    rows: int
    samples: int
    tokens: int
    trained_tokens: int
    rejected: dict[str, int]
    bytes: int
    check: str
    new_tokens: int
    seconds: float


def run(config: RunConfig) -> Summary:
    """Extract everything that is not in the store yet.

    Raises:
        EyasError: unusable input, a store of something else, a target that cannot be captured, a full disk, or not
            one row that can be trained on.
    """
    started = time.monotonic()
    device = pick_device(config.device)
    contract, source = describe(config, device)
    template = ChatTemplate(config.target, sorted(stop_ids(config.target)))
    writer = StoreWriter(config.out, contract, source)
    try:
        save_config(config, config.out)
        config = settled(config, template, writer.source)
        if LONGEST in writer.source and not writer.manifest.complete:
            say_limit(config, contract.target)
        already, check = writer.manifest.num_tokens, ""
        if not writer.manifest.complete:
            if config.engine == "sglang":
                from eyas_extract.engine_run import extract as by_engine

                check = by_engine(config, device, template, writer)
            else:
                check = _extract(config, device, template, writer)
        rows = count_lines(config.data)
        return _summary(writer, rows, check, already, time.monotonic() - started, config)
    finally:
        writer.close()


def describe(config: RunConfig, device: str) -> tuple[Contract, Source]:
    """The contract of what will be stored, and every setting that its bytes depend on.

    Raises:
        InvalidInput: no target, or settings that do not fit it (all named).
    """
    spec = read_spec(config.target)
    capture, dtype = stored_capture(config, spec)
    source: Source = {"input_sha256": file_sha256(config.data), "overlong": config.overlong,
                      "shard_tokens": config.shard_tokens, "batch_tokens": config.batch_tokens,
                      "model_dtype": dtype, "device": device.partition(":")[0]}
    if config.engine == "sglang":
        del source["batch_tokens"]
        source["engine"] = "sglang"
    limit = positions(spec) - (config.engine == "sglang")  # SGLang takes no prompt that leaves no room for an answer
    if 0 < limit < config.max_length:
        source[LONGEST] = limit
    if day := first_day(config.target, config.data):
        source[DAY] = day
    return Contract(spec, capture), source


def say_limit(config: RunConfig, spec: TargetSpec) -> None:
    """Say that the target's positions, not --max-length, bound the samples."""
    fate = "left out" if config.overlong == "reject" else "cut"
    print(f"samples of more than {config.max_length} tokens are {fate}: the target has {positions(spec)} positions",  # noqa: T201
          file=sys.stderr)


def stored_capture(config: RunConfig, spec: TargetSpec) -> tuple[CaptureSpec, str]:
    """What will be stored of a target, and the dtype that its weights are computed in.

    Raises:
        InvalidInput: settings that do not fit it (all named).
    """
    dtype = spec.dtype if config.dtype == "auto" else config.dtype
    names = {"bf16": "BF16", "fp16": "F16", "fp32": "F32", "fp8": "F8_E4M3", "bfloat16": "BF16", "float16": "F16",
             "float32": "F32"}
    least = {"max_length": 2, "shard_tokens": 2, "batch_tokens": 2, "engines": 1, "tp": 1, "ahead": 1, "encoders": 0}
    faults = [f"{name} {value}" for name, fewest in least.items() if (value := getattr(config, name)) < fewest]
    aux = config.aux_layers
    try:
        aux = aux or default_aux_layer_ids(spec.num_layers)
    except ValueError as error:
        faults.append(str(error))
    if aux and (list(aux) != sorted(set(aux)) or aux[0] < 0 or aux[-1] >= spec.num_layers):
        faults.append(f"aux_layers {list(aux)} in a target of {spec.num_layers} layers")
    if dtype not in DTYPES:
        faults.append(f"weights of dtype {dtype}: name one with --dtype")
    if faults:
        raise InvalidInput("settings", "; ".join(faults), "at least 2 tokens, one engine, rank and shard ahead, and "
                           "ascending layers within the target", "Correct the flags.")
    stored = names[dtype if config.store_dtype == "auto" else config.store_dtype]
    return CaptureSpec(tuple(aux), spec.hidden_size, "pre_norm", store_tensors(stored), config.max_length), dtype


def _extract(config: RunConfig, device: str, template: ChatTemplate, writer: StoreWriter) -> str:
    """Make and commit the shards that are missing; returns what the target's check found."""
    target: Target | None = None
    check = ""
    progress = Progress(count_lines(config.data), "rows", "extract", already=writer.next_line - 1)
    dtype = STORE_DTYPES[writer.contract.capture.tensors[2].dtype]
    kept: list[Reject] = []
    for pending in shards(config, template, writer.next_line, progress):
        if pending.samples:
            if target is None:
                target = load_target(config.target, device, config.dtype)
                with Capture(target, writer.contract.capture.aux_layer_ids) as capture:
                    check = capture.check(pending.samples[0].input_ids)
            with Capture(target, writer.contract.capture.aux_layer_ids) as capture:
                tensors, records, faulty = fill(capture, pending.samples, config.batch_tokens, dtype, progress)
            pending.rejects += faulty
            pending.rejects.sort(key=lambda r: r.line)
            if records:
                writer.commit(tensors, records, [*kept, *pending.rejects], pending.next_line)
                kept.clear()
                continue
        kept += pending.rejects
    writer.finish(kept)
    progress.close(f"{writer.manifest.num_tokens:,} tokens")
    return check


def batches(samples: Sequence[Sample], batch_tokens: int) -> list[list[int]]:
    """Numbers of samples that go through the target together: of like length, at most `batch_tokens` with padding."""
    result: list[list[int]] = []
    for index in sorted(range(len(samples)), key=lambda i: (len(samples[i].input_ids), i)):
        width = len(samples[index].input_ids)
        if result and (len(result[-1]) + 1) * width <= batch_tokens:
            result[-1].append(index)
        else:
            result.append([index])
    return result


def fill(capture: Capture, samples: Sequence[Sample], batch_tokens: int, dtype: torch.dtype,
         progress: Progress | None = None) -> tuple[dict[str, torch.Tensor], list[SampleRecord], list[Reject]]:
    """One shard's tensors and records, and rejects for samples whose states cannot be used.

    Args:
        dtype: of the stored states; e4m3 has a scale for each layer and token.
    """
    lengths = [len(s.input_ids) for s in samples]
    bounds = [0, *accumulate(lengths)]
    width = (len(capture.aux_layer_ids) + 1) * capture.target.spec.hidden_size
    states = torch.empty(bounds[-1], width, dtype=dtype)
    scales = torch.empty(bounds[-1], len(capture.aux_layer_ids) + 1)
    faults: dict[int, str] = {}
    start, done = time.monotonic(), 0
    for batch in batches(samples, batch_tokens):
        out = capture.states([samples[i].input_ids for i in batch])
        together, scaled = stored_states(out, dtype)
        for row, i in enumerate(batch):
            states[bounds[i]:bounds[i + 1]] = together[row, :lengths[i]]
            if scaled is not None:
                scales[bounds[i]:bounds[i + 1]] = scaled[row, :lengths[i]]
            fault = state_fault(states[bounds[i]:bounds[i + 1]], capture)
            if fault:
                faults[i] = fault
        done += sum(lengths[i] for i in batch)
        if progress:
            progress.update(len(batch), f"{done / (time.monotonic() - start):,.0f} tokens/s")
    good = [i for i in range(len(samples)) if i not in faults]
    if faults:
        states, scales = (torch.cat([each[bounds[i]:bounds[i + 1]] for i in good] or [each[:0]])
                          for each in (states, scales))
    split = width - capture.target.spec.hidden_size
    tensors = {
        "input_ids": torch.tensor([t for i in good for t in samples[i].input_ids], dtype=torch.int32),
        "loss_mask": torch.tensor([m for i in good for m in samples[i].loss_mask], dtype=torch.uint8),
        "aux_hidden_states": states[:, :split], "last_hidden_state": states[:, split:],
        **({"aux_scales": scales[:, :-1], "last_scale": scales[:, -1:]} if dtype == torch.float8_e4m3fn else {}),
        "sample_offsets": torch.tensor([0, *accumulate(lengths[i] for i in good)], dtype=torch.int64)}
    records = [SampleRecord(samples[i].id, lengths[i], samples[i].trained) for i in good]
    return tensors, records, [Reject(samples[i].line, samples[i].id, faults[i]) for i in sorted(faults)]


def stored_states(out: States, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """A batch's states [B, L, (K+1)*H] as they are stored, on the CPU, and of e4m3 the scales [B, L, K+1]."""
    layers = [*out.aux, out.last]
    if dtype != torch.float8_e4m3fn:
        return torch.cat(layers, dim=-1).to(dtype).cpu(), None
    rows, length, width = out.last.shape
    together = torch.empty(rows * length, len(layers) * width, dtype=dtype, device=out.last.device)
    scales = torch.empty(len(layers), rows * length, device=out.last.device)
    by_torch([layer.flatten(0, 1) for layer in layers], together, scales)
    return together.view(rows, length, -1).cpu(), scales.T.reshape(rows, length, -1).cpu()


def state_fault(states: torch.Tensor, capture: Capture) -> str:
    """Why states [T, (K+1)*H] cannot be trained on: which holds how many bad values; or empty."""
    names = [*(f"layer {k}" for k in capture.aux_layer_ids), "the last layer"]
    parts = states.chunk(len(names), dim=1)
    return "; ".join(filter(None, map(layer_fault, parts, names)))


def _summary(writer: StoreWriter, rows: int, check: str, already: int, seconds: float, config: RunConfig) -> Summary:
    manifest = writer.manifest
    if not manifest.num_samples:
        raise none_left(config.data, "trained on", writer.rejects,
                        f"rows with an assistant turn within max_length {config.max_length}",
                        f"{config.out / 'rejects.jsonl'} names each row's reason; `eyas-extract regenerate` answers "
                        "prompts.")
    return Summary(rows, manifest.num_samples, manifest.num_tokens, manifest.num_trained,
                   dict(by_reason(writer.rejects).most_common()), sum(s.bytes for s in manifest.shards), check,
                   manifest.num_tokens - already, round(seconds, 3))
