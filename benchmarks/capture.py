"""What capturing costs SGLang's prefill, and how near it comes to the ceilings of copy and disk, in one run.

    PYTHONPATH=native/python:packages/contract/src:packages/extract/src:packages/draft/src \\
    python benchmarks/capture.py --target SMOLLM2 --answers ANSWERS.jsonl.xz --out benchmarks/results/capture.json

Part `off_on`: two engines of the same target on one device, one plain and one that captures; the same prompts, made of
real conversations cut to one length, go to both in turn, equally many at a time. Before that, the states of whole
conversations, through the command's own path, are compared with Hugging Face's on the same device, layer by layer.
Every rate counts from the first request to the last shard's commit, hashed and synced. `wide`: see capture_wide.py;
`fp8` and `drafts`: see capture_fp8.py.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import sys
import tempfile
import time
import traceback
from contextlib import ExitStack
from pathlib import Path

from capture_fp8 import drafts, fp8
from capture_path import (
    Results,
    captured_rate,
    contract_of,
    cut,
    engines,
    layer_errors,
    near_layers,
    places,
    plain_rate,
    rows_of,
    shards,
    states_of,
    tokens_of,
)
from capture_wide import wide
from host import expose_plugin

from eyas_contract import TargetSpec, default_aux_layer_ids
from eyas_extract.config import RunConfig
from eyas_extract.plan import bytes_per_token
from eyas_extract.run import run
from eyas_extract.server import Server

LENGTHS = (512, 1024, 2048, 4096)


def off_on(options: argparse.Namespace, results: Results, work: Path, stack: ExitStack) -> None:
    """Capture off and on, in turn."""
    target, spec = options.target, TargetSpec.from_folder(options.target)
    contract = contract_of(target, default_aux_layer_ids(spec.num_layers), options.model_dtype)
    begun = time.perf_counter()
    running = engines(options, work, stack, {"off": None, "on": contract})
    results.add(started_seconds=round(time.perf_counter() - begun, 1), target=target.name,
                args={name: engine.settings.extra for name, engine in running.items()})
    ids = tokens_of(options.answers, target, options.tokens)
    try:
        equal(options, results, work, running["on"].server)
    except Exception as error:  # the rates are worth having all the same
        traceback.print_exc()
        results.add(equal="failed", why=f"{type(error).__name__}: {error}"[:2000])
    for length in options.lengths:
        parts = shards(cut(ids, length), options.shard_tokens)
        rates: dict[str, list[float]] = {"off": []}
        gigabytes: dict[str, list[float]] = {}
        for turn in range(options.rounds + 1):  # the first warms up
            some = parts if turn else parts[:max(len(parts) // 4, 1)]
            rates["off"].append(plain_rate(running["off"].server, some, options.ahead))
            for name, folder in places(options).items():
                rate, size = captured_rate(running["on"].server, some, contract, folder, options.ahead)
                rates.setdefault(name, []).append(rate)
                gigabytes.setdefault(name, []).append(size)
        rates, gigabytes = ({n: v[1:] for n, v in each.items()} for each in (rates, gigabytes))
        off = statistics.median(rates["off"])
        results.add(length=length, tokens=sum(p.tokens for p in parts), tokens_per_second=rates,
                    gb_per_second=gigabytes, bytes_per_token=bytes_per_token(contract.capture),
                    cost={n: round(1 - statistics.median(v) / off, 4) for n, v in rates.items() if n != "off"})


def equal(options: argparse.Namespace, results: Results, work: Path, server: Server) -> None:
    """Relative error of each layer's states to Hugging Face's, and to those of the layers beside it."""
    data = work / "conversations.jsonl"
    data.write_text("".join(rows_of(options.answers, options.rows)))
    spec = TargetSpec.from_folder(options.target)
    aux = default_aux_layer_ids(spec.num_layers)
    common = {"device": options.device, "overlong": "truncate", "max_length": 2048}
    by_engine = run(RunConfig(options.target, data, work / "sglang", engine="sglang", servers=(server.url,),
                              **common))
    run(RunConfig(options.target, data, work / "hf", aux_layers=near_layers(aux, spec), **common))
    ours, theirs = (states_of(work / name) for name in ("sglang", "hf"))
    for k, error, beside in layer_errors(ours, theirs, spec, aux):
        results.add(equal="layer", layer=k, error=error, next_best=beside, tokens=len(ours))
    results.add(equal="check", check=by_engine.check, samples=by_engine.samples,
                rejected=by_engine.rejected, bytes_per_token=by_engine.bytes / by_engine.tokens)


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True, help="folder of a small real target")
    parser.add_argument("--answers", type=Path, required=True, help="JSONL (or .xz) of its conversations")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    parser.add_argument("--parts", nargs="+", default=["off_on", "wide"], choices=[*PARTS])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--model-dtype", default="BF16", choices=["BF16", "F32"])
    parser.add_argument("--engine-python", type=Path)
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rows", type=int, default=100, help="conversations compared with Hugging Face")
    parser.add_argument("--wide-rounds", type=int, default=2)
    parser.add_argument("--ahead", type=int, default=10)
    parser.add_argument("--shard-tokens", type=int, default=1 << 13)
    parser.add_argument("--width", type=int, default=7168)
    parser.add_argument("--wide-tokens", type=int, default=3 << 15)
    parser.add_argument("--wide-length", type=int, default=1024)
    parser.add_argument("--wide-shard-tokens", type=int, default=1 << 10)
    parser.add_argument("--wide-ahead", type=int, default=24)
    parser.add_argument("--slot-mib", type=int, default=64)
    parser.add_argument("--slots", type=int, default=24)
    parser.add_argument("--writers", type=int, default=8)
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "eyas-capture-stores",
                        help="where `fp8` leaves its two stores for `drafts`")
    parser.add_argument("--draft-rows", type=int, default=5000)
    parser.add_argument("--draft-vocab", type=int, default=16000)
    parser.add_argument("--draft-ttt", type=int, default=7)
    parser.add_argument("--draft-steps", type=int, default=700)
    parser.add_argument("--draft-tokens", type=int, default=4432)
    parser.add_argument("--draft-prompts", type=int, default=150)
    parser.add_argument("--draft-answer", type=int, default=128)
    parser.add_argument("--memory-bytes", type=int, default=12 * 2**30)
    gpu = "--attention-backend triton --mem-fraction-static 0.4 --disable-decode-cuda-graph"  # nothing is decoded
    parser.add_argument("--small-args", default=f"{gpu} --max-total-tokens 400000")
    parser.add_argument("--wide-args", default=f"{gpu} --max-total-tokens 200000 --load-format dummy")
    return parser.parse_args()


def main() -> None:
    options = parsed()
    os.environ.setdefault("OMP_NUM_THREADS", "2")
    options.engine_python = options.engine_python or Path(sys.executable)
    results = Results(options.out)
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        expose_plugin(work / "plugin", "eyas-extract")
        for part in options.parts:
            begun = time.perf_counter()
            results.begin(part)
            (work / part).mkdir()
            with ExitStack() as stack:
                try:
                    PARTS[part](options, results, work / part, stack)
                except Exception as error:  # the other part may still succeed
                    traceback.print_exc()
                    results.add(failed=f"{type(error).__name__}: {error}"[:2000])
                finally:
                    for log in (work / part).glob("*/server.log"):
                        shutil.copy(log, options.out.with_name(f"{part}-{log.parent.name}.log"))
            results.add(seconds=round(time.perf_counter() - begun, 1))


PARTS = {"off_on": off_on, "wide": wide, "fp8": fp8, "drafts": drafts}

if __name__ == "__main__":
    main()
