"""Token ids -> a store, for `train_h200.py`: one forward pass of the Hugging Face target, all arithmetic on its device.

Prompts and answers are the engine's own token ids, so nothing has to be tokenised or proved again.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from eyas_contract import (
    CaptureSpec,
    Contract,
    Manifest,
    SampleRecord,
    ShardRecord,
    TargetSpec,
    default_aux_layer_ids,
    store_tensors,
)
from eyas_extract.store import write_safetensors

Row = tuple[str, list[int], list[int]]
"""(id, prompt ids, answer ids)."""

BATCH_TOKENS, SHARD_TOKENS = 65536, 262144


@torch.inference_mode()
def write_store(folder: Path, target: Path, rows: Sequence[Row], device: str) -> dict[str, Any]:
    """Write the states of rows as a store; returns tokens, seconds and bytes."""
    begun = time.monotonic()
    folder.mkdir(parents=True, exist_ok=True)
    spec = TargetSpec.from_folder(target)
    dtype = torch.bfloat16 if device.startswith("cuda") else torch.float32
    capture = CaptureSpec(default_aux_layer_ids(spec.num_layers), spec.hidden_size, "pre_norm",
                          store_tensors("BF16" if dtype == torch.bfloat16 else "F32"), 4096)
    contract = Contract(spec, capture)
    contract.save(folder)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=dtype).to(device).eval()
    taken: dict[int, torch.Tensor] = {}
    layers = model.get_decoder().layers
    wanted = [*capture.aux_layer_ids, spec.num_layers - 1]

    def keeper(k: int) -> Any:
        def keep(_module: Any, _inputs: Any, output: Any) -> None:
            taken[k] = output[0] if isinstance(output, tuple) else output
        return keep
    for k in set(wanted):
        layers[k].register_forward_hook(keeper(k))
    loaded = time.monotonic()
    shards: list[Future[ShardRecord]] = []
    lengths = {i: len(rows[i][1]) + len(rows[i][2]) for i in range(len(rows))}
    order = sorted(range(len(rows)), key=lambda i: (lengths[i], i))
    with ThreadPoolExecutor(4) as pool:
        pending: list[tuple[list[int], torch.Tensor]] = []
        for batch in batches(order, lengths):
            ids = [rows[i][1] + rows[i][2] for i in batch]
            width = max(map(len, ids))
            padded = torch.tensor([[*one, *[0] * (width - len(one))] for one in ids], device=device)
            model.get_decoder()(input_ids=padded, use_cache=False)
            valid = torch.arange(width, device=device) < torch.tensor([len(one) for one in ids], device=device)[:, None]
            states = torch.cat([taken[k][valid] for k in wanted], dim=-1)  # [T, (K+1)*H]
            if not bool(torch.isfinite(states).all()):
                raise RuntimeError("states that are not finite")
            pending.append((batch, states.cpu()))
            if sum(s.shape[0] for _, s in pending) >= SHARD_TOKENS:
                shards.append(pool.submit(write_shard, folder, len(shards), contract, rows, pending))
                pending = []
        if pending:
            shards.append(pool.submit(write_shard, folder, len(shards), contract, rows, pending))
        records = tuple(shard.result() for shard in shards)
    Manifest(tuple(sorted(contract.digests().items())), "0" * 64, True, records).save(folder)
    seconds, tokens = time.monotonic() - loaded, sum(lengths.values())
    return {"samples": len(rows), "tokens": tokens, "answer_tokens": sum(len(r[2]) for r in rows),
            "seconds": round(seconds, 2), "load_seconds": round(loaded - begun, 2),
            "tokens_per_second": round(tokens / seconds), "bytes": sum(r.bytes for r in records)}


def batches(order: Sequence[int], lengths: dict[int, int]) -> list[list[int]]:
    """Samples of like length, at most BATCH_TOKENS with padding."""
    result: list[list[int]] = []
    for i in order:
        if result and (len(result[-1]) + 1) * lengths[i] <= BATCH_TOKENS:
            result[-1].append(i)
        else:
            result.append([i])
    return result


def write_shard(folder: Path, number: int, contract: Contract, rows: Sequence[Row],
                pending: Sequence[tuple[list[int], torch.Tensor]]) -> ShardRecord:
    """One shard of whole batches, hashed while it is written."""
    numbers = [i for batch, _ in pending for i in batch]
    states = torch.cat([s for _, s in pending]) if len(pending) > 1 else pending[0][1]
    split = states.shape[1] - contract.target.hidden_size
    sizes = torch.tensor([len(rows[i][1]) + len(rows[i][2]) for i in numbers])
    tensors = {
        "input_ids": torch.tensor([t for i in numbers for t in rows[i][1] + rows[i][2]], dtype=torch.int32),
        "loss_mask": torch.tensor([m for i in numbers for m in [0] * len(rows[i][1]) + [1] * len(rows[i][2])],
                                  dtype=torch.uint8),
        "aux_hidden_states": states[:, :split].contiguous(), "last_hidden_state": states[:, split:].contiguous(),
        "sample_offsets": torch.cat((torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)))}
    path = folder / f"shard-{number:06d}.safetensors"
    records, size = write_safetensors(path, tensors, contract.digests())
    return ShardRecord(path.name, size, records, tuple(
        SampleRecord(rows[i][0], len(rows[i][1]) + len(rows[i][2]), len(rows[i][2])) for i in numbers))
