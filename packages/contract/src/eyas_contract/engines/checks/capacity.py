"""Whether both models can be cut and held: TP divisibility, memory per GPU, quantisation of the draft."""

from __future__ import annotations

from eyas_contract.engines.checks.case import Case
from eyas_contract.engines.findings import Finding
from eyas_contract.engines.hardware import GPUS
from eyas_contract.engines.wanted import kv_heads, mlp_width

_GIB = 2**30
_REST_GIB = 4.0  # CUDA context, graphs, activations: SGLang's own reserve is of this order
_DTYPE_BYTES = {"auto": 2, "bf16": 2, "bfloat16": 2, "fp16": 2, "fp8_e4m3": 1, "fp8_e5m2": 1}


def check_capacity(case: Case) -> list[Finding]:
    """TP, memory, quantisation, and a GPU name that the table does not know."""
    result = _tp(case) + _quantization(case)
    if case.gpu_name and case.gpu is None:
        result.append(Finding("gpu-unknown", "warning", "--gpu", case.gpu_name,
                              f"one of {', '.join(sorted(gpu.name for gpu in GPUS))}",
                              "memory and attention backends were not checked for it", "Name a known GPU."))
    return result + (_memory(case) if case.gpu is not None else [])


def _tp(case: Case) -> list[Finding]:
    tp, config = case.tp, case.config
    if tp < 2:
        return []
    heads, kv = config["num_attention_heads"], kv_heads(config)
    inner = mlp_width(config, case.loader) if case.loader else config["intermediate_size"]
    wrong = [f"{name} {value}" for name, value in (("num_attention_heads", heads),
                                                    ("intermediate_size", inner))
             if value % tp]
    if case.loader and case.loader.kind == "llama" and kv % tp and tp % kv:
        wrong.append(f"num_key_value_heads {kv}")
    of_target = case.target_config.get("num_attention_heads")
    if type(of_target) is int and of_target % tp:
        wrong.append(f"the target's num_attention_heads {of_target}")
    if not wrong:
        return []
    return [Finding("tp-indivisible", "error", "config.json", "; ".join(wrong), f"multiples of --tp {tp}"
                    " (key and value heads may also divide it)", "the server stops while it builds the model",
                    "Choose a --tp that divides them.")]


def kv_bytes_per_token(config: dict[str, object], layers: int, dtype_bytes: int, tp: int) -> float:
    """KV cache bytes per token and GPU: MLA keeps one latent per layer on every GPU, MHA its share of the heads."""
    latent, rope = config.get("kv_lora_rank"), config.get("qk_rope_head_dim")
    if type(latent) is int and type(rope) is int:
        return float(layers * (latent + rope) * dtype_bytes)
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    kv = config.get("num_key_value_heads") or heads
    if type(heads) is not int or type(hidden) is not int or type(kv) is not int or heads < 1:
        return 0.0
    given = config.get("head_dim")
    dim = given if type(given) is int else hidden // heads
    return 2.0 * layers * max(1, kv / tp) * dim * dtype_bytes


def _memory(case: Case) -> list[Finding]:
    assert case.gpu is not None
    total, draft = case.target_bytes, case.draft_bytes
    if not total:
        return [Finding("memory", "note", "target", "no checkpoint", "the target's weights, to add up memory",
                        "memory per GPU was not checked", "Give the folder with the weights.")]
    pp = case.flags.pp_size or 1
    share = (total / (case.tp * pp) + draft / case.tp) / _GIB
    have = float(case.gpu.memory_gib)
    usable = have * case.flags.mem_fraction_static if case.flags.mem_fraction_static else have - _REST_GIB
    left = usable - share
    text = f"weights {share:.1f} GiB per GPU (target {total / _GIB:.1f}, draft {draft / _GIB:.1f}, tp {case.tp}" + (
        f", pp {pp}" if pp > 1 else "") + f") of {have:.0f} on {case.gpu.name}"
    if left <= 0:
        return [Finding("memory", "error", "memory per GPU", text, f"less than {usable:.1f} GiB, and room for KV cache",
                        "the server runs out of memory while loading", "Use more GPUs, or a quantised target.")]
    size = _DTYPE_BYTES.get(case.flags.kv_cache_dtype or "auto", 2)
    per_token = kv_bytes_per_token(case.target_config, case.spec.num_layers, size, case.tp) \
        + kv_bytes_per_token(case.config, int(case.config.get("num_hidden_layers") or 1), size, case.tp)
    tokens = int(left * _GIB / per_token) if per_token else 0
    context = case.flags.context_length or case.spec.max_position_embeddings
    tight = per_token > 0 and tokens < context
    return [Finding("memory", "warning" if tight else "note", "memory per GPU",
                    f"{text}; about {left:.1f} GiB left for {tokens:,} tokens of KV cache",
                    f"room for one request of the served context ({context:,})" if tight else "nothing",
                    "a long request cannot be served" if tight else "an estimate: graphs and activations vary",
                    "Give --context-length, more GPUs, or an fp8 KV cache." if tight else "Nothing.")]


def _quantization(case: Case) -> list[Finding]:
    if case.engine != "sglang":
        return []
    result = []
    own = case.config.get("quantization_config")
    stored = {info.dtype for name, info in case.tensors.items() if "d2t" not in name and "t2d" not in name}
    plain = bool(stored) and stored <= {"BF16", "F16", "F32"}
    if case.flags.quantization and case.flags.speculative_draft_model_quantization is None and plain and not own:
        result.append(Finding("quantization-inherited", "warning", "--quantization", case.flags.quantization,
                              "--speculative-draft-model-quantization unquant, for a draft in 16 bits",
                              "the draft inherits the target's quantisation: it is quantised on the fly, or its "
                              "weights do not fit", "Add --speculative-draft-model-quantization unquant."))
    if own and plain:
        method = own.get("quant_method", "?") if isinstance(own, dict) else "?"
        result.append(Finding("quantization-config", "error", "config.json: quantization_config", str(method),
                              f"no such key: the weights are {', '.join(sorted(stored))}",
                              "the server builds quantised layers that these weights do not fill (copied from the "
                              "target's config?)", "Remove quantization_config."))
    return result
