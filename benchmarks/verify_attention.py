"""Times the CUDA kernels against the card's ceilings, SGLang's Triton kernel, FlashInfer and torch, in one run.

    python benchmarks/verify_attention.py --out benchmarks/results/verify_attention.json

Needs a CUDA device, nvcc (for ceilings.cu), triton and, for the baselines, sglang and flashinfer; what cannot be
imported is named in the result. Every number is the median of `triton.testing.do_bench`, which empties the L2 cache
before each call. Trees are random, KV slots scattered. `fraction_of_read`: bytes of keys and values over time and over
the read ceiling.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import math
import platform
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from triton.testing import do_bench

from eyas_native import cuda

DEVICE = "cuda"
GQA = [(1, 8192, 16), (1, 32768, 16), (1, 32768, 64), (1, 131072, 16), (8, 8192, 16), (1, 131072, 4), (1, 32768, 4)]
MLA = [(1, 8192, 8), (1, 32768, 16), (8, 8192, 8)]
PAGE = 16  # FlashInfer's


def median_us(call: Callable[[], object]) -> float:
    return float(do_bench(call, warmup=20, rep=100, return_mode="median")) * 1e3


def build_ceilings(build: Path) -> ctypes.CDLL:
    library = build / "ceilings.so"
    source = Path(__file__).with_name("ceilings.cu")
    major, minor = torch.cuda.get_device_capability()
    options = ["-O3", f"-arch=sm_{major}{minor}", "-shared", "-Xcompiler", "-fPIC"]
    subprocess.run(["nvcc", *options, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


def ceilings(lib: ctypes.CDLL) -> dict[str, float]:
    """Best of several grids of ceilings.cu and torch's own kernels."""
    size = 2**31
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    x = torch.empty(size // 4, device=DEVICE).normal_()
    y, sink = torch.empty_like(x), torch.zeros(4, dtype=torch.int32, device=DEVICE)
    operands = torch.randn(256 * 32, device=DEVICE).to(torch.bfloat16)
    sms = torch.cuda.get_device_properties(0).multi_processor_count
    sums, rounds = torch.empty(sms * 8 * 256, device=DEVICE), 4000
    p, n = (lambda t: ctypes.c_void_p(t.data_ptr())), ctypes.c_int64(size)
    read = [median_us(lambda b=b: lib.read_all(p(x), n, p(sink), b * sms, stream)) for b in (2, 4, 8)]
    copy = [median_us(lambda b=b: lib.copy_all(p(x), p(y), n, b * sms, stream)) for b in (2, 4, 8)]
    mma = [(b, median_us(lambda b=b: lib.mma_all(p(operands), p(sums), rounds, b * sms, stream))) for b in (1, 2, 4)]
    read.append(median_us(lambda: x.sum()))
    copy.append(median_us(lambda: y.copy_(x)))
    return {
        "read_gbps": size / min(read) * 1e-3,
        "copy_gbps": 2 * size / min(copy) * 1e-3,
        "mma_tflops": max(b * sms * 8 * rounds * 16 * 4096 / us for b, us in mma) * 1e-6,
        "launch_us": median_us(lambda: sink.zero_()),
    }


def floors(lib: ctypes.CDLL, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What reading (or copying) a case's bytes and nothing else takes, launch included."""
    stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
    x, sink = torch.empty(2**28, device=DEVICE).normal_(), torch.zeros(4, dtype=torch.int32, device=DEVICE)
    y, p = torch.empty_like(x), (lambda t: ctypes.c_void_p(t.data_ptr()))
    sms = torch.cuda.get_device_properties(0).multi_processor_count

    def read(size: int, blocks: int) -> float:
        return median_us(lambda: lib.read_all(p(x), ctypes.c_int64(size), p(sink), blocks * sms, stream))

    def copy(size: int, blocks: int) -> float:
        return median_us(lambda: lib.copy_all(p(x), p(y), ctypes.c_int64(size), blocks * sms, stream))

    found: list[dict[str, Any]] = []
    for row in (row for row in rows if row["impl"] == "eyas"):
        if "kv_bytes" in row:
            size = row["kv_bytes"]
            floor = {"impl": "read_kernel", "us": min(read(size, b) for b in (1, 2, 4)), "kv_bytes": size}
        else:
            size = row["copy_bytes"]
            floor = {"impl": "copy_kernel", "us": min(copy(size // 2, b) for b in (1, 2, 4)), "copy_bytes": size}
        found.append({"case": row["case"], **floor})
    return found


def random_tree(nodes: int) -> torch.Tensor:
    """bool [T, T]: every node hangs from one of the 6 before it."""
    sees = torch.eye(nodes, dtype=torch.bool)
    for i in range(1, nodes):
        sees[i] |= sees[int(torch.randint(max(0, i - 6), i, (1,)))]
    return sees


def mask_words(sees: torch.Tensor) -> torch.Tensor:
    nodes, words = sees.shape[0], (sees.shape[0] + 31) // 32
    bits = torch.zeros(nodes, words * 32, dtype=torch.int64)
    bits[:, :nodes] = sees
    values = (bits.view(nodes, words, 32) << torch.arange(32)).sum(-1)
    return torch.where(values >= 2**31, values - 2**32, values).to(torch.int32)


class Case:
    """One shape: inputs shared by all implementations, and the rows measured for it."""

    def __init__(self, name: str, heads: tuple[int, int], widths: tuple[int, int], size: tuple[int, int, int]) -> None:
        (self.hq, self.hk), (self.dk, self.dv), (self.b, self.length, self.t) = heads, widths, size
        self.name = f"{name}-B{self.b}-L{self.length}-T{self.t}"
        self.mla, n, bf16 = self.dk != self.dv, self.length + self.t, torch.bfloat16
        self.k = torch.randn(self.b * n, self.hk, self.dk, device=DEVICE, dtype=bf16)
        self.v = self.k[..., : self.dv] if self.mla else torch.randn_like(self.k)
        self.q = torch.randn(self.b * self.t, self.hq, self.dk, device=DEVICE, dtype=bf16)
        self.slots = torch.randperm(self.b * n, device=DEVICE).view(self.b, n)
        self.sees = random_tree(self.t)
        self.scale = 1 / math.sqrt(self.dk)
        self.kv_bytes = self.b * n * self.hk * (self.dk + (0 if self.mla else self.dv)) * 2
        self.flop = self.b * self.hq * self.t * n * 2 * (self.dk + self.dv)
        self.rows: list[dict[str, Any]] = []
        self.reference = self._reference() if self.length <= 32768 else None

    def full_mask(self) -> torch.Tensor:
        return torch.cat([torch.ones(self.t, self.length, dtype=torch.bool), self.sees], 1).to(DEVICE)

    def _reference(self) -> torch.Tensor:
        """float32 result of the first request."""
        out, group, mask = torch.empty(self.t, self.hq, self.dv, device=DEVICE), self.hq // self.hk, self.full_mask()
        for h in range(self.hk):
            k, v = self.k[self.slots[0], h].float(), self.v[self.slots[0], h].float()
            q = self.q[: self.t, h * group : (h + 1) * group].float()
            s = torch.einsum("tgd,ld->tgl", q, k) * self.scale
            s.masked_fill_(~mask[:, None], -1e30)
            out[:, h * group : (h + 1) * group] = torch.einsum("tgl,ld->tgd", s.softmax(-1), v)
        return out

    def measure(self, impl: str, call: Callable[[], object], out: torch.Tensor | None, kv_bytes: int = 0) -> None:
        call()
        torch.cuda.synchronize()
        row: dict[str, Any] = {"case": self.name, "impl": impl, "us": median_us(call)}
        row["kv_bytes"] = kv_bytes or self.kv_bytes
        if out is not None and self.reference is not None:
            row["error"] = float((out[: self.t].float() - self.reference).norm() / self.reference.norm())
        row["tflops"] = self.flop / row["us"] * 1e-6
        self.rows.append(row)
        print(f"{self.name:28s} {impl:18s} {row['us']:9.1f} us  error {row.get('error', -1):.1e}", flush=True)

    def eyas(self, impl: str = "eyas", e4m3: bool = False, config: cuda.TileConfig | None = None) -> None:
        k, v = (self.k, self.v) if not e4m3 else (self.k.to(torch.float8_e4m3fn), self.v.to(torch.float8_e4m3fn))
        out = torch.empty(self.b * self.t, self.hq, self.dv, device=DEVICE, dtype=torch.bfloat16)
        n = self.length + self.t
        plan = cuda.attention_plan("mla" if self.mla else "gqa", batch=self.b, max_tree=self.t, num_q_heads=self.hq,
                                   num_kv_heads=self.hk, max_seq_len=n, head_dim=self.dk, config=config,
                                   kv_dtype="float8_e4m3fn" if e4m3 else None)  # fmt: skip
        options: dict[str, Any] = {
            "max_tree": self.t, "max_seq_len": n, "scale": self.scale, "config": config,
            "mask": mask_words(self.sees).to(DEVICE).repeat(self.b, 1, 1),
            "workspace": torch.empty(max(16, plan["workspace_bytes"]), dtype=torch.uint8, device=DEVICE),
        }  # fmt: skip
        index, lens = self.slots.to(torch.int32), torch.full((self.b,), n, device=DEVICE)
        call = (
            cuda.prepare_mla(self.q, k, out, index, lens, **options)
            if self.mla
            else cuda.prepare_gqa(self.q, k, v, out, index, lens, **options)
        )
        stream = torch.cuda.current_stream().cuda_stream
        self.measure(impl, lambda: call(stream), None if e4m3 else out, self.kv_bytes // 2 if e4m3 else 0)
        self.rows[-1]["plan"] = plan

    def sglang(self, extend: Callable[..., object]) -> None:
        b, length, t = self.b, self.length, self.t
        prefix, tree = self.slots[:, :length].reshape(-1).contiguous(), self.slots[:, length:].reshape(-1)
        k, v = self.k[tree].contiguous(), self.v[tree].contiguous()
        out = torch.empty(b * t, self.hq, self.dv, device=DEVICE, dtype=torch.bfloat16)
        q_start = torch.arange(0, b * t + 1, t, device=DEVICE, dtype=torch.int32)
        kv_start = torch.arange(0, b * length + 1, length, device=DEVICE, dtype=torch.int32)
        mask = self.full_mask().flatten().repeat(b)
        mask_start = torch.arange(0, mask.numel() + 1, t * (length + t), device=DEVICE)
        self.measure("sglang_triton", lambda: extend(
            self.q, k, v, out, self.k, self.v, q_start, kv_start, prefix, mask, True, mask_start, t, 1.0, 1.0,
            sm_scale=self.scale,
        ), out)  # fmt: skip

    def flashinfer(self, flashinfer: Any) -> None:
        b, t, n = self.b, self.t, self.length + self.t
        pages = -(-n // PAGE)
        wrapper = flashinfer.BatchPrefillWithPagedKVCacheWrapper(
            torch.empty(256 << 20, dtype=torch.uint8, device=DEVICE), "NHD", backend="fa2"
        )
        cache = torch.randn(b * pages, 2, PAGE, self.hk, self.dk, device=DEVICE, dtype=torch.bfloat16)
        index = torch.randperm(b * pages, device=DEVICE, dtype=torch.int32).view(b, pages)
        if self.reference is not None:
            for i, x in enumerate((self.k, self.v)):
                first = torch.zeros(pages * PAGE, self.hk, self.dk, device=DEVICE, dtype=torch.bfloat16)
                first[:n] = x[self.slots[0]]
                cache[index[0].long(), i] = first.view(pages, PAGE, self.hk, self.dk)
        starts = torch.arange(0, b * t + 1, t, device=DEVICE, dtype=torch.int32)
        page_starts = torch.arange(0, b * pages + 1, pages, device=DEVICE, dtype=torch.int32)
        last = torch.full((b,), (n - 1) % PAGE + 1, device=DEVICE, dtype=torch.int32)
        wrapper.plan(starts, page_starts, index.flatten(), last, self.hq, self.hk, self.dk, PAGE,
                     custom_mask=self.full_mask().flatten().repeat(b), q_data_type=torch.bfloat16,
                     kv_data_type=torch.bfloat16, sm_scale=self.scale)  # fmt: skip
        self.measure("flashinfer", lambda: wrapper.run(self.q, cache), wrapper.run(self.q, cache))

    def sdpa(self) -> None:
        group = self.hq // self.hk
        q = self.q.transpose(0, 1)[None]
        k, v = (x[self.slots[0]].transpose(0, 1)[None].repeat_interleave(group, 1) for x in (self.k, self.v))
        mask = self.full_mask()[None, None]
        run = torch.nn.functional.scaled_dot_product_attention
        out = run(q, k, v, attn_mask=mask, scale=self.scale)[0].transpose(0, 1)
        self.measure("sdpa", lambda: run(q, k, v, attn_mask=mask, scale=self.scale), out)


def baselines() -> tuple[Any, Any, dict[str, str]]:
    """SGLang's kernel, FlashInfer, and versions (or why one is missing)."""
    extend = flashinfer = None
    versions = {}
    try:
        from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd as extend
        from sglang.version import __version__ as sglang_version

        versions["sglang"] = sglang_version
    except ImportError as error:
        versions["sglang"] = f"missing: {error}"
    try:
        import flashinfer

        versions["flashinfer"] = flashinfer.__version__
    except ImportError as error:
        versions["flashinfer"] = f"missing: {error}"
    return extend, flashinfer, versions


def attention_rows() -> tuple[list[dict[str, Any]], dict[str, str]]:
    extend, flashinfer, versions = baselines()
    small = cuda.TileConfig(smem_bytes=101376)
    rows = []
    for size in GQA:
        case = Case("gqa64/8-d128", (64, 8), (128, 128), size)
        case.eyas()
        case.eyas("eyas_overlap", config=cuda.TileConfig(overlap=True))
        case.eyas("eyas_fp8_kv", e4m3=True)
        if size[2] > 4:
            case.eyas("eyas_sm120_tiles", config=small)
            if extend:
                case.sglang(extend)
            if flashinfer:
                case.flashinfer(flashinfer)
            if size[0] == 1:
                case.sdpa()
        rows += case.rows
    for heads in (64, 8):
        for size in MLA:
            case = Case(f"mla{heads}", (heads, 1), (576, 512), size)
            case.eyas()
            case.eyas("eyas_overlap", config=cuda.TileConfig(overlap=True))
            case.eyas("eyas_fp8_kv", e4m3=True)
            case.eyas("eyas_sm120_tiles", config=small)
            if extend:
                case.sglang(extend)
            rows += case.rows
    return rows, versions


def gather_rows() -> list[dict[str, Any]]:
    rows = []
    for n in (64, 512, 4096):
        sources = [torch.randn(2 * n, 7168, device=DEVICE, dtype=torch.bfloat16) for _ in range(3)]
        index = torch.randperm(2 * n, device=DEVICE)[:n]
        out = torch.empty(n, 3 * 7168, device=DEVICE, dtype=torch.bfloat16)
        weight = torch.ones_like(out[0])

        def eyas(norm: str, s: Any = sources, i: Any = index, o: Any = out, w: Any = weight) -> None:
            cuda.hidden_gather(s, i, o, norm=norm, weight=w)

        calls = {
            "eyas": lambda f=eyas: f("none"),
            "eyas_norm_per_source": lambda f=eyas: f("per_source"),
            "eyas_norm_whole": lambda f=eyas: f("whole"),
            "torch_cat": lambda s=sources, i=index: torch.cat([h[i] for h in s], -1),
        }
        for impl, call in calls.items():
            graph = torch.cuda.CUDAGraph()
            call()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):  # the launches alone, without Python
                call()
            us = median_us(graph.replay)
            rows.append({"case": f"gather3x7168-N{n}", "impl": impl, "us": us, "copy_bytes": n * 3 * 7168 * 4})
            print(f"{rows[-1]['case']:28s} {impl:22s} {us:9.1f} us", flush=True)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    torch.manual_seed(0)
    with tempfile.TemporaryDirectory() as build:
        library = build_ceilings(Path(build))
    top = ceilings(library)
    print(top, flush=True)
    attention, versions = attention_rows()
    rows = attention + gather_rows()
    rows += floors(library, rows)
    for row in rows:
        if "kv_bytes" in row:
            row["fraction_of_read"] = row["kv_bytes"] / row["us"] * 1e-3 / top["read_gbps"]
            if "tflops" in row:
                row["fraction_of_mma"] = row["tflops"] / top["mma_tflops"]
        else:
            row["fraction_of_copy"] = row["copy_bytes"] / row["us"] * 1e-3 / top["copy_gbps"]
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True)
    versions |= {"torch": torch.__version__, "cuda": str(torch.version.cuda), "triton": triton.__version__,
                 "driver": driver.stdout.strip(), "python": platform.python_version()}  # fmt: skip
    machine = torch.cuda.get_device_name()
    out.parent.mkdir(parents=True, exist_ok=True)
    result = {"machine": machine, "versions": versions, "ceilings": top, "rows": rows}
    out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
