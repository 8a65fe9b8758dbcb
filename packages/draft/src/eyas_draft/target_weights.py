"""Reads the few target weights a draft needs (embedding, final norm, head, last layer) without loading the model."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from eyas_contract import DraftSpec, InvalidInput, TargetSpec, draft_tensors
from eyas_contract.target import read_config, text_config
from eyas_contract.target_tensors import TargetTensors
from eyas_draft.mapped import DTYPES, map_tensor

PLAIN = (torch.float32, torch.bfloat16, torch.float16)  # others are codes that mean nothing without their scales
READERS = ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa")  # the projections of a layer's input
# Families (prefixes of the model type) and config keys that scale or cap the logits.
SCALED_HEADS = ("baichuan", "cohere", "falcon_h1", "gemma2", "gemma3n", "gemma4", "granite", "grok", "hyperclovax",
                "minicpm", "recurrent_gemma", "teleflm", "vaultgemma")
SCALING_KEYS = ("final_logit_softcapping", "logit_scale", "logits_scaling", "lm_head_multiplier")


@dataclass(frozen=True)
class TargetWeights:
    """Weights of the target, as stored.

    Attributes:
        embedding_vh: [V_target, H].
        head_vh: [V_target, H]; the embedding where the two are tied.
        norm_h: factors of the final norm [H]: its weight, or 1 + weight where the family's norm adds one.
        eps: epsilon of the final norm.
        last_layer: plain weights of the last decoder layer by their name within it, e.g. `self_attn.q_proj.weight`;
            its norms as `norm_h`.
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
            InvalidInput: tensors missing, or a norm or head that eyas-draft does not compute.
            CorruptFile: a damaged weight file.
        """
        _require_plain_head(folder, spec)
        tensors = TargetTensors(folder, spec)
        last = {name: map_tensor(info) for name, info in tensors.last_layer().items()
                if DTYPES.get(info.dtype) in PLAIN}
        if tensors.adds_one:  # a draft's norms, like Llama's, multiply by the weight itself
            last |= {name: value.float() + 1 for name, value in last.items() if name.endswith("norm.weight")}
        norm = map_tensor(tensors.norm())
        return cls(map_tensor(tensors.embedding()), map_tensor(tensors.head()),
                   norm.float() + 1 if tensors.adds_one else norm, spec.rms_norm_eps, last)

    def normed(self, last_th: Tensor, norm_h: Tensor) -> Tensor:
        """The final norm over pre-norm states [T, H], its weight given on their device; float32 out."""
        wide = last_th.float()
        return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps) * norm_h


def _require_plain_head(folder: Path, spec: TargetSpec) -> None:
    """Refuse logits that are more than head(norm(state)), and a norm of unknown epsilon.

    Raises:
        InvalidInput: with every reason.
    """
    config = text_config(read_config(folder))
    reasons = [f"model type {spec.model_type}"] if spec.model_type.startswith(SCALED_HEADS) else []
    reasons += [f"{key} {config[key]}" for key in SCALING_KEYS if config.get(key) not in (None, 1)]
    if config.get("rms_norm_eps") is None:
        reasons.append("no rms_norm_eps in config.json")
    if reasons:
        raise InvalidInput(str(folder), "; ".join(reasons), "a target with an RMSNorm and plain logits, by eyas-draft",
                           "Take another target; if only rms_norm_eps is missing, and the final norm is an RMSNorm, "
                           "write its epsilon into config.json.")


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
