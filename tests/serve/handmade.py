"""A draft made by hand, without training: the target's last layer and head, `fc` passing on the last aux state.

It is accepted now and then, which is all that serving's tests need, and every part of it can be broken at will.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from eyas_contract import CaptureSpec, Contract, DraftSpec, TargetSpec, VocabMap, draft_tensors, store_tensors
from eyas_contract.engines import sglang
from eyas_contract.target import read_config


def make_contract(target: Path, draft_vocab: tuple[int, ...]) -> Contract:
    """The contract of a one-layer draft of the target's own sizes."""
    spec, config = TargetSpec.from_folder(target), read_config(target)
    ids = (1, spec.num_layers // 2 - 1, spec.num_layers - 2)
    capture = CaptureSpec(ids, spec.hidden_size, "pre_norm", store_tensors("BF16"), 512)
    draft = DraftSpec(
        kind="llama", num_layers=1, hidden_size=spec.hidden_size, intermediate_size=config["intermediate_size"],
        num_heads=config["num_attention_heads"], num_kv_heads=config["num_key_value_heads"],
        head_dim=config.get("head_dim") or spec.hidden_size // config["num_attention_heads"],
        target_hidden_size=spec.hidden_size, num_aux=3, draft_vocab_size=len(draft_vocab),
        target_vocab_size=spec.vocab_size, max_position_embeddings=spec.max_position_embeddings, rope=spec.rope,
        rms_norm_eps=spec.rms_norm_eps, hidden_act="silu", fc_norm=False, norm_output=False, own_embedding=False,
        dtype="float32")
    return Contract(spec, capture, VocabMap(spec.vocab_size, draft_vocab), draft)


def make_weights(target: Path, contract: Contract) -> dict[str, torch.Tensor]:
    """Weights in SGLang's names, d2t and t2d included."""
    assert contract.draft is not None
    assert contract.vocab is not None
    source = {name: tensor.float() for name, tensor in load_file(target / "model.safetensors").items()}
    last = f"model.layers.{contract.target.num_layers - 1}."
    hidden, weights = contract.draft.hidden_size, {}
    for name, shape in draft_tensors(contract.draft).items():
        if name == "fc.weight":
            value = torch.cat([torch.zeros(hidden, 2 * hidden), torch.eye(hidden)], 1)
        elif name == "lm_head.weight":
            head = source.get("lm_head.weight", source["model.embed_tokens.weight"])
            value = head[list(contract.vocab.target_ids)]
        elif name == "norm.weight":
            value = source["model.norm.weight"]
        elif name == "layers.0.hidden_norm.weight":
            value = source[f"{last}input_layernorm.weight"]
        else:
            value = source[name.replace("layers.0.", last)]
            if value.shape[-1] != shape[-1]:  # q, k, v read [embedding, hidden]; the embedding half starts at zero
                value = torch.cat([torch.zeros_like(value), value], 1)
        assert value.shape == shape, name
        weights[sglang.export_name(name)] = value.clone()
    return weights | {"d2t": torch.tensor(contract.vocab.d2t()), "t2d": torch.tensor(contract.vocab.t2d())}


def write_draft(folder: Path, contract: Contract, weights: dict[str, torch.Tensor]) -> Path:
    """Save as a draft folder; returns it."""
    folder.mkdir(parents=True, exist_ok=True)
    contract.save(folder)
    (folder / "config.json").write_text(json.dumps(sglang.export_config(contract)))
    save_file({name: tensor.contiguous() for name, tensor in weights.items()}, folder / "model.safetensors",
              metadata={"format": "pt"})
    return folder


def make_draft(target: Path, folder: Path, keep_every: int = 1) -> Path:
    """A whole draft; its vocabulary leaves out the last of every `keep_every` tokens (1: leaves out only token 0)."""
    size = TargetSpec.from_folder(target).vocab_size
    ids = tuple(i for i in range(size) if (i % keep_every != keep_every - 1 if keep_every > 1 else i > 0))
    contract = make_contract(target, ids)
    return write_draft(folder, contract, make_weights(target, contract))
