"""``python -m eyas_native selftest``: every operation on this machine against a plain reference."""

from __future__ import annotations

import argparse
import json
import sys

from eyas_native import selftest
from eyas_native.info import build_info, status


def main() -> int:
    """0 when every check passed, 1 when one failed."""
    parser = argparse.ArgumentParser(prog="python -m eyas_native", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("selftest", help="compare every operation with a plain reference, print a table")
    check.add_argument("--json", action="store_true", help="print JSON instead of a table")
    options = parser.parse_args()
    checks = selftest.run()
    passed = all(one.passed for one in checks)
    if options.json:
        report = {"passed": passed, "status": status(), "build": build_info(), "checks": [vars(one) for one in checks]}
        sys.stdout.write(json.dumps(report, indent=1) + "\n")
        return 0 if passed else 1
    lines = [f"{name}: {reason}" for name, reason in status().items()]
    lines += [f"{key}: {value}" for key, value in build_info().items() if value]
    lines += [str(one) for one in checks]
    lines.append(f"{sum(one.passed for one in checks)} of {len(checks)} checks passed")
    sys.stdout.write("\n".join(lines) + "\n")
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
