"""GPUs, and SGLang's attention backends that an EAGLE-3 draft can run on. Data.

Backends read in SGLang `srt/speculative/draft_utils.py` (the fixed map of draft backends),
`srt/layers/attention/attention_registry.py` and `srt/arg_groups/speculative_hook.py`, 0.5.10 to 0.5.23.
"""

from __future__ import annotations

from dataclasses import dataclass

Version = tuple[int, int, int]


@dataclass(frozen=True)
class Gpu:
    """A GPU model: compute capability times ten (90 for SM90), memory in GiB as the driver reports it, rounded down."""

    name: str
    sm: int
    memory_gib: int


GPUS = (
    Gpu("RTX PRO 6000", 120, 95), Gpu("RTX 5090", 120, 31), Gpu("RTX 5080", 120, 15), Gpu("DGX Spark", 121, 119),
    Gpu("GB300", 103, 279), Gpu("B300", 103, 268), Gpu("GB200", 100, 184), Gpu("B200", 100, 178),
    Gpu("GH200", 90, 94), Gpu("H200", 90, 139), Gpu("H100", 90, 79), Gpu("H800", 90, 79), Gpu("H20", 90, 95),
    Gpu("L40S", 89, 44), Gpu("L40", 89, 44), Gpu("L4", 89, 22), Gpu("RTX 4090", 89, 23), Gpu("RTX 6000 ADA", 89, 47),
    Gpu("A100-80GB", 80, 79), Gpu("A100-40GB", 80, 39), Gpu("A100", 80, 79), Gpu("A800", 80, 79), Gpu("A40", 86, 44),
    Gpu("A10G", 86, 22), Gpu("A10", 86, 22), Gpu("RTX 3090", 86, 23), Gpu("RTX A6000", 86, 47), Gpu("V100", 70, 31),
)


def find_gpu(name: str) -> Gpu | None:
    """The GPU with the longest name contained in `name` (`NVIDIA RTX PRO 6000 Blackwell` finds RTX PRO 6000)."""
    plain = " ".join(name.upper().replace("_", " ").replace("NVIDIA", "").replace("GEFORCE", "").split())
    words = plain.replace("-", " ").split()
    hits = [gpu for gpu in GPUS if gpu.name.upper() in plain
            and gpu.name.upper().replace("-", " ").split()[0] in words]
    return max(hits, key=lambda gpu: len(gpu.name), default=None)


@dataclass(frozen=True)
class Backend:
    """An attention backend.

    Attributes:
        since, until: first and last version with a draft backend of this name; None where there is none at all.
        tree: `yes`, `mha` (not for MLA), `no` (topk 1 only), or `reported` (listed as able, reported as not).
        gpus: compute capabilities it has code for, empty for all.
        model: `any`, `mha` or `mla`.
    """

    since: Version | None
    until: Version | None
    tree: str
    gpus: frozenset[int]
    model: str


_ALL: frozenset[int] = frozenset()
_FIRST = (0, 5, 10)
BACKENDS: dict[str, Backend] = {
    "triton": Backend(_FIRST, None, "yes", _ALL, "any"),
    "flashinfer": Backend(_FIRST, None, "mha", _ALL, "any"),
    "fa3": Backend(_FIRST, None, "reported", frozenset({80, 86, 87, 89, 90}), "any"),
    "fa4": Backend(_FIRST, None, "unknown", frozenset({90, 100, 103, 120, 121}), "any"),
    "flashmla": Backend(_FIRST, None, "no", frozenset({90, 100, 103}), "mla"),
    "trtllm_mha": Backend(_FIRST, None, "no", frozenset({100, 103, 120, 121}), "mha"),
    "trtllm_mla": Backend(_FIRST, None, "no", frozenset({100, 103}), "mla"),
    "tokenspeed_mla": Backend((0, 5, 12), (0, 5, 22), "unknown", frozenset({100, 103}), "mla"),
    "cutedsl_mla": Backend((0, 5, 13), None, "unknown", frozenset({100, 103}), "mla"),
    "nsa": Backend(_FIRST, None, "unknown", _ALL, "mla"),
    "dsa": Backend((0, 5, 13), None, "unknown", _ALL, "mla"),
    "dsv4": Backend((0, 5, 12), None, "unknown", _ALL, "mla"),
    "aiter": Backend(_FIRST, None, "yes", _ALL, "any"),
    "ascend": Backend(_FIRST, None, "unknown", _ALL, "any"),
    "intel_amx": Backend((0, 5, 16), None, "yes", _ALL, "any"),
    "intel_xpu": Backend((0, 5, 20), None, "unknown", _ALL, "any"),
    "hybrid_linear_attn": Backend((0, 5, 16), None, "unknown", _ALL, "any"),
    "torch_native": Backend(None, None, "no", _ALL, "any"),
    "flex_attention": Backend(None, None, "no", _ALL, "any"),
    "cutlass_mla": Backend(None, None, "no", frozenset({100, 103}), "mla"),
    "dual_chunk_flash_attn": Backend(None, None, "no", _ALL, "any"),
    "wave": Backend(None, None, "no", _ALL, "any"),
    "eyas": Backend((0, 5, 16), None, "yes", _ALL, "any"),  # eyas-serve's own: page size 1
}
PAGED_TREES = {"flashinfer": _FIRST, "fa3": _FIRST, "triton": (0, 5, 12)}  # topk > 1 with page size > 1
MLA_TARGETS = frozenset({"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM",
                         "KimiK25ForConditionalGeneration", "MistralLarge3ForCausalLM", "Glm4MoeLiteForCausalLM",
                         "GlmMoeDsaForCausalLM"})
# Without --speculative-* numbers SGLang takes (steps, topk, draft tokens) = (5, 4, 8) for these, else (3, 1, 4).
TREE_BY_DEFAULT = frozenset({"LlamaForCausalLM", "Grok1ForCausalLM", "Grok1VForCausalLM"})
