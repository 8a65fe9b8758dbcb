"""A complete contract used by the contract tests."""

from __future__ import annotations

from eyas_contract import CaptureSpec, Contract, DraftSpec, Rope, TargetSpec, VocabMap, store_tensors


def target() -> TargetSpec:
    return TargetSpec(
        architecture="LlamaForCausalLM", model_type="llama", num_layers=12, hidden_size=64, vocab_size=256,
        max_position_embeddings=512, rope=Rope("llama3", 500000.0, (("factor", 8.0), ("low_freq_factor", 1.0))),
        rms_norm_eps=1e-5, dtype="bfloat16", quantization="none", tie_word_embeddings=True, tokenizer_sha256="a" * 64,
        chat_template_sha256="b" * 64, weights_fingerprint="c" * 64)


def capture() -> CaptureSpec:
    return CaptureSpec((1, 5, 8), 64, "pre_norm", store_tensors("BF16"), 1024)


def vocab() -> VocabMap:
    return VocabMap(256, tuple(range(0, 192, 2)))


def draft() -> DraftSpec:
    return DraftSpec(
        kind="llama", num_layers=1, hidden_size=64, intermediate_size=128, num_heads=4, num_kv_heads=2, head_dim=16,
        target_hidden_size=64, num_aux=3, draft_vocab_size=96, target_vocab_size=256, max_position_embeddings=512,
        rope=target().rope, rms_norm_eps=1e-5, hidden_act="silu", fc_norm=False, norm_output=False,
        own_embedding=False, dtype="bfloat16")


def contract() -> Contract:
    return Contract(target(), capture(), vocab(), draft())
