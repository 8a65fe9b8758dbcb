"""The first check of a target and an engine: do the stored states lead to the engine's own log-probabilities?

Shapes: T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch

from eyas_contract import InvalidInput, TargetSpec
from eyas_contract.checkpoint_files import read_checkpoint
from eyas_contract.safetensors_header import TensorInfo
from eyas_contract.target import read_config, text_config
from eyas_extract.check import read_tensor

# Mean |difference| of log-probabilities, in nats: rounding of the states and of the engine's logits. SmolLM2 in bf16:
# 0.017; of the layer before the last 3.2, of the normed state 11, of the row before 7.3.
TOLERANCE = {"F32": 0.02, "F16": 0.1, "BF16": 0.2, "F8_E4M3": 0.4}
ADDS_ONE = ("gemma",)  # families whose norm multiplies by 1 + weight


class Golden:
    """Final norm and head of a target, read from its checkpoint, in float32 on the CPU.

    Raises:
        InvalidInput: they are not where Hugging Face puts them, or are quantised.
    """

    def __init__(self, folder: Path) -> None:
        self.spec, self.config = TargetSpec.from_folder(folder), text_config(read_config(folder))
        tensors = read_checkpoint(folder)
        self.norm = _read(folder, tensors, "norm.weight", "layers.").float()
        if self.spec.model_type.startswith(ADDS_ONE):
            self.norm += 1
        head = "lm_head.weight" if any(n.endswith("lm_head.weight") for n in tensors) else "embed_tokens.weight"
        self.head = _read(folder, tensors, head, "layers.")

    def logprobs(self, last: torch.Tensor, input_ids: list[int]) -> torch.Tensor:
        """Log-probability of tokens 1, 2, ..., float32 [T - 1], from the last layer's states [T, H] before the norm."""
        states = last[:-1].float()
        scaled = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.spec.rms_norm_eps) * self.norm
        logits = torch.cat([scaled @ block.T.float() for block in torch.split(self.head, 1 << 14)], dim=-1)
        logits = logits / float(self.config.get("logits_scaling") or 1) * float(self.config.get("logit_scale") or 1)
        cap = self.config.get("final_logit_softcapping")
        logits = torch.tanh(logits / cap) * cap if cap else logits
        return logits.log_softmax(-1).gather(-1, torch.tensor(input_ids[1:])[:, None])[:, 0]

    def compare(self, last: torch.Tensor, input_ids: list[int], engine: list[float], where: str, dtype: str) -> str:
        """What was found.

        Raises:
            InvalidInput: the states do not lead to the engine's log-probabilities.
        """
        found, wanted = self.logprobs(last, input_ids), torch.tensor(engine)
        error = float((found - wanted).abs().mean())
        if not error <= TOLERANCE[dtype]:
            raise InvalidInput(where, f"head(norm(last)) differs from the engine's log-probabilities by {error:.3g} "
                               f"nats a token on {len(engine)} tokens", f"at most {TOLERANCE[dtype]}, by eyas-extract",
                               "Nothing was stored. The engine runs other weights than --target, or this class hands "
                               "out another state than the last layer's before the norm.")
        return f"head(norm(last)) gives the engine's log-probabilities within {error:.2g} nats on {len(engine)} tokens"


def _read(folder: Path, tensors: dict[str, TensorInfo], suffix: str, without: str) -> torch.Tensor:
    names = sorted((n for n in tensors if n.endswith(suffix) and without not in n and "vision" not in n), key=len)
    if not names or tensors[names[0]].dtype not in ("BF16", "F16", "F32"):
        raise InvalidInput(str(folder), f"no unquantised {suffix}", "the final norm and the head, by the first check",
                           "This target cannot be checked against its engine.")
    return read_tensor(tensors[names[0]])
