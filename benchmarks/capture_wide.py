"""Part `wide` of `capture.py`: a target of random weights, 7168 wide, where the copy is the load.

Four layers with few heads and a narrow feed-forward: 57 KB of states a token, and little arithmetic. GB/s of the whole
path, from the first request to the last shard's commit, hashed and synced, against the slower of two ceilings measured
in the same run: copies from the device into pinned memory, and writing, by the best of several numbers of threads,
before and after.
"""

from __future__ import annotations

import argparse
import math
import os
import shutil
import statistics
import threading
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from capture_path import Results, captured_rate, contract_of, cut, places, plain_rate, shards, started
from transformers import LlamaConfig

from eyas_extract.plan import bytes_per_token


def wide(options: argparse.Namespace, results: Results, work: Path, stack: ExitStack) -> None:
    """A wide target of random weights against the ceilings."""
    target = work / "target"
    heads = min(options.width // 128, 8)
    config = LlamaConfig(vocab_size=32000, hidden_size=options.width, intermediate_size=1024, num_hidden_layers=4,
                         num_attention_heads=heads, num_key_value_heads=heads, head_dim=128,
                         max_position_embeddings=8192, architectures=["LlamaForCausalLM"], dtype="bfloat16",
                         bos_token_id=1, eos_token_id=2)
    config.save_pretrained(target)
    contract = contract_of(target, (0, 1, 2), options.model_dtype)
    size = options.wide_tokens * bytes_per_token(contract.capture)
    copy = copy_ceiling() if torch.cuda.is_available() else None
    results.add(width=options.width, bytes_per_token=bytes_per_token(contract.capture), copy_gb_per_second=copy)
    engine = started(options, target, work / "engine", contract, options.wide_args, Path("/"))
    stack.callback(engine.stop)
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 32000, (options.wide_tokens,), generator=generator).tolist()
    parts = shards(cut(ids, options.wide_length), options.wide_shard_tokens)
    plain_rate(engine.server, parts, options.wide_ahead)
    results.add(requests_without_capture_tokens_per_second=plain_rate(engine.server, parts, options.wide_ahead))
    for name, folder in places(options).items():
        write = [write_ceiling(folder, size)]
        rates: list[tuple[float, float]] = []
        for _ in range(options.wide_rounds + 1):
            rates.append(captured_rate(engine.server, parts, contract, folder, options.wide_ahead))
            print(f"{name}: {rates[-1][0]:,.0f} tokens/s, {rates[-1][1]:.2f} GB/s", flush=True)
        write.append(write_ceiling(folder, size))
        best = max(value for each in write for value in each.values())
        gigabytes = [size for _, size in rates[1:]]  # the first warms up
        results.add(store=name, tokens=len(ids), tokens_per_second=[rate for rate, _ in rates[1:]],
                    gb_per_second=gigabytes, write_gb_per_second_by_threads=write,
                    share_of_slower_ceiling=statistics.median(gigabytes) / min(copy or math.inf, best))


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
    for count in (4, 8, 16):
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
