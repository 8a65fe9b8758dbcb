"""A draft of Kimi-K2's size trained on random states: how fast, how much memory, where the time goes."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from eyas_contract import DraftSpec, MlaSizes, Rope
from eyas_draft.config import TrainConfig
from eyas_draft.feed import Buffers
from eyas_draft.fixed import FixedStepper
from eyas_draft.flops import peak_flops, step_flops
from eyas_draft.model import DraftModel
from eyas_draft.packs import PackSizes, fill_pack
from eyas_draft.ranks import Ranks
from eyas_draft.target_weights import TargetWeights
from eyas_draft.ttt import Teacher

KIMI = DraftSpec(
    kind="llama", num_layers=1, hidden_size=7168, intermediate_size=18432, num_heads=64, num_kv_heads=8, head_dim=128,
    target_hidden_size=7168, num_aux=3, draft_vocab_size=32000, target_vocab_size=163840,
    max_position_embeddings=131072, rope=Rope("default", 50000.0), rms_norm_eps=1e-5, hidden_act="silu", fc_norm=False,
    norm_output=False, own_embedding=False, dtype="bfloat16")
KIMI_MLA = DraftSpec(**{**vars(KIMI), "kind": "mla", "num_kv_heads": 64, "head_dim": 192,
                        "mla": MlaSizes(1536, 512, 128, 64, 128)})
SMALL = DraftSpec(**{**vars(KIMI), "hidden_size": 64, "intermediate_size": 96, "num_heads": 4, "num_kv_heads": 2,
                     "head_dim": 16, "target_hidden_size": 64, "draft_vocab_size": 100, "target_vocab_size": 300})
SMALL_MLA = DraftSpec(**{**vars(SMALL), "kind": "mla", "num_kv_heads": 4, "head_dim": 24,
                         "mla": MlaSizes(32, 24, 16, 8, 16)})


class RandomFeed:
    """Stands where `eyas_draft.feed.Feed` stands: always the same documents, random states."""

    def __init__(self, spec: DraftSpec, lengths: list[int], device: torch.device, dtype: torch.dtype) -> None:
        scored = sum(n - n // 4 for n in lengths)
        self.sizes, self.device = PackSizes(sum(lengths), scored, len(lengths) + 1, max(lengths)), device
        masks = [np.arange(n) >= n // 4 for n in lengths]
        ints = np.zeros(self.sizes.total, dtype=np.int32)
        fill_pack(ints, self.sizes, [0, *np.cumsum(lengths)[:-1].tolist()], masks)
        ids = torch.randint(spec.target_vocab_size, (self.sizes.tokens,), device=device)
        aux = torch.randn(self.sizes.tokens, spec.num_aux * spec.target_hidden_size, device=device, dtype=dtype)
        last = torch.randn(self.sizes.scored, spec.target_hidden_size, device=device, dtype=dtype)
        self.buffers = Buffers(torch.from_numpy(ints).to(device), ids, aux, last)
        self.lengths, self.scored = lengths, scored

    def batches(self, plans: Iterator[Any]) -> Iterator[Any]:
        """Endless."""
        batch = SimpleNamespace(samples=len(self.lengths), tokens=sum(self.lengths))
        while True:
            yield batch

    def place(self, batch: Any) -> None:
        """Nothing to copy."""

    def parts(self) -> dict[str, torch.Tensor]:
        """As the real one."""
        names = self.sizes.parts
        return dict(zip(names, torch.split(self.buffers.ints, list(names.values())), strict=True))


def kimi(device_name: str, *, full: bool) -> Iterator[tuple[str, dict[str, Any]]]:
    """(name of a case, its numbers), one after another."""
    plain, latent = (KIMI, KIMI_MLA) if full else (SMALL, SMALL_MLA)
    cases = {"8k_of_2k": (plain, [2048] * 4, 7, True), "32k_context": (plain, [32768], 4, True),
             "8k_of_2k_mla": (latent, [2048] * 4, 7, True), "8k_of_2k_uncompiled": (plain, [2048] * 4, 7, False)}
    for name, (spec, lengths, steps, compiling) in cases.items():
        scaled = lengths if full else [n // 128 for n in lengths]
        try:
            yield name, case(spec, scaled, steps, compiling, torch.device(device_name), full)
        except (RuntimeError, AssertionError) as error:
            yield name, {"failed": f"{type(error).__name__}: {str(error)[:500]}"}
        if torch.cuda.is_available():
            torch._dynamo.reset()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()


def case(spec: DraftSpec, lengths: list[int], steps: int, compiling: bool, device: torch.device,
         full: bool) -> dict[str, Any]:
    """Build, warm up, time, profile."""
    torch.manual_seed(0)
    dtype = torch.bfloat16 if full else torch.float32
    table = (torch.randn(spec.target_vocab_size, spec.hidden_size, device=device, dtype=dtype) * 0.02)
    with torch.device(device):
        model = DraftModel(spec, table)
    head = TargetWeights(table, table, torch.ones(spec.hidden_size), spec.rms_norm_eps, {})
    ids = torch.arange(spec.draft_vocab_size) * (spec.target_vocab_size // spec.draft_vocab_size)
    teacher = Teacher(head, ids, post_norm=False, device=device, dtype=dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True, capturable=device.type == "cuda")
    config = TrainConfig(Path(), Path(), Path(), ttt_steps=steps, compile=compiling, cuda_graph=False,
                         precision="bf16" if full else "fp32")
    feed, said = RandomFeed(spec, lengths, device, dtype), list[str]()
    loader = SimpleNamespace(plans=lambda cursor: iter(()))
    stepper = FixedStepper(config, model, teacher, optimizer, loader, feed, 0,  # type: ignore[arg-type]
                           Ranks(0, 1, device, shared=False), said.append)
    begun = time.monotonic()
    for step in range(3):
        stepper.advance(step, 1e-5)
    stepper.drain()
    warmed = time.monotonic()
    count = 8 if full else 2
    for step in range(count):
        stepper.advance(step, 1e-5)
    stepper.drain()
    seconds = (time.monotonic() - warmed) / count
    flops = step_flops(spec, lengths, feed.scored, steps)
    found: dict[str, Any] = {
        "parameters": sum(p.numel() for p in model.parameters()), "documents": lengths, "ttt_steps": steps,
        "step_seconds": round(seconds, 4), "tokens_per_second": round(sum(lengths) / seconds),
        "flops_per_step": flops, "tflops_per_second": round(flops / seconds / 1e12, 1), "way": stepper.way,
        "warm_up_seconds": round(warmed - begun, 1), "said": said}
    if device.type == "cuda":
        peak = peak_flops(torch.cuda.get_device_name())
        found |= {"mfu": round(flops / seconds / peak, 4) if peak else None,
                  "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2)}
    found["profile"] = profile(stepper)
    stepper.close()
    return found


def profile(stepper: FixedStepper) -> list[dict[str, Any]]:
    """The kernels (on a CPU: operators) that take most of a step."""
    kinds = [torch.profiler.ProfilerActivity.CPU]
    on_gpu = torch.cuda.is_available()
    if on_gpu:
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=kinds) as seen:
        stepper.advance(99, 1e-5)
        stepper.drain()
    rows = [(event.self_device_time_total if on_gpu else event.self_cpu_time_total, event)
            for event in seen.key_averages() if not on_gpu or event.device_type == torch.autograd.DeviceType.CUDA]
    total = sum(time for time, _ in rows) or 1
    rows.sort(key=lambda row: -row[0])
    return [{"kernel": event.key[:90], "calls": event.count, "ms": round(spent / 1000, 2),
             "share": round(spent / total, 4)} for spent, event in rows[:16]]
