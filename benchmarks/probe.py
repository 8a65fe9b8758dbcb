"""The probe on a real device: one right draft and two faulty ones, served and probed, the verdicts in one JSON.

    PYTHONPATH=native/python:packages/contract/src:packages/draft/src:packages/serve/src \\
    python benchmarks/probe.py --target SMOLLM2 --device cuda --out benchmarks/results/probe.json

The draft is made by hand from the target's last layer (as in the tests), bfloat16, every part noisy so that each
matters; its golden record by running the target. `layers-theta` reads the middle layer one too high and rotates by
another theta; `one-state` hands over one state. A part that fails is written down and the next one runs.
"""

from __future__ import annotations

import argparse
import json
import platform
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "serve"))

import handmade
from host import expose_plugin

from eyas_contract.contract import write_text_atomic
from eyas_contract.target import TargetSpec
from eyas_draft.golden import make_golden
from eyas_draft.golden_config import GoldenConfig
from eyas_serve.config import ServeConfig
from eyas_serve.probe.session import probe_client
from eyas_serve.server import Server


def make_draft(target: Path, folder: Path) -> Path:
    """A draft of every sixth token, with noise on all weights."""
    contract = handmade.make_contract(target, tuple(range(0, TargetSpec.from_folder(target).vocab_size, 6)))
    torch.manual_seed(0)
    weights = {}
    for name, value in handmade.make_weights(target, contract).items():
        noisy = value + (0.1 * value.std() if value.dim() > 1 else 0.05 * value) * torch.randn_like(value) \
            if value.is_floating_point() else value
        weights[name] = noisy.bfloat16() if value.is_floating_point() else value
    return handmade.write_draft(folder, contract, weights)


def layers_theta(config: dict[str, Any]) -> None:
    config["eagle_config"]["eagle_aux_hidden_state_layer_ids"][1] += 1
    config["rope_theta"] = config["rope_parameters"]["rope_theta"] = 1e4


def one_state(config: dict[str, Any]) -> None:
    config["eagle_config"]["use_aux_hidden_state"] = False


PARTS: dict[str, tuple[Callable[[dict[str, Any]], None], set[str]]] = {
    "right": (lambda config: None, set()),
    "layers-theta": (layers_theta, {"probe-states-layer", "probe-rope"}),
    "one-state": (one_state, {"probe-states-width"})}


def run_part(name: str, draft: Path, options: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Serve one variant with a guard that only reports, and probe it."""
    spoil, wanted = PARTS[name]
    copy = shutil.copytree(draft, folder / name)
    config = json.loads((copy / "config.json").read_text())
    spoil(config)
    (copy / "config.json").write_text(json.dumps(config))
    serve = ServeConfig(target=options.target, draft=copy, device=options.device, dtype="bfloat16", port=0,
                        engine_python=options.engine_python, preflight=False, guard="report", acceptance_floor=0.0,
                        max_total_tokens=8192, extra=options.extra, run_dir=folder / f"{name}-run")
    begun = time.monotonic()
    with Server(serve, print) as server:
        up = time.monotonic()
        report = probe_client(server.client, draft)
    print(report.text(False), flush=True)
    codes = {finding.code for finding in report.findings if finding.severity == "error"}
    return {"part": name, "as_wanted": codes == wanted, "start_seconds": round(up - begun, 1),
            "probe_seconds": round(time.monotonic() - up, 2), **json.loads(report.text(True))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", type=Path, required=True)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--engine-python", type=Path, default=None)
    parser.add_argument("--extra", default="")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    gpu = options.device == "cuda"
    result: dict[str, Any] = {"machine": {
        "device": torch.cuda.get_device_name() if gpu else platform.processor() or platform.machine(),
        "torch": torch.__version__}, "parts": []}
    with tempfile.TemporaryDirectory(prefix="eyas-probe-benchmark-") as name:
        folder = Path(name)
        if gpu:
            expose_plugin(folder / "plugin", "eyas-serve")
        draft = make_draft(options.target, folder / "draft")
        print(make_golden(GoldenConfig(draft, options.target)), flush=True)
        for part in options.parts:
            try:
                result["parts"].append(run_part(part, draft, options, folder))
            except Exception as error:
                traceback.print_exc()
                result["parts"].append({"part": part, "as_wanted": False, "failed": f"{type(error).__name__}: {error}"})
            write_text_atomic(options.out, json.dumps(result, indent=1) + "\n")
    print({part["part"]: part["as_wanted"] for part in result["parts"]})


if __name__ == "__main__":
    main()
