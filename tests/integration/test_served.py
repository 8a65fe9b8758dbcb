"""A trained draft served by real SGLang on the CPU, and every way in which such a draft is known to fail in silence."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from safetensors.torch import load_file, save_file

import tiny
from eyas_contract import EngineFailure, InvalidInput
from eyas_serve import BenchConfig, ServeConfig, Server
from eyas_serve.bench_report import summarise
from eyas_serve.config import DRAFTED_AT_A_TIME
from eyas_serve.measure import Run, measure
from eyas_serve.probe.session import ProbeReport, probe_client
from eyas_serve.processes import running
from eyas_serve.prompts import load_prompts

pytestmark = pytest.mark.integration
Faulty = Callable[..., ServeConfig]
TREE = {"steps": 3, "topk": 2, "num_draft_tokens": 6}
CHAIN = {"steps": 3, "topk": 1, "num_draft_tokens": 4}


@pytest.fixture(scope="module")
def config(tiny_target: Path, trained_draft: Path, engine_python: Path) -> ServeConfig:
    return ServeConfig(target=tiny_target, draft=trained_draft, device="cpu", dtype="float32", port=0,
                       engine_python=engine_python, radix_cache=False, max_total_tokens=4096, cuda_graph_max_bs=8,
                       **TREE)


@dataclasses.dataclass(frozen=True)
class Served:
    """A server's answers, what the probe said of its draft, how many requests it runs at a time, and the processes it
    was."""

    run: Run
    probe: ProbeReport | None
    room: int | None
    processes: list[psutil.Process]


def serve(config: BenchConfig) -> Served:
    """Single questions, then live conversations, then the probe."""
    asked = [*load_prompts(config.prompts, config.target), *load_prompts(config.prompts, config.target, turns="live")]
    with Server(config) as server:
        assert server.child is not None
        assert len({status.pid for status in server.progress.ranks.values()}) == config.tp
        run = measure(server.client, asked, config, "test")
        probe = probe_client(server.client, None) if config.draft else None
        return Served(run, probe, server.client.room, [*psutil.Process(server.child.pid).children(recursive=True)])


@pytest.fixture(scope="module")
def bench(config: ServeConfig, tmp_path_factory: pytest.TempPathFactory) -> BenchConfig:
    """Eight questions, of which two have a second turn."""
    rows = tiny.conversations(8, seed=77)
    for i in (0, 1):
        rows[i]["messages"] += [{"role": "assistant", "content": "well"}, *tiny.conversations(2, seed=5)[i]["messages"]]
    path = tiny.write_jsonl(tmp_path_factory.mktemp("bench") / "prompts.jsonl", rows)
    return BenchConfig(**vars(config), prompts=path, max_new_tokens=32, concurrency=2)


@pytest.fixture(scope="module")
def plain(bench: BenchConfig) -> Served:
    """What the target says alone."""
    return serve(dataclasses.replace(bench, draft=None))


@pytest.mark.parametrize("shape", [
    TREE, CHAIN | {"tp": 2, "max_running_requests": 50, "environment": {"EYAS_CPU_SPAWN": "1"}}],
    ids=["tree", "chain-tp2-spawned"])
def test_launch_bench_probe_stop(bench: BenchConfig, plain: Served, shape: dict[str, Any]) -> None:
    drafted = serve(dataclasses.replace(bench, **shape))
    report = summarise(drafted.run, plain.run)
    assert len(report["prompts"]) == 8 + 8 + 2
    assert report["outputs_identical"], report["differing"]
    assert report["acceptance_length"] > 1.5
    assert all(0 < rate <= 1 for rate in report["conditional_rates"])
    assert drafted.probe is not None
    assert not drafted.probe.findings, drafted.probe.text(False)
    assert drafted.room == shape.get("max_running_requests", DRAFTED_AT_A_TIME)
    assert len(drafted.processes) > shape.get("tp", 1)
    assert not [process for process in drafted.processes if running(process.pid)]


@pytest.fixture
def faulty(config: ServeConfig, tmp_path: Path) -> Faulty:
    """The config of a server whose draft has been damaged: tensors changed by a function, config.json by values."""
    def make(tensors: Callable[[dict[str, torch.Tensor]], None] | None = None, eagle: dict[str, Any] | None = None,
             sizes: dict[str, int] | None = None, **settings: Any) -> ServeConfig:
        assert config.draft is not None
        folder = tmp_path / "draft"
        shutil.copytree(config.draft, folder)
        if tensors is not None:
            weights = load_file(folder / "model.safetensors")
            tensors(weights)
            save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        plain = json.loads((folder / "config.json").read_text())
        plain["eagle_config"] |= eagle or {}
        plain |= sizes or {}
        (folder / "config.json").write_text(json.dumps(plain))
        return dataclasses.replace(config, draft=folder, **settings)

    return make


def unknown_names(weights: dict[str, torch.Tensor]) -> None:
    for name in [name for name in weights if name.startswith("midlayer.")]:
        weights[name.replace("midlayer.", "decoder_layers.0.")] = weights.pop(name)


def no_head(weights: dict[str, torch.Tensor]) -> None:
    del weights["lm_head.weight"]


def no_map(weights: dict[str, torch.Tensor]) -> None:
    del weights["d2t"]


def absolute_map(weights: dict[str, torch.Tensor]) -> None:
    weights["d2t"] = weights["d2t"] + torch.arange(len(weights["d2t"]))


def several(weights: dict[str, torch.Tensor]) -> None:
    for fault in (unknown_names, no_head, no_map):
        fault(weights)


STATIC: list[tuple[dict[str, Any], str]] = [
    ({"tensors": unknown_names}, r"decoder_layers\.0"), ({"tensors": no_head}, r"lm_head"),
    ({"tensors": no_map}, r"d2t"), ({"tensors": absolute_map}, r"d2t"),
    ({"extra": "--speculative-algorithm EAGLE"}, r"EAGLE3"),
    ({"eagle": {"use_aux_hidden_state": False}}, r"use_aux_hidden_state")]


@pytest.mark.parametrize(("fault", "words"), STATIC, ids=["names", "head", "map", "absolute", "algorithm", "aux"])
def test_refused_before_start(faulty: Faulty, fault: dict[str, Any], words: str) -> None:
    with pytest.raises(InvalidInput, match=words):
        Server(faulty(**fault)).start()


GUARDED: list[tuple[dict[str, Any], list[str]]] = [
    ({"tensors": several}, ["drops decoder_layers.0.hidden_norm.weight", "sets lm_head.weight", "d2t is missing"]),
    ({"tensors": absolute_map}, ["d2t holds absolute target ids"]),
    ({"sizes": {"intermediate_size": 8}}, ["cuts or pads without a word", "mlp.down_proj.weight"]),
    ({"extra": "--speculative-algorithm EAGLE --json-model-override-args '{\"rope_scaling\": {\"rope_type\": "
      "\"linear\", \"factor\": 2.0}}'", "eagle": {"use_aux_hidden_state": False}},
     ["--speculative-algorithm EAGLE with an EAGLE-3 draft", "use_aux_hidden_state is false",
      "--json-model-override-args changes the draft's config too: rope_scaling"])]


@pytest.mark.parametrize(("fault", "words"), GUARDED, ids=["names-head-map", "absolute", "cut", "algorithm-aux"])
def test_refused_by_the_guard_alone(faulty: Faulty, fault: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(EngineFailure) as caught:
        Server(faulty(preflight=False, **fault)).start()
    for word in words:
        assert word in str(caught.value)


@pytest.fixture
def command(tiny_target: Path, engine_python: Path, tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """`eyas-serve launch`, running."""
    flags = {"--target": tiny_target, "--device": "cpu", "--port": 0, "--engine-python": engine_python,
             "--run-dir": tmp_path}
    words = [str(word) for pair in flags.items() for word in pair]
    process = subprocess.Popen([sys.executable, "-m", "eyas_serve.cli", "launch", *words], text=True)
    yield process
    process.kill()
    process.communicate()


def test_a_killed_launcher_leaves_nothing(command: subprocess.Popen[str]) -> None:
    left: list[psutil.Process] = []
    while len(left) < 4:  # the keeper, SGLang's launcher and what it spawned
        assert command.poll() is None
        time.sleep(0.2)
        left = psutil.Process(command.pid).children(recursive=True)
    os.kill(command.pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in left) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [p for p in left if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
