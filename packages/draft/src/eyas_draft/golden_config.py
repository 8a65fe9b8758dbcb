"""Settings of `eyas-draft golden`; apart from its work, which imports torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tyro


@dataclass(frozen=True)
class GoldenConfig:
    """Write the golden record of anybody's draft: fixed tokens, the target's states, every stage, the proposals."""

    draft: tyro.conf.Positional[Path]
    """The draft's folder, in any dialect; the record is written into it."""
    target: Path
    """The target's folder."""
    store: Path | None = None
    """Take tokens and states from this store of eyas-extract instead of running the target."""
    tokens: int = 64
    """How many tokens, 8 to 1024."""
    text: str = ""
    """The text whose first tokens are used; a short English one by default."""
    device: str = "cpu"
    """Where the target runs."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Arithmetic of the target; auto is the dtype of its weights."""
    ids_mean: Literal["auto", "output", "boundary"] = "auto"
    """What the ids in the draft's eagle_config mean, where no contract says so."""
    aux_layer_ids: tuple[int, ...] = ()
    """The trained layers as outputs (0-based), where the draft does not say."""
    read_as: Literal["auto", "sglang", "vllm"] = "auto"
    """Whose norms the names above layer 0 mean, for drafts of several layers."""
    vocab_from: str = ""
    """JSON file with the draft's target ids, where d2t is not to be trusted."""
