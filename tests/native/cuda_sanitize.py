"""One launch of every CUDA kernel at small sizes, for compute-sanitizer to look at; see cuda_sanitize.sh.

python tests/native/cuda_sanitize.py [initcheck]        with initcheck, memory is left as the driver gives it
"""

from __future__ import annotations

import sys

from eyas_native import selftest_cuda
from eyas_native.driver import Driver


def main() -> int:
    checks = selftest_cuda.run(Driver(fill=sys.argv[1:] != ["initcheck"]))
    failed = [check for check in checks if not check.passed]
    print(f"{len(checks) - len(failed)} of {len(checks)} checks agree with the CPU", *failed, sep="\n")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
