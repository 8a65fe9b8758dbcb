"""What the benchmarks of capturing share: engines, shards of one length, rates without and with capture, errors."""

from __future__ import annotations

import argparse
import io
import json
import lzma
import os
import platform
import shutil
import time
from array import array
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from eyas_contract import CaptureSpec, Contract, EngineFailure, Manifest, TargetSpec, store_tensors
from eyas_contract.commands import Progress
from eyas_contract.contract import write_text_atomic
from eyas_contract.safetensors_header import read_header
from eyas_extract.check import read_tensor
from eyas_extract.engine_process import Engine, EngineSettings
from eyas_extract.engine_run import Committer, layout
from eyas_extract.mask import Sample
from eyas_extract.pending import Pending
from eyas_extract.protocol import CaptureSettings
from eyas_extract.server import Server
from eyas_extract.store import StoreWriter
from eyas_extract.workers import Workers

NO_GRAPHS = "--cuda-graph-backend-prefill disabled"


@dataclass(frozen=True)
class Served:
    """A server as the workers want it; one that is lost ends the benchmark."""

    server: Server

    def revive(self) -> None:
        raise EngineFailure(self.server.url, "lost", "a server", "See its log.")


class Results:
    """The JSON file, written again after every number: rows by part; a part that is run again replaces its rows."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plain: dict[str, Any] = json.loads(path.read_text()) if path.is_file() else {"parts": {}}

    def begin(self, part: str) -> None:
        """What is added from here on belongs to this part."""
        self.rows: list[dict[str, Any]] = [{"machine": machine()}]
        self.plain["parts"][part] = self.rows

    def add(self, **row: Any) -> None:
        print(f"[{time.strftime('%T')}] {json.dumps(row)}", flush=True)
        self.rows.append(row)
        write_text_atomic(self.path, json.dumps(self.plain, indent=1) + "\n")


def machine() -> dict[str, Any]:
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or platform.machine()
    return {"device": name, "cores": len(os.sched_getaffinity(0)), "torch": torch.__version__,
            "python": platform.python_version()}


def tokens_of(answers: Path, target: Path, count: int) -> list[int]:
    """`count` tokens of the conversations, one after another, over again where they end."""
    tokenizer = AutoTokenizer.from_pretrained(target)
    ids: list[int] = []
    for line in rows_of(answers, count):
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
    """Tokens a second of the same requests without capture, as many at a time."""

    def ask(part: Pending) -> None:
        names = [f"plain-{id(part)}-{time.monotonic_ns()}-{s.id}" for s in part.samples]
        server.prefill([s.input_ids for s in part.samples], names)

    start = time.perf_counter()
    with ThreadPoolExecutor(ahead) as pool:
        list(pool.map(ask, parts))
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
    """Folders to store in: on the disk, and in memory where there is room."""
    found = {"disk": options.disk / "eyas-capture"}
    memory = Path("/dev/shm")
    if shutil.disk_usage(memory).free > options.memory_bytes:
        found["memory"] = memory / "eyas-capture"
    return found


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


def states_of(store: Path, shards: int | None = None) -> torch.Tensor:
    """All states of a store, or of its first shards: aux layers and the last side by side, float32."""
    parts: dict[str, list[torch.Tensor]] = {}
    for shard in Manifest.load(store).shards[:shards]:
        tensors = read_header(store / shard.file).tensors
        for name, scales in (("aux_hidden_states", "aux_scales"), ("last_hidden_state", "last_scale")):
            values = read_tensor(tensors[name]).float()
            if scales in tensors:
                scale = read_tensor(tensors[scales])
                values = (values.view(*scale.shape, -1) * scale[:, :, None]).view(values.shape)
            parts.setdefault(name, []).append(values)
    return torch.cat([torch.cat(part) for part in parts.values()], dim=1)


def engines(options: argparse.Namespace, work: Path, stack: ExitStack, wanted: dict[str, Contract | None]
            ) -> dict[str, Engine]:
    """Engines of the small target, started side by side; each captures what its contract says, or nothing."""
    made: dict[str, Engine] = {}

    def start(name: str) -> None:
        made[name] = started(options, options.target, work / name, wanted[name], options.small_args, Path("/"))
        stack.callback(made[name].stop)

    with ThreadPoolExecutor(len(wanted)) as pool:
        list(pool.map(start, wanted))
    return made


def rows_of(answers: Path, count: int) -> list[str]:
    """The first lines of a JSONL file, compressed or not."""
    with lzma.open(answers, "rt") if answers.suffix == ".xz" else answers.open(encoding="utf-8") as source:
        return list(islice(source, count))
