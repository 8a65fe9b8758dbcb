"""The first check of a target and an engine: do the stored states lead to the engine's own log-probabilities?

Shapes: T tokens, H hidden, V vocabulary.
"""

from __future__ import annotations

from pathlib import Path

import torch

from eyas_contract import InvalidInput, TargetSpec
from eyas_contract.safetensors_header import TensorInfo
from eyas_contract.target import read_config, text_config
from eyas_contract.target_tensors import TargetTensors
from eyas_extract.check import read_tensor

# Mean |difference| of log-probabilities, in nats: rounding of the states and of the engine's logits. SmolLM2 in bf16:
# 0.017; of the layer before the last 3.2, of the normed state 11, of the row before 7.3.
TOLERANCE = {"F32": 0.02, "F16": 0.1, "BF16": 0.2, "F8_E4M3": 0.4}


class Golden:
    """Final norm and head of a target, read from its checkpoint, in float32 on the CPU.

    Raises:
        InvalidInput: they are not where Hugging Face puts them, are quantised, or the norm is no RMSNorm.
    """

    def __init__(self, folder: Path) -> None:
        self.spec, self.config = TargetSpec.from_folder(folder), text_config(read_config(folder))
        tensors = TargetTensors(folder, self.spec)
        self.norm = _read(folder, tensors.norm()).float()
        if tensors.adds_one:
            self.norm += 1
        self.head = _read(folder, tensors.head())

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


def _read(folder: Path, info: TensorInfo) -> torch.Tensor:
    if info.dtype not in ("BF16", "F16", "F32"):
        raise InvalidInput(str(folder), f"{info.name} in {info.dtype}", "an unquantised final norm and head, by the "
                           "first check", "This target cannot be checked against its engine.")
    return read_tensor(info)
