"""What each serving engine does with a draft checkpoint: data and pure functions, no GPU, no torch.

`sglang` writes what SGLang reads (config, names, layer ids, flags); `checks` says what would go wrong, as findings.
"""

from eyas_contract.engines.checks import check
from eyas_contract.engines.findings import Finding, render, verdict

__all__ = ["Finding", "check", "render", "verdict"]
