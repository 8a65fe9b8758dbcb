"""vLLM: how it reads an EAGLE-3 draft. Data and pure functions.

Read in vLLM 0.33.0: `model_executor/models/llama_eagle3.py`, `model_executor/models/deepseek_eagle3.py`,
`v1/worker/gpu_model_runner.py` (`_get_eagle3_aux_layers_from_config`),
`v1/worker/gpu/spec_decode/eagle/eagle3_utils.py`, `transformers_utils/configs/speculators/algos.py`.
"""

from __future__ import annotations

from typing import Any

Version = tuple[int, int, int]
KNOWN: tuple[Version, ...] = ((0, 33, 0),)
DRAFT_CLASSES = {
    "LlamaForCausalLMEagle3": "llama", "Eagle3LlamaForCausalLM": "llama", "Eagle3Qwen2_5vlForCausalLM": "llama",
    "Eagle3Qwen3vlForCausalLM": "llama", "Eagle3MiniMaxM2ForCausalLM": "llama",
    "Eagle3DeepseekV2ForCausalLM": "mla", "Eagle3DeepseekV3ForCausalLM": "mla",
}
# Target classes with vLLM's SupportsEagle3 interface that are common as EAGLE-3 targets; others: see `check`.
TARGETS = frozenset({
    "AfmoeForCausalLM", "ApertusForCausalLM", "ArceeForCausalLM", "Cohere2MoeForCausalLM", "DeepseekV2ForCausalLM",
    "DeepseekV3ForCausalLM", "Ernie4_5ForCausalLM", "FlexOlmoForCausalLM",
    "Gemma4ForCausalLM", "Gemma4ForConditionalGeneration", "GlmForCausalLM",
    "GptOssForCausalLM", "GraniteForCausalLM", "HunYuanDenseV1ForCausalLM", "HunYuanMoEV1ForCausalLM",
    "IQuestCoderForCausalLM", "InternLM3ForCausalLM", "KimiK25ForConditionalGeneration", "Llama4ForCausalLM",
    "Llama4ForConditionalGeneration", "LlamaForCausalLM", "LlavaForConditionalGeneration", "MellumForCausalLM",
    "MiMoForCausalLM", "MiMoV2FlashForCausalLM", "MiniCPMForCausalLM", "MiniMaxM2ForCausalLM",
    "Ministral3ForCausalLM", "Mistral3ForConditionalGeneration", "MistralForCausalLM", "MistralLarge3ForCausalLM",
    "NemotronHForCausalLM", "Olmo2ForCausalLM", "Olmo3ForCausalLM", "OlmoForCausalLM", "Phi3ForCausalLM",
    "PixtralForConditionalGeneration", "Qwen2ForCausalLM", "Qwen2_5_VLForConditionalGeneration",
    "Qwen3ForCausalLM", "Qwen3MoeForCausalLM", "Qwen3NextForCausalLM", "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration", "Qwen3_5ForCausalLM", "Qwen3_5ForConditionalGeneration",
    "Qwen3_5MoeForCausalLM", "Qwen3_5MoeForConditionalGeneration", "SeedOssForCausalLM", "SmolLM3ForCausalLM",
    "TeleFLMForCausalLM",
})


def default_boundaries(num_layers: int) -> tuple[int, ...]:
    """What vLLM captures where a config names no layers, as boundary ids."""
    return (2, num_layers // 2, num_layers - 3)


def layer_ids_from_config(config: dict[str, Any], num_layers: int) -> dict[str, tuple[int, ...]]:
    """What each of vLLM 0.33's two model runners captures, as outputs of layers (0-based).

    Both take ids as boundaries (state before layer i). The first runner falls back to `eagle_config`; the newer one
    reads the top-level key alone. Ids are sorted and made distinct.
    """
    def outputs(ids: Any) -> tuple[int, ...]:
        chosen = ids if isinstance(ids, list) and ids else list(default_boundaries(num_layers))
        return tuple(i - 1 for i in sorted(set(chosen)))

    top = config.get("eagle_aux_hidden_state_layer_ids")
    nested = config.get("eagle_config")
    nested = nested if isinstance(nested, dict) else {}
    return {"gpu_model_runner": outputs(top or nested.get("eagle_aux_hidden_state_layer_ids")),
            "eagle3_utils": outputs(top or nested.get("layer_ids"))}


def flatten_speculators(config: dict[str, Any]) -> dict[str, Any]:
    """A speculators config as vLLM sees it: the nested Llama config with the EAGLE-3 keys laid over it.

    `norm_before_residual` defaults to true there (speculators' own default).
    """
    nested = config.get("transformer_layer_config")
    flat = dict(nested) if isinstance(nested, dict) else {}
    flat.setdefault("model_type", "llama")
    flat["architectures"] = ["Eagle3LlamaForCausalLM"]
    flat["draft_vocab_size"] = config.get("draft_vocab_size")
    if config.get("target_hidden_size") is not None:
        flat["target_hidden_size"] = config["target_hidden_size"]
    for key, default in (("norm_before_residual", True), ("norm_before_fc", False), ("fc_norm", False),
                         ("norm_output", False)):
        flat[key] = config.get(key, default)
    if config.get("eagle_aux_hidden_state_layer_ids"):
        flat["eagle_aux_hidden_state_layer_ids"] = config["eagle_aux_hidden_state_layer_ids"]
    return flat


def is_speculators(config: dict[str, Any]) -> bool:
    """Whether a config is in speculators' nested dialect."""
    return "transformer_layer_config" in config or "speculators_config" in config
