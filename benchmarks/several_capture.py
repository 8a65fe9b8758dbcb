"""Part `capture` of `several_gpus.sh`: hidden states through SGLang with 1, 2, 4, 8 tensor-parallel ranks.

The target is a Llama of random weights whose heads every number of ranks divides (see `several_models.py`). With each
number: its states against Hugging Face's and against those of one rank, who writes, whether every row is there, and
tokens/s of prefill without and with the store.
"""

from __future__ import annotations

import gc
import statistics
import time
from typing import Any

import psutil
import torch
from several import Part, conversations, gpu_memory, part  # puts the tests' helpers on the path

# isort: split
from capture_path import captured_rate, contract_of, cut, layer_errors, near_layers, plain_rate, shards, states_of
from processes import title
from several_models import random_target

from eyas_contract import TargetSpec, default_aux_layer_ids
from eyas_extract.check import check
from eyas_extract.config import EngineConfig, RunConfig
from eyas_extract.engine import capturing
from eyas_extract.engine_process import Engine
from eyas_extract.run import run

GPU_ARGS = "--attention-backend triton --mem-fraction-static 0.5 --max-total-tokens 200000 --disable-cuda-graph"
CPU_ARGS = "--chunked-prefill-size 64"
NOISE = {"float32": 1e-4, "bfloat16": 0.05}  # largest relative error to Hugging Face's states


class Capture:
    """Inputs, and what every run has in common."""

    def __init__(self, part: Part) -> None:
        self.part, self.root = part, part.work / "stores"
        self.target = random_target(part.work / "target", part.target, not part.cpu)
        self.spec = TargetSpec.from_folder(self.target)
        self.aux = default_aux_layer_ids(self.spec.num_layers)
        rows, turns = (40, (1, 6)) if part.cpu else (64, (10, 40))
        self.rows = rows
        self.data = conversations(part.work / "data.jsonl", rows, turns, seed=5)
        self.shard_tokens = 300 if part.cpu else 1024
        self.engine_args = CPU_ARGS if part.cpu else GPU_ARGS

    def config(self, name: str, **changes: Any) -> RunConfig:
        """A run into the store `name`."""
        return RunConfig(self.target, self.data, self.root / name, max_length=8192, shard_tokens=self.shard_tokens,
                         device=self.part.device, dtype=self.part.dtype, **changes)

    def require_whole(self, name: str, ranks: int) -> None:
        """Rows complete, checksums right."""
        report = check(self.root / name)
        found = {"samples": report.samples, "tokens": report.tokens, "damage": [str(d) for d in report.damage[:3]]}
        self.part.check(f"every row is in the store ({name})", ranks, found, f"{self.rows} samples, no damage",
                        report.complete and report.samples == self.rows and not report.damage)

    def require_right(self, name: str, ranks: int, theirs: torch.Tensor) -> float:
        """Each layer's states Hugging Face's own, and nearer to them than to the layers beside; returns the worst."""
        errors = layer_errors(states_of(self.root / name), theirs, self.spec, self.aux)
        found = {str(k): [float(f"{error:.2e}"), float(f"{beside:.2e}")] for k, error, beside in errors}
        noise = NOISE[self.part.dtype]
        self.part.check(f"states are Hugging Face's ({name})", ranks, found,
                        f"relative error of each layer at most {noise} and below that of the layers beside it",
                        all(error <= noise and error < beside for _, error, beside in errors))
        return max(error for _, error, _ in errors)


def scheduler_pids(engine: psutil.Process) -> list[int]:
    """Process ids of the ranks, in their order."""
    ranks = [p for p in engine.children(recursive=True) if "sglang::scheduler" in title(p)]
    return [p.pid for p in sorted(ranks, key=title)]


def writers(pids: list[int]) -> list[int]:
    """Numbers of the ranks that have a writer process."""
    return [rank for rank, pid in enumerate(pids)
            if any("eyas_extract.inside.writer" in child.cmdline() for child in psutil.Process(pid).children())]


def one_size(capture: Capture, ranks: int, theirs: torch.Tensor, noise: float | None) -> float:
    """Everything with so many ranks; returns the noise of one rank."""
    part, name = capture.part, f"tp{ranks}"
    config = EngineConfig(capture.target, capture.root, device=part.device, dtype=part.dtype, tp=ranks, port=0,
                          engine_args=capture.engine_args)
    begun = time.monotonic()
    with capturing(config) as engine:
        started = time.monotonic() - begun
        done = run(capture.config(name, engine="sglang", servers=(engine.server.url,)))
        capture.require_whole(name, ranks)
        worst = capture.require_right(name, ranks, theirs)
        if noise is not None:
            one, several = states_of(capture.root / "tp1"), states_of(capture.root / name)
            error = float((several - one).norm() / one.norm())
            part.check("states are those of one rank", ranks, float(f"{error:.2e}"),
                       f"relative error at most twice one rank's worst to Hugging Face's ({2 * noise:.1e})",
                       error <= 2 * noise)
        pids = scheduler_pids(psutil.Process(engine.process.pid))
        found = {"ranks": len(pids), "that write": writers(pids)}
        part.check("rank 0 alone writes", ranks, found, f"{ranks} ranks, of which [0] have a writer process",
                   found == {"ranks": ranks, "that write": [0]})
        part.number(ranks=ranks, start_seconds=round(started, 1), check=done.check, **rates(capture, engine))
    return worst if noise is None else noise


def rates(capture: Capture, engine: Engine) -> dict[str, Any]:
    """Tokens/s of prefill without and with the store, median of two after a warm-up."""
    tokens, length = (2048, 128) if capture.part.cpu else (1 << 17, 1024)
    ids = torch.randint(3, capture.spec.vocab_size, (tokens,), generator=torch.Generator().manual_seed(0)).tolist()
    parts = shards(cut(ids, length), 4 * length)
    contract = contract_of(capture.target, capture.aux, {"float32": "F32", "bfloat16": "BF16"}[capture.part.dtype])
    rows = [(plain_rate(engine.server, parts, 8), *captured_rate(engine.server, parts, contract,
                                                                 capture.root / "rate", 8)) for _ in range(3)][1:]
    plain, stored, gigabytes = (statistics.median(column) for column in zip(*rows, strict=True))
    return {"tokens": tokens, "tokens_per_second": round(plain), "tokens_per_second_stored": round(stored),
            "gb_per_second": round(gigabytes, 3)}


def reference(capture: Capture) -> torch.Tensor:
    """Hugging Face's states of the stored layers and those beside them."""
    run(capture.config("hf", aux_layers=near_layers(capture.aux, capture.spec)))
    if not capture.part.cpu:
        gc.collect()
        torch.cuda.empty_cache()
    return states_of(capture.root / "hf")


def main() -> None:
    """All sizes."""
    this = part("capture")
    capture = Capture(this)
    theirs = reference(capture)
    memory = [] if this.cpu else gpu_memory()
    noise = None
    for ranks in this.sizes:
        noise = one_size(capture, ranks, theirs, noise)
    this.nothing_left(this.sizes[-1], "EYAS_CAPTURE", memory)


if __name__ == "__main__":
    main()
