"""How each engine's draft class takes a checkpoint apart: accepted names, honoured config keys, per version.

Sources: SGLang 0.5.10 to 0.5.23 `srt/models/llama_eagle3.py` and `srt/models/kimi_k25_eagle3.py` (`load_weights`,
`__init__`); vLLM 0.33.0 `model_executor/models/llama_eagle3.py` and `deepseek_eagle3.py`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from eyas_contract.engines import sglang, vllm

Version = tuple[int, int, int]
Kind = Literal["llama", "mla"]
_LEGACY = (("midlayer", "layers.0"), ("aux_norm_low", "fc_norm.0"), ("aux_norm_mid", "fc_norm.1"),
           ("aux_norm_high", "fc_norm.2"))
# One stored tensor that stands for several of the table's.
FUSED = {"self_attn.qkv_proj.weight": ("self_attn.q_proj.weight", "self_attn.k_proj.weight",
                                       "self_attn.v_proj.weight"),
         "mlp.gate_up_proj.weight": ("mlp.gate_proj.weight", "mlp.up_proj.weight")}


@dataclass(frozen=True)
class Loader:
    """One draft class of one engine version.

    Attributes:
        engine, version, kind, source: which, and the file it was read in.
        multi_layer: whether `num_hidden_layers` above 1 is built.
        fc_norm, norm_output, norm_before_fc, norm_before_residual, use_aux_norm, num_aux_key, fc_bias: whether the
            config key of that name is honoured.
        unknown: what happens to a tensor of unknown name: `dropped` (silently), `warned` (dropped, logged), `refused`.
    """

    engine: Literal["sglang", "vllm"]
    version: Version
    kind: Kind
    source: str
    multi_layer: bool
    fc_norm: bool
    norm_output: bool
    norm_before_fc: bool
    norm_before_residual: bool
    use_aux_norm: bool
    num_aux_key: bool
    fc_bias: bool
    unknown: Literal["dropped", "warned", "refused"]

    @property
    def name(self) -> str:
        """`SGLang 0.5.20`, for people."""
        return f"{'SGLang' if self.engine == 'sglang' else 'vLLM'} {sglang.version_text(self.version)}"

    def place(self, name: str) -> str | None:
        """Trainer's name (`layers.0.*`, `fc.weight`, `d2t`, ...) a stored tensor is loaded as; None: not accepted."""
        if self.engine == "vllm":
            return self._place_vllm(name)
        return self._place_sglang_llama(name) if self.kind == "llama" else self._place_sglang_mla(name)

    def _place_sglang_llama(self, name: str) -> str | None:
        if self.version >= (0, 5, 12):
            for old, new in _LEGACY:
                name = name.replace(old, new)
        for special in ("d2t", "t2d"):
            if special in name:
                return special
        name = name.removeprefix("model.") if not name.startswith("model.lm_head.") else "model.lm_head"
        if self.version < (0, 5, 12):
            return None if name.startswith("layers.") else re.sub(r"^midlayer\.", "layers.0.", name)
        return name

    def _place_sglang_mla(self, name: str) -> str | None:
        for special in ("d2t", "t2d"):
            if name == special or name.endswith(f".{special}"):
                return special
        return None if name.startswith("model.") else re.sub(r"^midlayer\.", "layers.0.", name)

    def _place_vllm(self, name: str) -> str | None:
        for special in ("t2d", "d2t"):
            if special in name:
                return special
        return None if name.startswith("model.") else name.replace("midlayer.", "layers.0.")

    def num_aux(self, config: dict[str, Any]) -> int:
        """Number of states `fc` is built for."""
        if self.engine == "sglang" and self.version < (0, 5, 12):
            return 3
        if self.num_aux_key and config.get("num_aux_hidden_states") is not None:
            return int(config["num_aux_hidden_states"])
        ids = eagle_config(config).get("eagle_aux_hidden_state_layer_ids")
        if ids is None and self.engine == "sglang" and self.kind == "mla":
            ids = config.get("eagle_aux_hidden_state_layer_ids")
        return len(ids) if isinstance(ids, list) and ids else 3


def eagle_config(config: dict[str, Any]) -> dict[str, Any]:
    """The `eagle_config` object of a draft's config, or an empty one."""
    value = config.get("eagle_config")
    return value if isinstance(value, dict) else {}


def loader(engine: str, version: Version, kind: Kind) -> Loader | None:
    """The draft class that opens a draft of this kind; None where this version has none."""
    if engine == "vllm":
        return Loader("vllm", version, kind,
                      f"model_executor/models/{'llama' if kind == 'llama' else 'deepseek'}_eagle3.py", True, True, True,
                      kind == "llama", True, False, True, False, "refused")
    modern = version >= (0, 5, 12)
    if kind == "mla":
        if not modern:
            return None
        norms = version >= (0, 5, 13)
        return Loader("sglang", version, kind, "srt/models/kimi_k25_eagle3.py", False, norms, norms, False, False,
                      norms, False, True, "warned")
    return Loader("sglang", version, kind, "srt/models/llama_eagle3.py", modern, modern, modern,
                  version >= (0, 5, 17), False, modern, modern, True, "dropped")


def draft_kind(engine: str, architecture: str) -> Kind | None:
    """Which table a draft's architecture is read with; None for a class that is no EAGLE-3 draft there."""
    if engine == "vllm":
        kind = vllm.DRAFT_CLASSES.get(architecture)
    else:
        kind = next((k for k, name in sglang.DRAFT_CLASSES.items() if name == architecture), None)
    return "llama" if kind == "llama" else "mla" if kind == "mla" else None
