"""A target and an EAGLE-3 draft of random weights and few layers, as wide as real ones, for `serve_attention.py`.

`gqa64`: a Llama of 64 query heads on 8, width 128. `mla64`: a DeepSeek-V3 without experts, 64 heads over a latent of
512 + 64. Draft and target share one table of tensors (`eyas_contract.draft_tensors`): a target's layers are shaped like
a draft's later ones. What they say means nothing, but is said surely: scores are as spread as in a trained model, so
that attention decides the next token, and only `SPOKEN` tokens have any weight in the heads, which makes near ties rare
and gives a draft that knows nothing some accepted tokens.

    python benchmarks/random_models.py gqa64 OUT --tokenizer MODEL --layers 64     # OUT/target and OUT/draft
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import random
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from transformers import AutoTokenizer, DeepseekV3Config, LlamaConfig

from eyas_contract import CaptureSpec, Contract, DraftSpec, TargetSpec, VocabMap, draft_tensors, store_tensors
from eyas_contract.draft import MlaSizes
from eyas_contract.engines import sglang

SPOKEN = 16
SHARPNESS = 6.0  # of the heads
# Factors of the usual 0.02: scores get a standard deviation of about 3, and attention outweighs the MLP.
FACTORS = {"q_proj": 2.0, "q_b_proj": 3.0, "down_proj": 0.5}
YARN = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 17.5, "original_max_position_embeddings": 4096,
        "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}


LATENT = MlaSizes(q_lora_rank=1536, kv_lora_rank=512, qk_nope_head_dim=128, qk_rope_head_dim=64, v_head_dim=128)


@dataclass(frozen=True)
class Sizes:
    """Sizes of both models; MLA reads q_rank and those of `MlaSizes`, GQA kv_heads and width."""

    hidden: int = 4096
    inner: int = 2048
    heads: int = 64
    kv_heads: int = 8
    width: int = 128
    mla: MlaSizes = LATENT
    draft_vocab: int = 4096
    positions: int = 70000


TINY = Sizes(64, 96, 4, 2, 16, MlaSizes(48, 32, 16, 8, 16), 64, 2048)


def random_pair(kind: str, folder: Path, tokenizer: Path, layers: int, draft_kind: str = "", sizes: Sizes = Sizes(),
                dtype: torch.dtype = torch.bfloat16, device: str = "cuda") -> tuple[Path, Path]:
    """Write `folder/target` and `folder/draft`.

    Args:
        kind: `gqa64` or `mla64`.
        tokenizer: a model's folder, whose tokenizer and vocabulary they take.
        layers: of the target, 5 or more (the states captured are those after the last layers but one).
        draft_kind: as `kind`; the target's where it is empty.
        dtype, device: of the weights, and where they are drawn.
    """
    torch.manual_seed(0)
    words, vocab = AutoTokenizer.from_pretrained(tokenizer), TargetSpec.from_folder(tokenizer).vocab_size
    target, draft = folder / "target", folder / "draft"
    target.mkdir(parents=True)
    words.save_pretrained(target)
    _write_config(kind, target, sizes, layers, vocab, words)
    spec, ids = TargetSpec.from_folder(target), tuple(range(1, 2 * sizes.draft_vocab, 2))
    spoken = random.Random(0).sample(range(sizes.draft_vocab), SPOKEN)
    name = str(dtype).removeprefix("torch.")
    capture = CaptureSpec((layers - 4, layers - 3, layers - 2), sizes.hidden, "pre_norm",
                          store_tensors({"bfloat16": "BF16", "float32": "F32"}[name]), sizes.positions)
    like = _draft_spec(kind, sizes, spec, name)
    _save(target, _target_weights(like, layers, vocab, [ids[word] for word in spoken], dtype, device))
    contract = Contract(TargetSpec.from_folder(target), capture, VocabMap(vocab, ids),  # read again: now with weights
                        _draft_spec(draft_kind or kind, sizes, spec, name))
    _write_draft(draft, contract, spoken, dtype, device)
    return target, draft


def _draft_spec(kind: str, sizes: Sizes, target: TargetSpec, dtype: str) -> DraftSpec:
    mla = sizes.mla if kind == "mla64" else None
    return DraftSpec(
        kind="mla" if mla else "llama", num_layers=1, hidden_size=sizes.hidden, intermediate_size=sizes.inner,
        num_heads=sizes.heads, num_kv_heads=sizes.heads if mla else sizes.kv_heads,
        head_dim=mla.qk_head_dim if mla else sizes.width, target_hidden_size=sizes.hidden, num_aux=3,
        draft_vocab_size=sizes.draft_vocab, target_vocab_size=target.vocab_size,
        max_position_embeddings=sizes.positions, rope=target.rope, rms_norm_eps=target.rms_norm_eps, hidden_act="silu",
        fc_norm=False, norm_output=False, own_embedding=False, dtype=dtype, mla=mla)


def random_prompts(target: Path, context: int, count: int) -> list[list[int]]:
    """`count` prompts of `context` token ids, the same in every run."""
    draw, vocab = random.Random(context), TargetSpec.from_folder(target).vocab_size
    return [[draw.randrange(vocab // 8, vocab // 2) for _ in range(context)] for _ in range(count)]


def _write_config(kind: str, folder: Path, sizes: Sizes, layers: int, vocab: int, words: Any) -> None:
    common: dict[str, Any] = {
        "vocab_size": vocab, "hidden_size": sizes.hidden, "intermediate_size": sizes.inner, "num_hidden_layers": layers,
        "num_attention_heads": sizes.heads, "max_position_embeddings": sizes.positions, "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False, "bos_token_id": None, "eos_token_id": words.eos_token_id,
        "pad_token_id": words.pad_token_id, "dtype": "bfloat16"}
    if kind == "gqa64":
        rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 1e6}
        LlamaConfig(**common, num_key_value_heads=sizes.kv_heads, head_dim=sizes.width, rope_parameters=rope,
                    architectures=["LlamaForCausalLM"]).save_pretrained(folder)
        older: dict[str, Any] = {"rope_theta": 1e6}
    else:
        m = sizes.mla
        DeepseekV3Config(
            **common, num_key_value_heads=sizes.heads, q_lora_rank=m.q_lora_rank, kv_lora_rank=m.kv_lora_rank,
            qk_nope_head_dim=m.qk_nope_head_dim, qk_rope_head_dim=m.qk_rope_head_dim, v_head_dim=m.v_head_dim,
            first_k_dense_replace=layers, n_routed_experts=8, num_experts_per_tok=2, n_group=1, topk_group=1,
            moe_intermediate_size=32, rope_parameters=YARN, architectures=["DeepseekV3ForCausalLM"],
        ).save_pretrained(folder)
        scaling = {key: value for key, value in YARN.items() if key not in ("rope_theta", "rope_type")}
        older = {"rope_theta": YARN["rope_theta"], "rope_scaling": scaling | {"type": "yarn"}, "moe_layer_freq": 1}
    path = folder / "config.json"  # SGLang reads the older names
    path.write_text(json.dumps(json.loads(path.read_text()) | older))


def _random(name: str, shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    if len(shape) == 1:  # a norm
        return torch.ones(shape, dtype=dtype, device=device)
    value = torch.randn(shape, dtype=dtype, device=device) * 0.02
    return value * FACTORS.get(name.split(".")[-2], 1.0)


def _head(rows: int, hidden: int, spoken: list[int], dtype: torch.dtype, device: str) -> torch.Tensor:
    head = torch.zeros(rows, hidden, dtype=dtype, device=device)
    head[spoken] = torch.randn(len(spoken), hidden, dtype=dtype, device=device) * 0.02 * SHARPNESS
    return head


def _target_weights(like: DraftSpec, layers: int, vocab: int, spoken: list[int], dtype: torch.dtype,
                    device: str) -> dict[str, torch.Tensor]:
    """A target's weights in Hugging Face's names, its layers shaped as those of a draft like it."""
    deep = dataclasses.replace(like, num_layers=layers + 1)
    weights = {"model.embed_tokens.weight": _random("embed_tokens.weight", (vocab, like.hidden_size), dtype, device),
               "model.norm.weight": _random("norm.weight", (like.hidden_size,), dtype, device),
               "lm_head.weight": _head(vocab, like.hidden_size, spoken, dtype, device)}
    for name, shape in draft_tensors(deep).items():
        part = name.split(".")
        if part[0] == "layers" and part[1] != "0" and part[2] != "hidden_norm":  # layer 0 reads two inputs
            ours = ".".join(("model.layers", str(int(part[1]) - 1), *part[2:]))
            weights[ours] = _random(name, shape, dtype, device)
    return weights


def _write_draft(folder: Path, contract: Contract, spoken: list[int], dtype: torch.dtype, device: str) -> None:
    assert contract.vocab is not None
    assert contract.draft is not None
    weights = {sglang.export_name(name): _random(name, shape, dtype, device)
               for name, shape in draft_tensors(contract.draft).items()}
    head = _head(contract.draft.draft_vocab_size, contract.draft.hidden_size, spoken, dtype, device)
    weights |= {sglang.export_name("lm_head.weight"): head, "d2t": torch.tensor(contract.vocab.d2t()),
                "t2d": torch.tensor(contract.vocab.t2d())}
    folder.mkdir()
    contract.save(folder)
    (folder / "config.json").write_text(json.dumps(sglang.export_config(contract)))
    _save(folder, weights)


def _save(folder: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file({name: value.cpu().contiguous() for name, value in weights.items()}, folder / "model.safetensors",
              metadata={"format": "pt"})


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=("gqa64", "mla64"))
    parser.add_argument("out", type=Path, help="a folder to be made")
    parser.add_argument("--tokenizer", type=Path, required=True, help="a model's folder, whose tokenizer they take")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    print(*random_pair(options.kind, options.out, options.tokenizer, options.layers, device=options.device))


if __name__ == "__main__":
    main()
