"""What a server's log says about its draft: acceptance that is no acceptance, weights that were skipped.

Lines read: SGLang's `Decode batch ... accept len: 1.00, accept rate: 0.00` and the MLA draft's
`Eagle3 MLA: skipping unexpected weight NAME` (`srt/models/kimi_k25_eagle3.py`).
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from eyas_contract.engines.findings import Finding, most_severe_first

_ACCEPT = re.compile(r"accept len: (\d+(?:\.\d+)?)")
_SKIPPED = re.compile(r"Eagle3 MLA: skipping unexpected weight (\S+)")
_SUSPECTS = ("1. weights missing, or dropped for their names (check the draft with preflight); "
             "2. the algorithm flag: EAGLE instead of EAGLE3; 3. the vocabulary map: d2t missing or absolute; "
             "4. the aux layers: one state instead of three, or other layers than trained")
LOW = 1.2


def check_log(lines: Iterable[str]) -> list[Finding]:
    """Findings from a server's log, most severe first; lines are streamed and none is kept."""
    rounds, total, most, simulated = 0, 0.0, 0.0, False
    skipped: set[str] = set()
    for line in lines:
        for match in _ACCEPT.finditer(line):
            rounds, total, most = rounds + 1, total + float(match[1]), max(most, float(match[1]))
        skipped.update(match[1] for match in _SKIPPED.finditer(line[:2000]))
        simulated |= "SGLANG_SIMULATE_ACC_LEN" in line
    result = []
    if skipped:
        result.append(Finding("log-weight-skipped", "error", "log", ", ".join(sorted(skipped)[:50]),
                              "no skipped draft weight", "what they should fill keeps random values",
                              "Rename them: the decoder layer is `midlayer.*`, without `model.` before it."))
    if simulated:
        result.append(Finding("log-simulated", "error", "log", "SGLANG_SIMULATE_ACC_LEN", "a measured acceptance",
                              "acceptance lengths in this log are made up", "Unset the variable and measure again."))
    if not rounds:
        result.append(Finding("log-no-rounds", "warning", "log", "no line with `accept len`",
                              "decode lines of a server with speculation",
                              "speculation is off, nothing was generated, or the log is not a server's",
                              "Send requests, and look for --speculative-algorithm among the server's arguments."))
        return most_severe_first(result)
    mean = total / rounds
    text = f"accept len {mean:.2f} over {rounds} log lines (highest {most:.2f}; the target's own token is counted)"
    if most <= 1.0:
        result.append(Finding("log-acceptance-one", "error", "log", text, "above 1.00",
                              "no draft token was ever accepted: the server is healthy, but speculation is dead; "
                              "longer training cannot mend this", f"Suspects, in this order: {_SUSPECTS}."))
    elif mean < LOW:
        result.append(Finding("log-acceptance-low", "warning", "log", text, f"{LOW} or more, for a trained draft",
                              "hardly any draft token is accepted: drafting costs more than it gives",
                              f"Suspects: {_SUSPECTS}; 5. a draft trained too little, or on other data."))
    return most_severe_first(result)
