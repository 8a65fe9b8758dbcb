"""The target: its parts found by name or refused, its stop tokens, its weights on a device."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from eyas_contract import InvalidInput, TargetSpec

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class Target:
    """A loaded target.

    Attributes:
        folder: its Hugging Face folder.
        spec: its facts.
        model: the causal language model, in evaluation mode.
        decoder: the part that maps token ids to final states.
        layers: its decoder layers, in order.
        norm: its final norm.
        head: its output projection.
        stop_ids: tokens that end an answer.
    """

    folder: Path
    spec: TargetSpec
    model: Any
    decoder: Any
    layers: Any
    norm: Any
    head: Any
    stop_ids: frozenset[int]


def pick_device(name: str) -> str:
    """`auto` -> `cuda` where there is one, else `cpu`.

    Raises:
        InvalidInput: a CUDA device was named and none can be used.
    """
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise InvalidInput("--device", f"{name}, but torch {torch.__version__} sees no CUDA device",
                           "a device that torch can use", "Use --device cpu, or install a CUDA build of torch.")
    return name


def stop_ids(folder: Path) -> frozenset[int]:
    """`eos_token_id` (one or several) of `generation_config.json`, else of `config.json`."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        if path.is_file():
            value = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            if value is not None:
                return frozenset(value if isinstance(value, list) else [value])
    return frozenset()


def load_target(folder: Path, device: str, dtype: str = "auto") -> Target:
    """Load a target's weights and find its parts.

    Args:
        dtype: `auto` for that of the weights, or a name of DTYPES.

    Raises:
        InvalidInput: not a model folder, or a model class whose parts are not where Hugging Face puts them (all named).
    """
    spec = TargetSpec.from_folder(folder)
    transformers_logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=DTYPES.get(dtype, dtype)).to(device).eval()
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise InvalidInput(str(folder), f"weights that do not load ({error})", "a causal language model",
                           "Check the folder, and that transformers knows this architecture.") from error
    finally:
        transformers_logging.enable_progress_bar()
    decoder = model.get_decoder()
    parts = {"decoder.layers": getattr(decoder, "layers", None), "decoder.norm": getattr(decoder, "norm", None),
             "output embeddings": model.get_output_embeddings()}
    faults = [f"no {name}" for name, part in parts.items() if part is None]
    if parts["decoder.layers"] is not None and len(parts["decoder.layers"]) != spec.num_layers:
        faults.append(f"{len(parts['decoder.layers'])} decoder layers, config.json says {spec.num_layers}")
    if faults:
        raise InvalidInput(f"{type(model).__name__} of {folder}", "; ".join(faults),
                           "a decoder with `layers` and `norm`, and a head, by eyas-extract",
                           "This model class cannot be captured through Hugging Face.")
    return Target(folder, spec, model, decoder, decoder.layers, decoder.norm, model.get_output_embeddings(),
                  stop_ids(folder))
