"""Random cases for the CUDA kernels against float64 references. Needs a CUDA device.

python tests/native/cuda_fuzz.py --cases 200 --seed 0        prints one line per kernel, exit code 1 on any failure
"""

from __future__ import annotations

import argparse
import random
import sys
import time

import torch
from cuda_cases import attention_case, combine_case, graph_case
from cuda_tree_cases import from_mask_case, gather_case, rejection_case, target_only_case, tree_case

KERNELS = {
    "tree_attn_gqa": (lambda rng: attention_case(rng, mla=False), 1.0),
    "tree_attn_mla": (lambda rng: attention_case(rng, mla=True), 0.5),
    "hidden_gather": (gather_case, 1.0),
    "tree": (tree_case, 1.0),
    "tree_from_mask": (from_mask_case, 1.0),
    "target_only": (target_only_case, 0.03),
    "rejection": (rejection_case, 0.1),
    "graph": (graph_case, 0.02),
    "lse_combine": (combine_case, 0.3),
}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="at most, per kernel")
    parser.add_argument("--only", choices=list(KERNELS))
    args = parser.parse_args()
    failed = 0
    for name, (case, share) in KERNELS.items():
        if args.only not in (None, name):
            continue
        faults, done, until = [], 0, time.monotonic() + args.seconds
        for i in range(max(1, round(args.cases * share))):
            if time.monotonic() > until:
                break
            done += 1
            torch.manual_seed(args.seed * 100003 + i)
            fault = case(random.Random(args.seed * 100003 + i))
            if fault:
                faults.append(f"  case {i}: {fault[:600]}")
        failed += len(faults)
        print(f"{name}: {done - len(faults)} of {done} agree", *faults[:6], sep="\n", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
