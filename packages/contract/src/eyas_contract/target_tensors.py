"""Final norm, embedding and head of a target: where they lie in its checkpoint, and how its family applies the norm.

Whoever computes head(norm(state)) goes by this: the trainer's teacher, extraction's first check, the check of loose
files. Torch-free: it names tensors, it reads none.
"""

from __future__ import annotations

import re
from pathlib import Path

from eyas_contract.checkpoint_files import read_checkpoint
from eyas_contract.errors import InvalidInput
from eyas_contract.floats import FLOATS
from eyas_contract.safetensors_header import TensorInfo
from eyas_contract.target import TargetSpec, read_config, text_config

# Model types whose RMSNorm multiplies by 1 + weight. Sources: transformers 5.12 (`*RMSNorm.forward`), SGLang 0.5.20
# (classes with GemmaRMSNorm as final norm). Not among them: Gemma 3n and 4, which multiply by the weight.
ADDS_ONE = frozenset({
    "gemma", "gemma2", "gemma3", "gemma3_text", "vaultgemma", "recurrent_gemma",
    "qwen3_next", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text",
    "minimax_m3", "minimax_m3_vl", "minimax_m3_vl_text", "step3p5",
})
# Model types whose final norm takes the mean off, has a bias, or has no weight.
NO_RMS_NORM = frozenset({
    "biogpt", "bloom", "codegen", "cohere", "cohere2", "cohere2_moe", "dbrx", "falcon", "gpt2", "gpt_bigcode",
    "gpt_neo", "gpt_neox", "gpt_neox_japanese", "gptj", "jais2", "modernbert-decoder", "mpt", "nanochat", "nemotron",
    "olmo", "opt", "orion", "persimmon", "phi", "phi3small", "phimoe", "stablelm", "starcoder2", "xglm",
})
_FINAL_NORMS = ("norm", "final_layernorm", "final_norm", "norm_f", "embedding_norm")  # modules beside `layers`
# Layers, draft heads (MTP) and towers have norms, embeddings and heads of their own.
_OTHERS = re.compile(r"(?:^|\.)layers\.\d+\.|mtp|visual|vision|merger")


class TargetTensors:
    """A target's tensors by meaning.

    Args:
        folder: its Hugging Face folder.
        spec: what the folder is, or should be.

    Raises:
        InvalidInput, CorruptFile: as `read_checkpoint`.
    """

    def __init__(self, folder: Path, spec: TargetSpec) -> None:
        self.folder, self.spec, self.all = folder, spec, read_checkpoint(folder)

    @property
    def adds_one(self) -> bool:
        """Whether this family's norms multiply by 1 + weight."""
        return self.spec.model_type in ADDS_ONE

    def norm(self) -> TensorInfo:
        """Weight of the final norm, which is an RMSNorm.

        Raises:
            InvalidInput: none or several such tensors, or another kind of norm.
        """
        found = self._one(_FINAL_NORMS, (self.spec.hidden_size,), "final norm")
        bias = found.name.removesuffix("weight") + "bias"
        if bias in self.all or self.spec.model_type in NO_RMS_NORM:
            what = f"a norm with {bias}" if bias in self.all else f"model type {self.spec.model_type}"
            raise InvalidInput(str(self.folder), f"{what}, whose final norm is no RMSNorm",
                               "a target with an RMSNorm before its head, by eyas",
                               "What this family computes is not known here; take another target.")
        return found

    def embedding(self) -> TensorInfo:
        """The embedding [V, H]. Raises InvalidInput where there is none, or several."""
        return self._one(("embed_tokens",), (self.spec.vocab_size, self.spec.hidden_size), "embedding")

    def head(self) -> TensorInfo:
        """The head [V, H]; the embedding where the two are tied. Raises InvalidInput where there is none, or several.

        A config that does not say whether they are tied (Gemma's) has its class's default: the file tells by lacking a
        head.
        """
        if self.spec.tie_word_embeddings or (not self._says_tied() and not self._named(("lm_head",))):
            return self.embedding()
        return self._one(("lm_head",), (self.spec.vocab_size, self.spec.hidden_size), "head")

    def last_layer(self) -> dict[str, TensorInfo]:
        """Tensors of the last decoder layer, by their name within it. Raises InvalidInput as `norm`."""
        module = self.norm().name.removesuffix(".weight").rpartition(".")[0]
        start = f"{module}.layers.{self.spec.num_layers - 1}.".lstrip(".")
        return {name.removeprefix(start): info for name, info in self.all.items() if name.startswith(start)}

    def _says_tied(self) -> bool:
        config = read_config(self.folder)
        return "tie_word_embeddings" in config or "tie_word_embeddings" in text_config(config)

    def _named(self, modules: tuple[str, ...]) -> list[TensorInfo]:
        return [info for name, info in self.all.items() if not _OTHERS.search(name)
                and name.split(".")[-2:] in [[module, "weight"] for module in modules]]

    def _one(self, modules: tuple[str, ...], shape: tuple[int, ...], what: str) -> TensorInfo:
        named = self._named(modules)
        fitting = [info for info in named if info.shape == shape and info.dtype in FLOATS]
        if len(fitting) == 1:
            return fitting[0]
        found = ", ".join(f"{info.name} {list(info.shape)}" + ("" if info.dtype in FLOATS else f" of {info.dtype}")
                          for info in (fitting or named)[:5])
        names = " or ".join(f"{module}.weight" for module in modules)
        raise InvalidInput(str(self.folder), f"{'several tensors' if fitting else 'no tensor'} for the {what}"
                           + (f": {found}" if found else ""), f"one *.{names} of shape {list(shape)}, by eyas",
                           "Give the folder of an unquantised decoder-only language model, with all its weight files.")
