"""``python -m eyas_native selftest``: every operation on this machine against a plain reference.

On a machine with a CUDA device the kernels are checked against the CPU's results and timed. The report is made to be
sent back, above all by owners of cards that the kernels never ran on (SM120): attach what --json prints to an issue.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
from functools import partial
from typing import Any

from eyas_native import cuda, selftest, selftest_cuda, selftest_speed
from eyas_native.driver import Driver
from eyas_native.info import AVAILABLE, build_info, status


def report(backends: tuple[str, ...], speed: bool) -> dict[str, Any]:
    """passed, status, build, machine, device, plans (of SGLang-sized launches), speed, checks.

    Args:
        backends: of "cpu" and "cuda"; one that is not available here adds no checks, status says why.
        speed: also time the CUDA kernels.
    """
    found: dict[str, Any] = {
        "status": status(), "build": build_info(), "machine": f"{platform.machine()}, {platform.platform()}"
    }  # fmt: skip
    checks = selftest.run() if "cpu" in backends else []
    if "cuda" in backends and found["status"]["cuda"] == AVAILABLE:
        driver = Driver()
        found["device"], found["plans"] = driver.describe(), _plans()
        checks += selftest_cuda.run(driver)
        if speed and all(one.passed for one in checks):
            found["speed"] = selftest_speed.run(driver)
    passed = bool(checks) and all(one.passed for one in checks)
    return {"passed": passed, **found, "checks": [vars(one) for one in checks]}


def _plans() -> dict[str, dict[str, int]]:
    plan = partial(cuda.attention_plan, batch=1, max_tree=16, max_seq_len=32768, num_q_heads=64)
    return {"gqa64/8-d128-B1-L32768-T16": plan("gqa", num_kv_heads=8, head_dim=128),
            "mla64-B1-L32768-T16": plan("mla", num_kv_heads=1)}  # fmt: skip


def _lines(found: dict[str, Any]) -> list[str]:
    lines = [f"{name}: {reason}" for name, reason in found["status"].items()]
    for part in ("build", "device"):
        lines += [f"{key}: {value}" for key, value in found.get(part, {}).items() if value]
    plans = found.get("plans", {}).items()
    lines += [f"plan {case}: {' '.join(f'{key}={value}' for key, value in plan.items())}" for case, plan in plans]
    lines += [str(selftest.Check(**one)) for one in found["checks"]]
    lines += [f"{row['case']:32} {row['us']:9} us {row['gbps']:6} GB/s" for row in found.get("speed", [])]
    passed = sum(one["passed"] for one in found["checks"])
    return [*lines, f"{passed} of {len(found['checks'])} checks passed"]


def main() -> int:
    """0 when there were checks and every one passed, else 1."""
    parser = argparse.ArgumentParser(prog="python -m eyas_native", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("selftest", help="compare every operation with a plain reference, print a table")
    check.add_argument("--json", action="store_true", help="print JSON instead of a table")
    check.add_argument("--backend", choices=("cpu", "cuda"), help="only this one (default: all that run here)")
    check.add_argument("--no-speed", action="store_true", help="do not time the CUDA kernels")
    options = parser.parse_args()
    found = report((options.backend,) if options.backend else ("cpu", "cuda"), not options.no_speed)
    sys.stdout.write((json.dumps(found, indent=1) if options.json else "\n".join(_lines(found))) + "\n")
    return 0 if found["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
