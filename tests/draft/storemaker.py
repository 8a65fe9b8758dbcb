"""Makes a store from the tiny target with Hugging Face alone, so that these tests need no other package."""

from __future__ import annotations

from pathlib import Path

import torch
import xxhash
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import tiny
from eyas_contract import (
    CaptureSpec,
    Contract,
    Manifest,
    SampleRecord,
    ShardRecord,
    TargetSpec,
    TensorRecord,
    default_aux_layer_ids,
    store_tensors,
)
from eyas_contract.safetensors_header import read_header

Row = tuple[str, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


@torch.no_grad()
def answered_rows(target: Path, count: int, seed: int, max_new: int = 24) -> list[Row]:
    """(id, ids, mask, aux, last) of greedy answers to `count` prompts, float32."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    aux_ids = default_aux_layer_ids(model.config.num_hidden_layers)
    states: dict[str, torch.Tensor] = {}
    model.model.norm.register_forward_pre_hook(lambda _m, args: states.update(last=args[0]))
    rows = []
    for row in tiny.conversations(count, seed):
        prompt = tokenizer.apply_chat_template(row["messages"], add_generation_prompt=True, return_tensors="pt",
                                               return_dict=True)["input_ids"]
        ids = model.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), do_sample=False,
                             max_new_tokens=max_new)
        out = model(ids, output_hidden_states=True)
        aux = torch.cat([out.hidden_states[k + 1][0] for k in aux_ids], dim=-1)
        mask = torch.zeros(ids.shape[1], dtype=torch.uint8)
        mask[prompt.shape[1]:] = 1
        rows.append((str(row["id"]), ids[0].to(torch.int32), mask, aux, states["last"][0]))
    return rows


def quantised(states: torch.Tensor, layers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """e4m3 values and a float32 scale for each row and layer, the largest magnitude at 448."""
    parts = states.view(len(states), layers, -1)
    scales = parts.abs().amax(-1) / 448
    return (parts / scales[:, :, None]).view(states.shape).to(torch.float8_e4m3fn), scales


def state_tensors(part: list[Row], dtype: str, layers: int) -> dict[str, torch.Tensor]:
    """Of a shard, by the store's names."""
    aux, last = torch.cat([row[3] for row in part]), torch.cat([row[4] for row in part])
    if dtype == "F32":
        return {"aux_hidden_states": aux, "last_hidden_state": last}
    (aux, aux_scales), (last, last_scale) = quantised(aux, layers), quantised(last, 1)
    return {"aux_hidden_states": aux, "last_hidden_state": last, "aux_scales": aux_scales, "last_scale": last_scale}


def write_store(folder: Path, target: Path, rows: list[Row], per_shard: int = 8, dtype: str = "F32") -> Path:
    """Write rows as a store of states in F32 or F8_E4M3; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    spec = TargetSpec.from_folder(target)
    capture = CaptureSpec(default_aux_layer_ids(spec.num_layers), spec.hidden_size, "pre_norm", store_tensors(dtype),
                          512)
    contract = Contract(spec, capture)
    contract.save(folder)
    digests = contract.digests()
    shards = []
    for number, start in enumerate(range(0, len(rows), per_shard)):
        part = rows[start:start + per_shard]
        sizes = torch.tensor([row[1].numel() for row in part])
        path = folder / f"shard-{number:06d}.safetensors"
        save_file({
            "input_ids": torch.cat([r[1] for r in part]), "loss_mask": torch.cat([r[2] for r in part]),
            **state_tensors(part, dtype, len(capture.aux_layer_ids)),
            "sample_offsets": torch.cat((torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)))}, path, metadata=digests)
        shards.append(shard_record(path, part))
    Manifest(tuple(sorted(digests.items())), "0" * 64, True, tuple(shards)).save(folder)
    return folder


def shard_record(path: Path, part: list[Row]) -> ShardRecord:
    """The manifest's record of a shard as it lies on disk."""
    raw, tensors = path.read_bytes(), []
    for info in read_header(path).tensors.values():
        tensors.append(TensorRecord(info.name, info.dtype, info.shape,
                                    xxh3_128=xxhash.xxh3_128(raw[info.start:info.end]).hexdigest()))
    samples = tuple(SampleRecord(r[0], r[1].numel(), int(r[2].sum())) for r in part)
    return ShardRecord(path.name, len(raw), tuple(tensors), samples)
