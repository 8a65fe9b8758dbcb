"""Reads the few target weights a draft needs (embedding, final norm, head, last layer) without loading the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eyas_contract import DraftSpec, InvalidInput, TargetSpec, draft_tensors
from eyas_contract.checkpoint_files import read_checkpoint
from eyas_contract.safetensors_header import TensorInfo
from eyas_draft.mapped import map_tensor

PLAIN = (torch.float32, torch.bfloat16, torch.float16)  # others are codes that mean nothing without their scales
READERS = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")  # the projections of a layer's input
OTHER_HEADS = ("gemma", "cohere", "granite", "minicpm")  # norm or logits scaled in ways that are not Llama's


@dataclass(frozen=True)
class TargetWeights:
    """Weights of the target, as stored.

    Attributes:
        embedding_vh: [V_target, H].
        head_vh: [V_target, H]; the embedding where the two are tied.
        norm_h: weight of the final norm [H].
        eps: epsilon of the final norm.
        last_layer: weights of the last decoder layer by their name within it, e.g. `self_attn.q_proj.weight`.
    """

    embedding_vh: Tensor
    head_vh: Tensor
    norm_h: Tensor
    eps: float
    last_layer: dict[str, Tensor]

    @classmethod
    def load(cls, folder: Path, spec: TargetSpec) -> TargetWeights:
        """Read from a Hugging Face folder (memory-mapped until used).

        Raises:
            InvalidInput: tensors missing, or a model family whose norm or head is not Llama's.
            CorruptFile: a damaged weight file.
        """
        if spec.model_type.startswith(OTHER_HEADS):
            raise InvalidInput(str(folder), f"model type {spec.model_type}",
                               "a target with a plain RMSNorm and head, by eyas-draft",
                               "This family scales its norm or logits; eyas-draft does not compute it.")
        tensors = read_checkpoint(folder)
        embedding = _one(tensors, "embed_tokens.weight", folder)
        norm = _one(tensors, "model.norm.weight", folder)
        head = embedding if spec.tie_word_embeddings else _one(tensors, "lm_head.weight", folder)
        infix = f"layers.{spec.num_layers - 1}."
        last = {name.split(infix, 1)[1]: map_tensor(info) for name, info in tensors.items() if f".{infix}" in name}
        return cls(map_tensor(embedding), map_tensor(head), map_tensor(norm), spec.rms_norm_eps, last)

    def normed(self, last_th: Tensor, norm_h: Tensor) -> Tensor:
        """The final norm over pre-norm states [T, H], its weight given on their device; float32 out."""
        wide = last_th.float()
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * norm_h


def _one(tensors: dict[str, TensorInfo], suffix: str, folder: Path) -> TensorInfo:
    """The only tensor whose dotted name ends in `suffix`, vision towers aside."""
    names = [n for n in tensors if (n == suffix or n.endswith("." + suffix)) and "vision" not in n]
    if len(names) != 1:
        raise InvalidInput(str(folder), f"{len(names)} tensors named *.{suffix}", "exactly one, by eyas-draft",
                           "Give the folder of a decoder-only language model in safetensors format.")
    return tensors[names[0]]


def initial_from_target(weights: TargetWeights, spec: DraftSpec, draft_ids_v: Tensor) -> dict[str, Tensor]:
    """Start values taken from the target, by trainer name; shapes that differ, and quantised weights, are left out.

    `fc` passes the last aux state through; layer 0 computes the target's last layer on the hidden half of its input
    and nothing on the embedding half; norm and head are the target's, the head's rows those of the draft vocabulary. A
    feed-forward wider than the target's begins with further neurons that add nothing yet; where the target's is a
    mixture of experts it begins with the shared one.
    """
    h = spec.hidden_size
    fc = torch.zeros(h, spec.num_aux * spec.target_hidden_size)
    fc[:, -spec.target_hidden_size:] = torch.eye(h, spec.target_hidden_size)
    start = {"fc.weight": fc, "norm.weight": weights.norm_h.float(),
             "lm_head.weight": weights.head_vh[draft_ids_v].float()}
    last = {name.replace("mlp.shared_experts.", "mlp."): value for name, value in weights.last_layer.items()}
    wanted = draft_tensors(spec)
    own = {f"layers.0.{name}": value for name, value in last.items() if value.dtype in PLAIN}
    for name, value in ((name, value.float()) for name, value in own.items() if name in wanted):
        if name.startswith("layers.0.self_attn.") and name.split(".")[-2] in READERS:
            value = torch.cat((torch.zeros_like(value), value), dim=1)
        if name == "layers.0.input_layernorm.weight":
            start["layers.0.hidden_norm.weight"] = value
            continue
        start[name] = _widened(name, value, spec.intermediate_size) if name.startswith("layers.0.mlp.") else value
    return start


def _widened(name: str, weight: Tensor, width: int) -> Tensor:
    """A feed-forward's weight grown to `width` neurons: rows of small noise, or for `down_proj` columns of zero."""
    axis = 1 if "down_proj" in name else 0
    more = width - weight.shape[axis]
    if more <= 0:
        return weight
    shape = (weight.shape[0], more) if axis else (more, weight.shape[1])
    fresh = torch.zeros(shape)
    if not axis:
        fresh.normal_(0.0, 0.02, generator=torch.Generator().manual_seed(width))
    return torch.cat((weight, fresh), dim=axis)
