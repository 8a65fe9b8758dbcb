"""The capture inside real SGLang on a CPU: chunked prefill, a prefix cache that is on, two ranks, killed engines."""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from processes import capture_settings, title

import tiny
from eyas_contract import Manifest
from eyas_contract.safetensors_header import read_header
from eyas_extract import engine_process
from eyas_extract.check import check, read_tensor
from eyas_extract.config import EngineConfig, RegenerateConfig, RunConfig
from eyas_extract.engine import capturing
from eyas_extract.engine_process import Engine
from eyas_extract.regenerate import regenerate
from eyas_extract.run import run

pytestmark = pytest.mark.integration
AUX = (1, 3, 4)
NEAR = (0, 1, 2, 3, 4, 5)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Conversations of 1 to 6 turns, so that chunks of 64 tokens cut most of them, and batches mix."""
    rng, rows = random.Random(5), []
    for number in range(40):
        turns = [tiny.conversation(rng) for _ in range(rng.randint(1, 6))]
        rows.append({"id": f"row-{number}", "messages": [
            {"role": role, "content": text} for turn in turns for role, text in zip(("user", "assistant"), turn,
                                                                                    strict=True)]})
    return tiny.write_jsonl(tmp_path_factory.mktemp("data") / "data.jsonl", rows)


@pytest.fixture(scope="module")
def right(tiny_target: Path, data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, torch.Tensor]:
    """Hugging Face's states of many layers."""
    out = tmp_path_factory.mktemp("right") / "store"
    run(RunConfig(tiny_target, data, out, aux_layers=NEAR, max_length=512, device="cpu"))
    return tensors(out)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("stores")


@pytest.fixture(scope="module")
def engine(tiny_target: Path, root: Path, engine_python: Path) -> Iterator[Engine]:
    """A server with small chunks and, unlike one of our own runs', with the prefix cache on."""
    ours = engine_process.arguments
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(engine_process, "arguments", lambda settings, port: [
            word for word in ours(settings, port) if word != "--disable-radix-cache"])
        config = EngineConfig(tiny_target, root, aux_layers=AUX, device="cpu", port=0, engine_python=engine_python,
                              engine_args="--chunked-prefill-size 64")
        with capturing(config) as running:
            yield running


def tensors(store: Path) -> dict[str, torch.Tensor]:
    parts: dict[str, list[torch.Tensor]] = {}
    for shard in Manifest.load(store).shards:
        for name, info in read_header(store / shard.file).tensors.items():
            parts.setdefault(name, []).append(read_tensor(info).float())
    return {name: torch.cat(list_) for name, list_ in parts.items()}


def require_right(store: Path, right: dict[str, torch.Tensor], noise: float) -> None:
    """Every row there; each layer's states Hugging Face's own within `noise`, the layers beside it far off."""
    assert not check(store).damage
    found = tensors(store)
    assert torch.equal(found["input_ids"], right["input_ids"])
    assert torch.equal(found["loss_mask"], right["loss_mask"])
    layers = dict(zip(NEAR, right["aux_hidden_states"].split(tiny.HIDDEN, dim=1), strict=True))
    layers[tiny.LAYERS - 1] = right["last_hidden_state"]
    states = dict(zip(AUX, found["aux_hidden_states"].split(tiny.HIDDEN, dim=1), strict=True))
    for k, state in {**states, tiny.LAYERS - 1: found["last_hidden_state"]}.items():
        errors = {j: float((state - layer).norm() / layer.norm()) for j, layer in layers.items()}
        assert errors.pop(k) < noise
        assert min(errors.values()) > 0.1


def test_states_are_hugging_faces(engine: Engine, root: Path, tiny_target: Path, data: Path,
                                  right: dict[str, torch.Tensor]) -> None:
    """With other requests between ours, of which nothing is stored."""
    stop = threading.Event()

    def disturb() -> None:
        while not stop.is_set():
            engine.server.post("/generate", {"input_ids": [5, 6, 7, 8, 9], "sampling_params": {"max_new_tokens": 4}})

    other = threading.Thread(target=disturb)
    other.start()
    try:
        for name in ("first", "again"):  # the second time the prefix cache has seen every prompt
            done = run(RunConfig(tiny_target, data, root / name, engine="sglang", servers=(engine.server.url,),
                                 aux_layers=AUX, max_length=512, shard_tokens=700, device="cpu"))
            require_right(root / name, right, 1e-5)
    finally:
        stop.set()
        other.join()
    assert "LlamaForCausalLM in SGLang 0.5" in done.check
    assert "gathered by eyas_native" in done.check


def test_answers_are_hugging_faces(engine: Engine, tiny_target: Path, tmp_path: Path) -> None:
    """Greedy answers by SGLang, token by token, with their end-of-turn token."""
    prompts = tiny.write_jsonl(tmp_path / "prompts.jsonl", tiny.conversations(20, seed=4))
    common = {"max_new_tokens": 24, "device": "cpu"}
    regenerate(RegenerateConfig(tiny_target, prompts, tmp_path / "hf.jsonl", **common))
    regenerate(RegenerateConfig(tiny_target, prompts, tmp_path / "sglang.jsonl", engine="sglang",
                                servers=(engine.server.url,), **common))
    assert (tmp_path / "sglang.jsonl").read_text() == (tmp_path / "hf.jsonl").read_text()


def test_killed_engine_is_started_again(tiny_target: Path, data: Path, tmp_path: Path, engine_python: Path,
                                        right: dict[str, torch.Tensor]) -> None:
    """Our own engine's scheduler dies by SIGKILL while shards are in flight; two ranks, before and after."""
    out = tmp_path / "store"
    killed: list[int] = []

    def kill() -> None:
        while not (out / "shard-000000.safetensors").is_file():
            time.sleep(0.01)
        ranks = [p for p in psutil.Process().children(recursive=True) if "sglang::scheduler" in title(p)]
        ranks[0].send_signal(signal.SIGKILL)
        killed.append(ranks[0].pid)

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    run(RunConfig(tiny_target, data, out, engine="sglang", aux_layers=AUX, max_length=512, shard_tokens=200, tp=2,
                  device="cpu", engine_python=engine_python, engine_args="--chunked-prefill-size 64"))
    assert killed
    require_right(out, right, 1e-5)
    assert not [p for p in psutil.process_iter() if str(tmp_path) in capture_settings(p)]
