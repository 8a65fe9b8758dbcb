"""The whole pipeline on a CPU, with real parts: SmolLM2-135M-Instruct gets an EAGLE-3 draft, served by real SGLang.

    python examples/demo.py [--out runs/demo]

Every stage is one command of one package, as a person would type it; this script only runs them in order, times them
and puts their results into `report.json` and `report.png`. Run it again and finished stages are passed over.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import report
import torch
from prompts import write_prompts
from smollm2 import write_model
from stages import BIN, Command, Stages

from eyas_contract import Manifest

ROOT = Path(__file__).resolve().parent.parent
ENGINE_PYTHON = BIN.parent / "engine" / "bin" / "python"

TRAIN_PROMPTS, HELD_OUT_PROMPTS = 400, 24
ANSWER_TOKENS, MEASURED_TOKENS, SPEED_PROMPTS = 96, 64, 4
PRECISION = {"bfloat16": "bf16", "float32": "fp32"}
TREE = {"steps": 3, "topk": 2, "num-draft-tokens": 6}
CHAIN = {"steps": 3, "topk": 1, "num-draft-tokens": 4}


def flags(shape: dict[str, int]) -> list[str]:
    """`{"steps": 3}` -> `--steps 3`."""
    return [word for key, value in shape.items() for word in (f"--{key}", str(value))]


def read(path: Path) -> Any:
    """Parse one of the stages' JSON reports."""
    return json.loads(path.read_text(encoding="utf-8"))


def run(out: Path) -> dict[str, Any]:
    """Run all stages below `out`; returns the report."""
    start, stages, model, dtype = time.monotonic(), Stages(), out / "smollm2", fast_dtype()
    stages.call("model", write_model, model)
    train, held_out = stages.call("prompts", write_prompts, out / "prompts", TRAIN_PROMPTS, HELD_OUT_PROMPTS)
    answers, store, training, draft = out / "answers.jsonl", out / "store", out / "run", out / "draft"
    stages.command("regenerate", "eyas-extract", "regenerate", "--target", model, "--prompts", train,
                   "--out", answers, "--max-new-tokens", ANSWER_TOKENS, "--dtype", dtype)
    stages.command("extract", "eyas-extract", "run", "--target", model, "--data", answers, "--out", store,
                   "--dtype", dtype)
    stages.command("train", "eyas-draft", "train", "--config", ROOT / "examples" / "demo.toml",
                   "--target", model, "--store", store, "--out", training, "--precision", PRECISION[dtype])
    shutil.rmtree(draft, ignore_errors=True)
    stages.command("export", "eyas-draft", "export", "--run", training, "--out", draft)
    verify = ["eyas-draft", "verify", "--run", training, "--draft", draft, "--target", model, "--store", store]
    measure(stages, out, model, draft, held_out, dtype, ("verify", verify))
    return summary(out, stages.seconds, round(time.monotonic() - start, 1))


def fast_dtype() -> str:
    """bfloat16 where the processor computes in it, else float32, which is several times faster there."""
    knows = torch.cpu.get_capabilities()
    return "bfloat16" if any(knows.get(name) for name in ("avx512_bf16", "amx_bf16", "bf16")) else "float32"


def measure(stages: Stages, out: Path, model: Path, draft: Path, held_out: Path, dtype: str, first: Command) -> None:
    """`first` and the reference decoder, then real SGLang: fp32 for equality and acceptance, `dtype` for speed."""
    asked: list[object] = ["--target", model, "--draft", draft, "--prompts", held_out,
                           "--max-new-tokens", MEASURED_TOKENS]
    tree, chain = ((f"reference_{name}", ["eyas-draft", "eval", *asked, *flags(shape),
                                          "--out", out / f"reference_{name}.json"])
                   for name, shape in (("tree", TREE), ("chain", CHAIN)))
    stages.lanes([tree], [first, chain])
    bench = ["eyas-serve", "bench", *asked, "--device", "cpu", "--engine-python", ENGINE_PYTHON]
    exact = [*bench, "--dtype", "float32", "--concurrency", 8]
    baseline = out / "served_tree.json"
    stages.command("serve_tree", *exact, *flags(TREE), "--out", baseline)
    stages.command("serve_chain", *exact, *flags(CHAIN), "--out", out / "served_chain.json",
                   "--baseline-report", baseline)
    stages.command("serve_speed", *bench, "--dtype", dtype, "--limit", SPEED_PROMPTS, *flags(TREE),
                   "--out", out / "served_speed.json")


def summary(out: Path, seconds: dict[str, float], wall_seconds: float) -> dict[str, Any]:
    """The report, from the stages' own files."""
    tree, chain, speed = (read(out / f"served_{name}.json") for name in ("tree", "chain", "speed"))
    return {
        "target": "SmolLM2-135M-Instruct", "engine": tree["engine"], "machine": machine(),
        "acceptance_length_served": tree["acceptance_length"],
        "acceptance_length_chain": chain["acceptance_length"],
        "acceptance_length_reference": read(out / "reference_tree.json")["acceptance_length"],
        "acceptance_length_reference_chain": read(out / "reference_chain.json")["acceptance_length"],
        "outputs_identical": tree["outputs_identical"] and chain["outputs_identical"],
        "served_tokens_per_second": speed["tokens_per_second"],
        "baseline_tokens_per_second": speed["baseline_tokens_per_second"], "dtype": speed["config"]["dtype"],
        "train_tokens": Manifest.load(out / "store").num_trained,
        "stages": seconds, "wall_seconds": wall_seconds,
    }


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    usage = max(resource.getrusage(who).ru_maxrss for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return {"processor": platform.processor() or platform.machine(), "cores": len(os.sched_getaffinity(0)),
            "largest_process_gib": round(usage / 2**20, 2)}


def main(argv: Sequence[str] | None = None) -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "demo")
    out = parser.parse_args(argv).out
    out.mkdir(parents=True, exist_ok=True)
    result = run(out)
    (out / "report.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    report.draw(out, out / "report.png")
    print(report.table(result))
    print(f"\n{out / 'report.json'}\n{out / 'report.png'}")


if __name__ == "__main__":
    main()
