"""TargetSpec: the facts of the target model on which a draft depends, read from its Hugging Face folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eyas_contract.errors import InvalidInput
from eyas_contract.fingerprint import chat_template_sha256, tokenizer_sha256, weights_fingerprint

Scalar = bool | int | float | str
_TEXT_TYPES: dict[str, Any] = {"max_position_embeddings": int, "rms_norm_eps": int | float,
                               "rope_theta": int | float | None, "rope_parameters": dict | None,
                               "rope_scaling": dict | None}
_TYPES: dict[str, Any] = {"quantization_config": dict | None, "architectures": list | None}


@dataclass(frozen=True)
class Rope:
    """Rotary position embedding.

    Attributes:
        type: `default`, `linear`, `dynamic`, `yarn`, `llama3`, ... as Hugging Face names them.
        theta: base frequency.
        scaling: further parameters, sorted by name (lists as JSON text).
    """

    type: str
    theta: float
    scaling: tuple[tuple[str, Scalar], ...] = ()

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Rope:
        """Read `rope_parameters` (transformers 5) or `rope_theta` + `rope_scaling` (older)."""
        parameters = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
        theta = parameters.pop("rope_theta", None) or config.get("rope_theta") or 10000.0
        kind = parameters.pop("rope_type", None) or parameters.pop("type", None) or "default"
        parameters.pop("type", None)
        scaling = tuple(sorted((key, value if isinstance(value, Scalar) else json.dumps(value))
                               for key, value in parameters.items() if value is not None))
        return cls(str(kind), float(theta), scaling)

    def to_config(self) -> dict[str, Any]:
        """The value of `rope_parameters` in a Hugging Face config."""
        return {"rope_theta": self.theta, "rope_type": self.type,
                **{k: json.loads(v) if isinstance(v, str) and v[:1] in "[{" else v for k, v in self.scaling}}


@dataclass(frozen=True)
class TargetSpec:
    """The target model.

    Attributes:
        architecture: class name in `config.json`, e.g. `LlamaForCausalLM`.
        model_type: e.g. `llama`.
        num_layers, hidden_size, vocab_size, max_position_embeddings: sizes (of the text model).
        rope: rotary embedding.
        rms_norm_eps: epsilon of the norms.
        dtype: dtype of the weights, e.g. `bfloat16`.
        quantization: `none` or the quantisation method in `config.json`.
        tie_word_embeddings: whether the head is the embedding.
        tokenizer_sha256, chat_template_sha256: hex digests; empty text where the folder has none.
        weights_fingerprint: digest over the weight files' headers and sizes (see `eyas_contract.fingerprint`).
    """

    architecture: str
    model_type: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    max_position_embeddings: int
    rope: Rope
    rms_norm_eps: float
    dtype: str
    quantization: str
    tie_word_embeddings: bool
    tokenizer_sha256: str
    chat_template_sha256: str
    weights_fingerprint: str

    @classmethod
    def from_folder(cls, folder: str | Path) -> TargetSpec:
        """Read a Hugging Face model folder (config, tokenizer, headers of the weights).

        Raises:
            InvalidInput: no folder, no `config.json`, or fields missing in it or of another type (all named).
        """
        folder = Path(folder)
        config = read_config(folder)
        text = text_config(config)
        wanted = ("num_hidden_layers", "hidden_size", "vocab_size")
        missing = [key for key in wanted if not isinstance(text.get(key), int)]
        if missing:
            raise InvalidInput(f"{folder / 'config.json'}", f"no {', '.join(missing)}",
                               "the sizes of a text model, by eyas-contract", "Check that this is a model folder.")
        _require_types(folder / "config.json", config, text)
        quantization = config.get("quantization_config") or text.get("quantization_config") or {}
        return cls(
            architecture=str((config.get("architectures") or ["unknown"])[0]),
            model_type=str(text.get("model_type", config.get("model_type", "unknown"))),
            num_layers=text["num_hidden_layers"], hidden_size=text["hidden_size"], vocab_size=text["vocab_size"],
            max_position_embeddings=int(text.get("max_position_embeddings", 0)),
            rope=Rope.from_config(text), rms_norm_eps=float(text.get("rms_norm_eps", 1e-6)),
            dtype=str(text.get("dtype") or text.get("torch_dtype") or config.get("dtype")
                      or config.get("torch_dtype") or "unknown"),
            quantization=str(quantization.get("quant_method", "none")),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
            tokenizer_sha256=tokenizer_sha256(folder), chat_template_sha256=chat_template_sha256(folder),
            weights_fingerprint=weights_fingerprint(folder),
        )


def _require_types(path: Path, config: dict[str, Any], text: dict[str, Any]) -> None:
    """Refuse what none of the fields can be read from. Raises InvalidInput."""
    wrong = [f"{key} {json.dumps(part[key])[:60]}"
             for part, kinds in ((text, _TEXT_TYPES), (config, _TYPES), (text, _TYPES))
             for key, kind in kinds.items() if key in part and not isinstance(part[key], kind)]
    wrong += [f"{key}.rope_theta" for key in ("rope_parameters", "rope_scaling") if isinstance(text.get(key), dict)
              and not isinstance(text[key].get("rope_theta"), int | float | None)]
    if wrong:
        raise InvalidInput(str(path), "; ".join(dict.fromkeys(wrong)), "numbers, objects and a list of names, as "
                           "Hugging Face writes them, by eyas-contract", "Restore the file.")


def text_config(config: dict[str, Any]) -> dict[str, Any]:
    """The language model's part of a config: `text_config` where the model is multimodal, else the whole."""
    nested = config.get("text_config") or config.get("llm_config") or config.get("language_config")
    return nested if isinstance(nested, dict) else config


def read_config(folder: Path) -> dict[str, Any]:
    """Parse `config.json` of a model folder.

    Raises:
        InvalidInput: missing folder or file, or not a JSON object.
    """
    path = folder / "config.json"
    wanted = "a Hugging Face model folder with config.json, by eyas-contract"
    if not path.is_file():
        raise InvalidInput(str(path), "no such file", wanted, "Give the path of the model's folder.")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InvalidInput(str(path), f"not JSON ({error})", wanted, "Restore the file.") from error
    if not isinstance(config, dict):
        raise InvalidInput(str(path), f"a JSON {type(config).__name__}", wanted, "Restore the file.")
    return config
