"""Good drafts and targets made from nothing, in memory, to be spoilt by tests and written as folders."""

from __future__ import annotations

import copy
import functools
import json
import math
import random
import struct
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

HIDDEN, LAYERS, VOCAB, DRAFT_VOCAB, INNER, HEADS, KV, DIM = 64, 12, 256, 96, 128, 4, 2, 16
SIZES = {"BF16": 2, "F16": 2, "F32": 4, "I64": 8, "I32": 4, "I8": 1, "U8": 1, "BOOL": 1, "F8_E4M3": 1}
IDS = sorted(random.Random(7).sample(range(VOCAB), DRAFT_VOCAB))


@dataclass
class Tensor:
    """dtype, shape and bytes."""

    dtype: str
    shape: list[int]
    data: bytes


def bf16(shape: list[int], seed: int = 0, scale: float = 0.02) -> Tensor:
    """Random numbers, never zero."""
    return Tensor("BF16", list(shape), _numbers(math.prod(shape), seed, scale))


@functools.cache
def _numbers(count: int, seed: int, scale: float) -> bytes:
    rng = random.Random(seed)
    halves = [struct.unpack("<I", struct.pack("<f", (rng.random() + 0.1) * scale))[0] >> 16 for _ in range(count)]
    return struct.pack(f"<{count}H", *halves)


def ones(size: int) -> Tensor:
    return Tensor("BF16", [size], struct.pack("<H", 0x3F80) * size)


def int64(values: list[int]) -> Tensor:
    return Tensor("I64", [len(values)], struct.pack(f"<{len(values)}q", *values))


def mask(ids: list[int], size: int) -> Tensor:
    marked = set(ids)
    return Tensor("BOOL", [size], bytes(i in marked for i in range(size)))


@dataclass
class Folder:
    """A model's folder: config, tensors, further files by name."""

    config: dict[str, Any]
    tensors: dict[str, Tensor] = field(default_factory=dict)
    files: dict[str, str] = field(default_factory=dict)

    def copy(self) -> Folder:
        return copy.deepcopy(self)

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        for name, text in self.files.items():
            (folder / name).write_text(text)
        if self.tensors:
            write_safetensors(folder / "model.safetensors", self.tensors)
        return folder

    def rename(self, old: str, new: str) -> None:
        """Replace the prefix `old` of every tensor's name."""
        self.tensors = {new + n[len(old):] if n.startswith(old) else n: t for n, t in self.tensors.items()}


def write_safetensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    header: dict[str, Any] = {"__metadata__": metadata} if metadata else {}
    position = 0
    for name, tensor in tensors.items():
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape,
                        "data_offsets": [position, position + len(tensor.data)]}
        position += len(tensor.data)
    raw = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(raw)) + raw + b"".join(t.data for t in tensors.values()))


def target(**changes: Any) -> Folder:
    """A Llama of 12 layers, as a config alone."""
    return Folder({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": HIDDEN,
                   "intermediate_size": INNER, "num_hidden_layers": LAYERS, "num_attention_heads": HEADS,
                   "num_key_value_heads": KV, "head_dim": DIM, "vocab_size": VOCAB, "max_position_embeddings": 4096,
                   "rms_norm_eps": 1e-5, "rope_theta": 500000.0, "rope_scaling": None, "tie_word_embeddings": False,
                   "torch_dtype": "bfloat16", "hidden_act": "silu"} | changes)


def draft(full: bool = False, **changes: Any) -> Folder:
    """A consistent draft of that target, of 96 or all 256 tokens."""
    size = VOCAB if full else DRAFT_VOCAB
    config = target().config | {
        "architectures": ["LlamaForCausalLMEagle3"], "num_hidden_layers": 1, "draft_vocab_size": size,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 8], "use_aux_hidden_state": True}} | changes
    layer = {"self_attn.q_proj": [HEADS * DIM, 2 * HIDDEN], "self_attn.k_proj": [KV * DIM, 2 * HIDDEN],
             "self_attn.v_proj": [KV * DIM, 2 * HIDDEN], "self_attn.o_proj": [HIDDEN, HEADS * DIM],
             "mlp.gate_proj": [INNER, HIDDEN], "mlp.up_proj": [INNER, HIDDEN], "mlp.down_proj": [HIDDEN, INNER]}
    tensors = {"fc.weight": bf16([HIDDEN, 3 * HIDDEN], 1), "norm.weight": ones(HIDDEN),
               "lm_head.weight": bf16([size, HIDDEN], 2)}
    tensors |= {f"midlayer.{name}.weight": bf16(shape, seed) for seed, (name, shape) in enumerate(layer.items(), 3)}
    tensors |= {f"midlayer.{name}.weight": ones(HIDDEN)
                for name in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    if not full:
        tensors |= {"d2t": int64([t - i for i, t in enumerate(IDS)]), "t2d": mask(IDS, VOCAB)}
    return Folder(config, tensors)


def mla_target(**changes: Any) -> Folder:
    """A Kimi-like target: MLA, nested config."""
    text = {"model_type": "kimi_k2", "hidden_size": HIDDEN, "num_hidden_layers": LAYERS, "vocab_size": VOCAB,
            "max_position_embeddings": 4096, "rope_theta": 50000.0, "num_attention_heads": HEADS,
            "kv_lora_rank": 32, "qk_rope_head_dim": 8, "rope_scaling": {"type": "yarn", "factor": 4.0,
                                                                        "original_max_position_embeddings": 1024}}
    return Folder({"architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
                   "text_config": text | changes})


def mla_draft(**changes: Any) -> Folder:
    """An MLA draft of that target, full vocabulary."""
    q_rank, kv_rank, nope, rope, value = 48, 32, 16, 8, 16
    config = {"architectures": ["Eagle3DeepseekV2ForCausalLM"], "model_type": "kimi_k2", "hidden_size": HIDDEN,
              "intermediate_size": INNER, "num_hidden_layers": 1, "num_attention_heads": HEADS, "vocab_size": VOCAB,
              "num_key_value_heads": HEADS, "draft_vocab_size": VOCAB, "max_position_embeddings": 4096,
              "rms_norm_eps": 1e-5, "rope_theta": 50000.0, "rope_scaling": mla_target().config["text_config"][
                  "rope_scaling"], "tie_word_embeddings": False, "q_lora_rank": q_rank, "kv_lora_rank": kv_rank,
              "qk_nope_head_dim": nope, "qk_rope_head_dim": rope, "v_head_dim": value, "hidden_act": "silu",
              "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 5, 8], "use_aux_hidden_state": True}} | changes
    tensors = draft(full=True).tensors
    tensors = {name: tensor for name, tensor in tensors.items() if "self_attn" not in name}
    attention = {"q_a_proj": [q_rank, 2 * HIDDEN], "q_b_proj": [HEADS * (nope + rope), q_rank],
                 "kv_a_proj_with_mqa": [kv_rank + rope, 2 * HIDDEN], "kv_b_proj": [HEADS * (nope + value), kv_rank],
                 "o_proj": [HIDDEN, HEADS * value]}
    tensors |= {f"midlayer.self_attn.{n}.weight": bf16(s, i) for i, (n, s) in enumerate(attention.items(), 20)}
    tensors |= {"midlayer.self_attn.q_a_layernorm.weight": ones(q_rank),
                "midlayer.self_attn.kv_a_layernorm.weight": ones(kv_rank)}
    return Folder(config, tensors)


def speculators(folder: Folder) -> Folder:
    """The same Llama draft in speculators' dialect."""
    result = folder.copy()
    layer = {k: v for k, v in folder.config.items() if k not in ("eagle_config", "architectures", "draft_vocab_size")}
    ids = folder.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    result.config = {"architectures": ["Eagle3Speculator"], "speculators_model_type": "eagle3",
                     "speculators_config": {"algorithm": "eagle3"}, "transformer_layer_config": layer,
                     "draft_vocab_size": folder.config["draft_vocab_size"], "norm_before_residual": False,
                     "norm_before_fc": False, "fc_norm": False, "norm_output": False,
                     "eagle_aux_hidden_state_layer_ids": [i + 1 for i in ids]}
    result.rename("midlayer.", "layers.0.")
    return result
