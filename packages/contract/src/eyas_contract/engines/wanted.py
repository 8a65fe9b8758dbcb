"""The tensors a draft class builds from a config, in trainer's names: what a checkpoint must fill.

Sources: as in `loaders`; MLA shapes from SGLang `srt/models/deepseek_v2.py` (DeepseekV2AttentionMLA).
"""

from __future__ import annotations

from typing import Any

from eyas_contract.draft import DraftSpec
from eyas_contract.engines.loaders import Loader, eagle_config

Shapes = dict[str, tuple[int, ...]]
LLAMA4_MLP = 16384  # transformers' Llama4TextConfig, where the key is absent
_DEFAULT_EPS = 1e-6  # transformers' LlamaConfig and DeepseekV3Config
MLA_KEYS = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")


def head_dim(config: dict[str, Any]) -> int:
    """The config's head_dim, or what an engine works out without it: hidden / heads."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def kv_heads(config: dict[str, Any]) -> int:
    """Number of key and value heads."""
    return int(config.get("num_key_value_heads") or config["num_attention_heads"])


def sizes_beside(config: dict[str, Any], draft: DraftSpec) -> dict[str, tuple[Any, Any]]:
    """Sizes that shapes of weights do not tell (8 heads of 8 look like 4 of 16): key -> the config's, a draft's own."""
    eps = config.get("rms_norm_eps")
    pairs: dict[str, tuple[Any, Any]] = {
        "num_attention_heads": (config.get("num_attention_heads"), draft.num_heads),
        "rms_norm_eps": (_DEFAULT_EPS if eps is None else eps, draft.rms_norm_eps)}
    if draft.mla is not None:
        pairs |= {key: (config.get(key), getattr(draft.mla, key)) for key in MLA_KEYS}
    elif config.get("hidden_size") and config.get("num_attention_heads"):
        pairs |= {"num_key_value_heads": (kv_heads(config), draft.num_kv_heads),
                  "head_dim": (head_dim(config), draft.head_dim)}
    return pairs


def num_layers(config: dict[str, Any], loader: Loader) -> int:
    """Number of decoder layers that the class builds."""
    return int(config.get("num_hidden_layers") or 1) if loader.multi_layer else 1


def mlp_width(config: dict[str, Any], loader: Loader) -> int:
    """Neurons of the feed-forward; under Llama 4's model type SGLang's Llama class takes them from another key."""
    if loader.engine == "sglang" and loader.kind == "llama" and config.get("model_type") == "llama4_text":
        return int(config.get("intermediate_size_mlp") or LLAMA4_MLP)
    return int(config["intermediate_size"])


def target_width(config: dict[str, Any]) -> int:
    """Width of one target state that `fc` expects."""
    return int(config.get("target_hidden_size") or config["hidden_size"])


def head_rows(config: dict[str, Any]) -> int:
    """Rows of the draft's head."""
    return int(config.get("draft_vocab_size") or config["vocab_size"])


def norm_before_fc(config: dict[str, Any]) -> bool:
    """Whether the config asks for one norm over all states before `fc`."""
    return bool(eagle_config(config).get("norm_before_fc", config.get("norm_before_fc", False)))


def fc_norm(config: dict[str, Any], loader: Loader) -> bool:
    """Whether the config asks for a norm per state before `fc`, in a key that this class reads."""
    return bool(config.get("fc_norm") or (loader.use_aux_norm and config.get("use_aux_norm")))


def tensors(config: dict[str, Any], loader: Loader) -> Shapes:
    """Names and shapes of every parameter, `lm_head.weight` and `embed_tokens.weight` included.

    Args:
        config: flat draft config whose sizes have been checked.
        loader: the class that is built.
    """
    h, width, aux = config["hidden_size"], target_width(config), loader.num_aux(config)
    table: Shapes = {"fc.weight": (h, aux * width)}
    if loader.fc_bias and config.get("bias"):
        table["fc.bias"] = (h,)
    if loader.norm_before_fc and norm_before_fc(config):
        table["input_norm.weight"] = (aux * width,)
    if loader.fc_norm and fc_norm(config, loader):
        table |= {f"fc_norm.{i}.weight": (width,) for i in range(aux)}
    for i in range(num_layers(config, loader)):
        attention = _mla(config, i) if loader.kind == "mla" else _mha(config, loader, i)
        table |= {f"layers.{i}.{name}": shape for name, shape in (attention | _rest(config, loader)).items()}
    return table | {"norm.weight": (h,), "lm_head.weight": (head_rows(config), h),
                    "embed_tokens.weight": (config["vocab_size"], h)}


def _mha(config: dict[str, Any], loader: Loader, layer: int) -> Shapes:
    h, hd = config["hidden_size"], head_dim(config)
    q, kv, width = config["num_attention_heads"] * hd, kv_heads(config) * hd, 2 * h if layer == 0 else h
    table: Shapes = {"self_attn.q_proj.weight": (q, width), "self_attn.k_proj.weight": (kv, width),
                     "self_attn.v_proj.weight": (kv, width), "self_attn.o_proj.weight": (h, q)}
    if config.get("attention_bias") or (loader.engine == "sglang" and config.get("bias")):
        table["self_attn.o_proj.bias"] = (h,)
        if loader.engine == "vllm":
            table |= {"self_attn.q_proj.bias": (q,), "self_attn.k_proj.bias": (kv,), "self_attn.v_proj.bias": (kv,)}
    return table


def _mla(config: dict[str, Any], layer: int) -> Shapes:
    h, heads = config["hidden_size"], config["num_attention_heads"]
    q_rank, kv_rank, nope, rope, v = (config[key] for key in MLA_KEYS)
    width = 2 * h if layer == 0 else h
    return {"self_attn.q_a_proj.weight": (q_rank, width), "self_attn.q_a_layernorm.weight": (q_rank,),
            "self_attn.q_b_proj.weight": (heads * (nope + rope), q_rank),
            "self_attn.kv_a_proj_with_mqa.weight": (kv_rank + rope, width),
            "self_attn.kv_a_layernorm.weight": (kv_rank,),
            "self_attn.kv_b_proj.weight": (heads * (nope + v), kv_rank),
            "self_attn.o_proj.weight": (h, heads * v)}


def _rest(config: dict[str, Any], loader: Loader) -> Shapes:
    h, inner = config["hidden_size"], mlp_width(config, loader)
    return {"input_layernorm.weight": (h,), "hidden_norm.weight": (h,), "post_attention_layernorm.weight": (h,),
            "mlp.gate_proj.weight": (inner, h), "mlp.up_proj.weight": (inner, h), "mlp.down_proj.weight": (h, inner)}
