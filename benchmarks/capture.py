"""What capturing costs SGLang's prefill, and how near it comes to the ceilings of copy and disk, in one run.

    PYTHONPATH=native/python:packages/contract/src:packages/extract/src \\
    python benchmarks/capture.py --target SMOLLM2 --answers gsm8k_answers.jsonl.xz --out benchmarks/results/capture.json

Part `off_on`: two engines of the same target on one device, one plain and one that captures; the same prompts, made of
real conversations cut to one length, go to both in turn. Before that, the states of whole conversations, through the
command's own path, are compared with Hugging Face's on the same device, layer by layer. Part `wide`: a target of random
weights, 7168 wide, where the copy is the load; its GB/s stand against the slower of two ceilings measured in the same
run: copies from the device into pinned memory, and writing (the best of several numbers of threads, synced). Every rate
counts from the first request to the last shard's commit, hashed and synced.
"""

from __future__ import annotations

import argparse
import io
import json
import lzma
import math
import os
import platform
import shutil
import statistics
import sys
import tempfile
import threading
import time
import traceback
from array import array
from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from host import expose_plugin
from transformers import AutoTokenizer, LlamaConfig

from eyas_contract import (
    CaptureSpec,
    Contract,
    EngineFailure,
    Manifest,
    TargetSpec,
    default_aux_layer_ids,
    store_tensors,
)
from eyas_contract.commands import Progress
from eyas_contract.safetensors_header import read_header
from eyas_extract.check import read_tensor
from eyas_extract.config import RunConfig
from eyas_extract.engine_process import Engine, EngineSettings
from eyas_extract.engine_run import Committer, layout
from eyas_extract.mask import Sample
from eyas_extract.pending import Pending
from eyas_extract.plan import bytes_per_token
from eyas_extract.protocol import CaptureSettings
from eyas_extract.run import run
from eyas_extract.server import Server
from eyas_extract.store import StoreWriter
from eyas_extract.workers import Workers

NO_GRAPHS = "--cuda-graph-backend-prefill disabled"
LENGTHS = (512, 1024, 2048, 4096)


@dataclass(frozen=True)
class Served:
    """A server as the workers want it; one that is lost ends the benchmark."""

    server: Server

    def revive(self) -> None:
        raise EngineFailure(self.server.url, "lost", "a server", "See its log.")


class Results:
    """The JSON file, written again after every number."""

    def __init__(self, path: Path) -> None:
        self.path, self.plain = path, {"machine": machine(), "rows": []}

    def add(self, **row: Any) -> None:
        print(json.dumps(row), flush=True)
        self.plain["rows"].append(row)
        self.path.write_text(json.dumps(self.plain, indent=1) + "\n")


def machine() -> dict[str, Any]:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {"device": name, "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__,
            "python": platform.python_version()}


def tokens_of(answers: Path, target: Path, count: int) -> list[int]:
    """`count` tokens of the conversations, one after another, over again where they end."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    ids: list[int] = []
    with lzma.open(answers, "rt") if answers.suffix == ".xz" else answers.open(encoding="utf-8") as source:
        for line in source:
            messages = [{k: m[k] for k in ("role", "content")} for m in json.loads(line)["messages"]]
            ids += tokenizer.encode(tokenizer.apply_chat_template(messages, tokenize=False), add_special_tokens=False)
            if len(ids) >= count:
                break
    return (ids * (count // len(ids) + 1))[:count]


def cut(ids: Sequence[int], length: int) -> list[Sample]:
    return [Sample(f"s{at}", at + 1, array("i", ids[at:at + length]), b"\0" * (length - 1) + b"\1")
            for at in range(0, len(ids) - length + 1, length)]


def shards(samples: Sequence[Sample], tokens: int) -> list[Pending]:
    each = max(tokens // len(samples[0].input_ids), 1)
    return [Pending(list(samples[at:at + each]), [], at + each + 1) for at in range(0, len(samples), each)]


def plain_rate(server: Server, parts: Sequence[Pending], ahead: int) -> float:
    """Tokens a second of the same requests without capture, as many in flight."""
    todo, lock = list(parts), threading.Lock()

    def work() -> None:
        while True:
            with lock:
                if not todo:
                    return
                part = todo.pop(0)
            names = [f"plain-{id(part)}-{time.monotonic_ns()}-{s.id}" for s in part.samples]
            server.prefill([s.input_ids for s in part.samples], names)

    threads = [threading.Thread(target=work) for _ in range(ahead)]
    start = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(part.tokens for part in parts) / (time.perf_counter() - start)


def captured_rate(server: Server, parts: Sequence[Pending], contract: Contract, folder: Path, ahead: int
                  ) -> tuple[float, float]:
    """Tokens and GB a second into a fresh store, which is then deleted."""
    shutil.rmtree(folder, ignore_errors=True)
    writer = StoreWriter(folder, contract, {"benchmark": 1})
    start = time.perf_counter()
    committer = Committer(writer, Progress(0, "rows", "capture", stream=io.StringIO()), [])
    with Workers([Served(server)], ahead, lambda captor: None) as workers:
        window = deque((part, workers.submit(layout(writer, part))) for part in parts)
        while window:
            committer.commit(window)
    assert not committer.kept, committer.kept
    writer.finish([])
    seconds = time.perf_counter() - start
    size = sum(shard.bytes for shard in writer.manifest.shards)
    writer.close()
    shutil.rmtree(folder)
    return sum(part.tokens for part in parts) / seconds, size / seconds / 1e9


def contract_of(target: Path, aux: tuple[int, ...], dtype: str) -> Contract:
    spec = TargetSpec.from_folder(target)
    return Contract(spec, CaptureSpec(aux, spec.hidden_size, "pre_norm", store_tensors(dtype), 8192))


def started(options: argparse.Namespace, target: Path, work: Path, contract: Contract | None, extra: str,
            roots: Path) -> Engine:
    """An engine; where the prefill graphs cannot be captured, one without."""
    capture = None
    if contract is not None:
        stored = contract.capture.tensors[2].dtype
        capture = CaptureSettings(contract.capture.aux_layer_ids, str(roots), str(work / "ranks"), stored,
                                  options.slot_mib, options.slots, options.writers)
    dtype = {"BF16": "bfloat16", "F32": "float32"}[options.model_dtype]
    for more in (extra, f"{extra} {NO_GRAPHS}"):
        settings = EngineSettings(target, options.device, dtype, python=options.engine_python, extra=more,
                                  start_seconds=120.0)
        try:
            return Engine(settings, capture, work)
        except EngineFailure as failure:
            print(f"{failure}\n{(work / 'server.log').read_text(errors='replace')[-3000:]}", flush=True)
            shutil.copy(work / "server.log", options.out.with_name(f"{work.name}-{time.time():.0f}.log"))
            last = failure
    raise last


def places(options: argparse.Namespace) -> dict[str, Path]:
    """Folders to store in: the disk, and memory where there is room."""
    found = {"disk": options.disk / "eyas-capture"}
    memory = Path("/dev/shm")
    if shutil.disk_usage(memory).free > options.memory_bytes:
        found["memory"] = memory / "eyas-capture"
    return found


def off_on(options: argparse.Namespace, results: Results, work: Path, stack: ExitStack) -> None:
    """Capture off and on, in turn."""
    target, spec = options.target, TargetSpec.from_folder(options.target)
    contract = contract_of(target, default_aux_layer_ids(spec.num_layers), options.model_dtype)
    engines: dict[str, Engine] = {}
    faults: list[BaseException] = []

    def start(name: str, capturing: Contract | None) -> None:
        try:
            engines[name] = started(options, target, work / name, capturing, options.small_args, Path("/"))
            stack.callback(engines[name].stop)
        except EngineFailure as failure:
            faults.append(failure)

    begun = time.perf_counter()
    threads = [threading.Thread(target=start, args=pair) for pair in (("off", None), ("on", contract))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if faults:
        raise faults[0]
    results.add(part="off_on", started_seconds=round(time.perf_counter() - begun, 1), target=str(target),
                args={name: engine.settings.extra for name, engine in engines.items()})
    ids = tokens_of(options.answers, target, options.tokens)
    try:
        equal(options, results, work, engines["on"].server)
    except Exception as error:  # the rates are worth having all the same
        traceback.print_exc()
        results.add(part="equal", failed=f"{type(error).__name__}: {error}"[:2000])
    for length in options.lengths:
        parts = shards(cut(ids, length), options.shard_tokens)
        rates: dict[str, list[float]] = {"off": []}
        gigabytes: dict[str, list[float]] = {}
        for turn in range(options.rounds + 1):  # the first warms up
            off = plain_rate(engines["off"].server, parts, options.ahead)
            if turn:
                rates["off"].append(off)
            for name, folder in places(options).items():
                rate, size = captured_rate(engines["on"].server, parts, contract, folder, options.ahead)
                if turn:
                    rates.setdefault(name, []).append(rate)
                    gigabytes.setdefault(name, []).append(size)
        off = statistics.median(rates["off"])
        results.add(part="off_on", length=length, tokens=sum(p.tokens for p in parts), tokens_per_second=rates,
                    gb_per_second=gigabytes, bytes_per_token=bytes_per_token(contract.capture),
                    cost={n: round(1 - statistics.median(v) / off, 4) for n, v in rates.items() if n != "off"})


def fp8(options: argparse.Namespace, results: Results, work: Path, stack: ExitStack) -> None:
    """The error of an e4m3 store and its bytes."""
    aux = default_aux_layer_ids(TargetSpec.from_folder(options.target).num_layers)
    engine = started(options, options.target, work / "engine", contract_of(options.target, aux, "F8_E4M3"),
                     options.small_args, Path("/"))
    stack.callback(engine.stop)
    equal(options, results, work, engine.server, "fp8")


def equal(options: argparse.Namespace, results: Results, work: Path, server: Server, store_dtype: str = "auto") -> None:
    """Relative error of each layer's states to Hugging Face's, and to those of the layers beside it."""
    data = work / "conversations.jsonl"
    with lzma.open(options.answers, "rt") if options.answers.suffix == ".xz" else options.answers.open() as source:
        data.write_text("".join(line for line, _ in zip(source, range(options.rows), strict=False)))
    spec = TargetSpec.from_folder(options.target)
    aux = default_aux_layer_ids(spec.num_layers)
    common = {"device": options.device, "overlong": "truncate", "max_length": 2048}
    by_engine = run(RunConfig(options.target, data, work / "sglang", engine="sglang", servers=(server.url,),
                              store_dtype=store_dtype, **common))
    run(RunConfig(options.target, data, work / "hf", aux_layers=near_layers(aux, spec), **common))
    ours, theirs = (states_of(work / name) for name in ("sglang", "hf"))
    for k, error, beside in layer_errors(ours, theirs, spec, aux):
        results.add(part="equal", store=store_dtype, layer=k, error=error, next_best=beside, tokens=len(ours))
    results.add(part="equal", store=store_dtype, check=by_engine.check, samples=by_engine.samples,
                rejected=by_engine.rejected, bytes_per_token=by_engine.bytes / by_engine.tokens)


def near_layers(aux: Sequence[int], spec: TargetSpec) -> tuple[int, ...]:
    """The layers that are stored and those beside them; the last one is stored anyhow."""
    return tuple(sorted({k + d for k in aux for d in (-1, 0, 1)} | {spec.num_layers - 2}))


def layer_errors(ours: torch.Tensor, theirs: torch.Tensor, spec: TargetSpec, aux: Sequence[int]
                 ) -> list[tuple[int, float, float]]:
    """Relative error of each stored layer to the same layer of `theirs`, a store of `near_layers`, and to the one
    beside it that is nearest."""
    width, found = spec.hidden_size, []
    layers = {k: theirs[:, i * width:(i + 1) * width]
              for i, k in enumerate((*near_layers(aux, spec), spec.num_layers - 1))}
    for i, k in enumerate((*aux, spec.num_layers - 1)):
        state = ours[:, i * width:(i + 1) * width]
        errors = {j: float((state - layers[j]).norm() / layers[j].norm()) for j in (k - 1, k, k + 1) if j in layers}
        found.append((k, errors.pop(k), min(errors.values())))
    return found


def states_of(store: Path) -> torch.Tensor:
    """All states of a store, aux layers and the last side by side, float32."""
    parts: dict[str, list[torch.Tensor]] = {}
    for shard in Manifest.load(store).shards:
        tensors = read_header(store / shard.file).tensors
        for name, scales in (("aux_hidden_states", "aux_scales"), ("last_hidden_state", "last_scale")):
            values = read_tensor(tensors[name]).float()
            if scales in tensors:
                scale = read_tensor(tensors[scales])
                values = (values.view(*scale.shape, -1) * scale[:, :, None]).view(values.shape)
            parts.setdefault(name, []).append(values)
    return torch.cat([torch.cat(part) for part in parts.values()], dim=1)


def wide(options: argparse.Namespace, results: Results, work: Path, stack: ExitStack) -> None:
    """A wide target of random weights against the ceilings."""
    target = work / "wide"
    config = LlamaConfig(vocab_size=32000, hidden_size=options.width, intermediate_size=2048, num_hidden_layers=4,
                         num_attention_heads=options.width // 128, num_key_value_heads=min(8, options.width // 128),
                         head_dim=128, max_position_embeddings=8192, architectures=["LlamaForCausalLM"],
                         dtype="bfloat16", bos_token_id=1, eos_token_id=2)
    config.save_pretrained(target)
    contract = contract_of(target, (0, 1, 2), options.model_dtype)
    engine = started(options, target, work / "wide_engine", contract, options.wide_args, Path("/"))
    stack.callback(engine.stop)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 32000, (options.wide_tokens,), generator=generator).tolist()
    parts = shards(cut(ids, 1024), options.wide_shard_tokens)
    size = sum(p.tokens for p in parts) * contract.capture.hidden_size * 4 * 2
    copy = copy_ceiling() if torch.cuda.is_available() else None
    results.add(part="wide", copy_gb_per_second=copy, width=options.width)
    plain_rate(engine.server, parts, options.ahead)
    results.add(part="wide", prefill_without_store=plain_rate(engine.server, parts, options.ahead))
    for name, folder in places(options).items():
        rows = []
        for turn in range(options.wide_rounds + 1):
            write = write_ceiling(folder, size)
            rate, gigabytes = captured_rate(engine.server, parts, contract, folder, options.wide_ahead)
            if turn:
                ceiling = min(copy or math.inf, max(write.values()))
                rows.append({"tokens_per_second": rate, "gb_per_second": gigabytes, "write_gb_per_second": write,
                             "share_of_ceiling": gigabytes / ceiling})
        results.add(part="wide", store=name, rounds=rows, bytes_per_token=bytes_per_token(contract.capture),
                    share=statistics.median(r["share_of_ceiling"] for r in rows))


def copy_ceiling() -> float:
    """GB a second from the device into pinned memory, best of ten."""
    device = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    host = torch.empty(1 << 28, dtype=torch.uint8, pin_memory=True)
    best = float("inf")
    for _ in range(10):
        torch.cuda.synchronize()
        start = time.perf_counter()
        host.copy_(device, non_blocking=True)
        torch.cuda.synchronize()
        best = min(best, time.perf_counter() - start)
    return (1 << 28) / best / 1e9


def write_ceiling(folder: Path, size: int) -> dict[str, float]:
    """GB a second of writing and syncing `size` bytes, by number of threads, each to files of its own."""
    block = memoryview(bytearray(os.urandom(1 << 20)) * 32)
    result = {}
    for count in (1, 4, 8):
        folder.mkdir(parents=True, exist_ok=True)

        def work(number: int, blocks: int) -> None:
            with (folder / f"{number}").open("wb", buffering=0) as sink:
                for _ in range(blocks):
                    sink.write(block)
                os.fsync(sink.fileno())

        blocks = max(size // len(block) // count, 1)
        threads = [threading.Thread(target=work, args=(n, blocks)) for n in range(count)]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        result[str(count)] = blocks * count * len(block) / (time.perf_counter() - start) / 1e9
        shutil.rmtree(folder)
    return result


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True, help="folder of a small real target")
    parser.add_argument("--answers", type=Path, required=True, help="JSONL (or .xz) of its conversations")
    parser.add_argument("--out", type=Path, required=True, help="JSON file for the results")
    parser.add_argument("--parts", nargs="+", default=["off_on", "wide"], choices=["off_on", "wide", "fp8"])
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"])
    parser.add_argument("--model-dtype", default="BF16", choices=["BF16", "F32"])
    parser.add_argument("--engine-python", type=Path)
    parser.add_argument("--disk", type=Path, default=Path(tempfile.gettempdir()))
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS)
    parser.add_argument("--tokens", type=int, default=1 << 20)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--rows", type=int, default=200, help="conversations compared with Hugging Face")
    parser.add_argument("--wide-rounds", type=int, default=2)
    parser.add_argument("--ahead", type=int, default=10)
    parser.add_argument("--shard-tokens", type=int, default=1 << 13)
    parser.add_argument("--width", type=int, default=7168)
    parser.add_argument("--wide-tokens", type=int, default=3 << 15)
    parser.add_argument("--wide-shard-tokens", type=int, default=1 << 10)
    parser.add_argument("--wide-ahead", type=int, default=24)
    parser.add_argument("--slot-mib", type=int, default=16)
    parser.add_argument("--slots", type=int, default=48)
    parser.add_argument("--writers", type=int, default=6)
    parser.add_argument("--memory-bytes", type=int, default=12 * 2**30)
    gpu = "--attention-backend triton --mem-fraction-static 0.4"
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
            with ExitStack() as stack:
                try:
                    {"off_on": off_on, "wide": wide, "fp8": fp8}[part](options, results, work / part, stack)
                except Exception as error:  # the other part may still succeed
                    traceback.print_exc()
                    results.add(part=part, failed=f"{type(error).__name__}: {error}"[:2000])
                finally:
                    for log in (work / part).glob("*/server.log"):
                        shutil.copy(log, options.out.with_name(f"{part}-{log.parent.name}.log"))
            results.add(part=part, seconds=round(time.perf_counter() - begun, 1))


if __name__ == "__main__":
    main()
