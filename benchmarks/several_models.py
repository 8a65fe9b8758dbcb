"""Targets whose heads divide by the number of ranks, for `several_gpus.sh`.

SGLang shares query heads out evenly (`LlamaAttention` asserts it) and repeats key/value heads only where there are
fewer of them than ranks, so on GPUs SmolLM2-135M (9 query heads on 3) takes 1 or 3 ranks alone. (On a CPU SGLang pads
the heads by itself.) Two ways out: a wide target of random weights, for the capture; and for serving, where the text
must make sense, the given target with further groups of heads whose weights are zero, which computes the same.
"""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from eyas_contract import Contract, TargetSpec
from eyas_contract.contract import FILE_NAME
from eyas_contract.target import read_config

HEADS = 8  # key/value heads of the random target: 1, 2, 4 and 8 ranks divide them


def random_target(folder: Path, tokenizer: Path, wide: bool) -> Path:
    """A Llama of random weights with another target's tokenizer: 0.8 billion parameters in bf16, or tiny in fp32."""
    torch.manual_seed(0)
    words = AutoTokenizer.from_pretrained(tokenizer)
    hidden, inner, layers, head = (2048, 5632, 12, 128) if wide else (256, 512, 8, 16)
    config = LlamaConfig(
        vocab_size=TargetSpec.from_folder(tokenizer).vocab_size, hidden_size=hidden, intermediate_size=inner,
        num_hidden_layers=layers, num_attention_heads=2 * HEADS, num_key_value_heads=HEADS, head_dim=head,
        max_position_embeddings=8192, tie_word_embeddings=False, bos_token_id=None, eos_token_id=words.eos_token_id,
        pad_token_id=words.pad_token_id)
    with torch.device("cuda" if wide else "cpu"):
        model = LlamaForCausalLM(config)
    model.to(torch.bfloat16 if wide else torch.float32).save_pretrained(folder)
    words.save_pretrained(folder)
    return folder


def kv_heads(folder: Path) -> int:
    """Key/value heads of a model."""
    config = read_config(folder)
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def padded(source: Path, folder: Path, heads: int) -> Path:
    """A copy of a Llama, or of its draft, with `heads` key/value heads: the further groups are zero, so that what they
    add is nothing."""
    shutil.copytree(source, folder, ignore=shutil.ignore_patterns("*.safetensors*", "golden.*", "model*.bin"))
    config = read_config(source)
    queries, before = int(config["num_attention_heads"]), kv_heads(source)
    width = int(config.get("head_dim") or config["hidden_size"] // queries)
    rows = {"q_proj": heads * queries // before * width, "k_proj": heads * width, "v_proj": heads * width}
    weights = {name: value for file in sorted(source.glob("*.safetensors")) for name, value in load_file(file).items()}
    for name, value in weights.items():
        kind = name.split(".")[-2] if "self_attn" in name else ""
        if kind in rows:
            weights[name] = torch.cat((value, value.new_zeros(rows[kind] - value.shape[0], value.shape[1])))
        elif kind == "o_proj":
            weights[name] = torch.cat((value, value.new_zeros(value.shape[0], rows["q_proj"] - value.shape[1])), dim=1)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config |= {"num_attention_heads": heads * queries // before, "num_key_value_heads": heads, "head_dim": width}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    return folder


def padded_pair(target: Path, draft: Path, folder: Path, ranks: int) -> tuple[Path, Path]:
    """Target and draft as they are where `ranks` divide their heads, else padded; the draft's contract is restated."""
    of_target, of_draft = (-(-kv_heads(model) // ranks) * ranks for model in (target, draft))
    if (of_target, of_draft) == (kv_heads(target), kv_heads(draft)):
        return target, draft
    wide_target, wide_draft = padded(target, folder / "target", of_target), padded(draft, folder / "draft", of_draft)
    if (draft / FILE_NAME).is_file():
        contract, config = Contract.load(draft), read_config(wide_draft)
        assert contract.draft is not None
        spec = dataclasses.replace(contract.draft, num_heads=config["num_attention_heads"],
                                   num_kv_heads=config["num_key_value_heads"])
        dataclasses.replace(contract, target=TargetSpec.from_folder(wide_target), draft=spec).save(wide_draft)
    return wide_target, wide_draft


@torch.inference_mode()
def logits_differ(first: Path, second: Path, ids: list[int]) -> float:
    """Norm of the difference of two targets' logits on a prompt over the norm of the first's, float32 on the CPU."""
    one, other = (AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)(torch.tensor([ids])).logits
                  for folder in (first, second))
    return float((one - other).norm() / one.norm())
