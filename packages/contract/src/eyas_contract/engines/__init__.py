"""What each serving engine does with a draft checkpoint: data and pure functions, no GPU, no torch.

`sglang` and `vllm` hold what each engine reads (names, layer ids, flags), `loaders` how its draft classes take a file
apart, `checks` says what would go wrong, as findings.
"""

from eyas_contract.engines.checks import check
from eyas_contract.engines.findings import Finding, render, verdict
from eyas_contract.engines.flags import ServerFlags

__all__ = ["Finding", "ServerFlags", "check", "render", "verdict"]
