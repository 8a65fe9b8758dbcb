"""Settings of the commands."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, TypeVar


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """A guarded SGLang server. Everything about the draft's format comes from its own folder, not from flags."""

    target: Path
    """Folder of the target model (Hugging Face format)."""
    draft: Path | None = None
    """Folder of the EAGLE-3 draft; without one the target is served alone."""
    device: Literal["cuda", "cpu"] = "cuda"
    """Where to run. On the CPU eyas-native fills the kernels."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Arithmetic of the engine. On a CPU only float32 gives the same tokens with and without a draft."""
    steps: int = 3
    """Draft steps a round."""
    topk: int = 1
    """Branches a step; 1 is a chain."""
    num_draft_tokens: int = 4
    """Tokens verified a round, the root included; a chain has steps + 1."""
    tp: int = 1
    """Tensor-parallel ranks."""
    dp: int = 1
    """Data-parallel replicas."""
    ep: int = 1
    """Expert-parallel ranks (of a mixture of experts)."""
    nnodes: int = 1
    """Machines; on each one run the same command with its own --node-rank."""
    node_rank: int = 0
    """This machine's number; requests are answered by number 0."""
    dist_init_addr: str = ""
    """HOST:PORT of machine 0, where the ranks meet."""
    host: str = "127.0.0.1"
    """Address to listen on."""
    port: int = 30000
    """Port to listen on; 0 takes a free one."""
    engine_python: Path | None = None
    """Interpreter that has sglang; else $EYAS_ENGINE_PYTHON, else this one."""
    max_total_tokens: int | None = None
    """Size of the KV cache in tokens; the engine's choice on a GPU, 16384 on a CPU."""
    radix_cache: bool = True
    """Reuse of common prompt prefixes."""
    mem_fraction: float | None = None
    """Share of GPU memory for weights and KV cache; the engine's choice by default."""
    max_running_requests: int | None = None
    """Requests that the engine runs at a time while others wait; its own choice by default, which is 48 with a draft.
    bench and tune ask for as many as they keep in flight."""
    cuda_graph: bool = True
    """Record CUDA graphs."""
    cuda_graph_max_bs: int | None = None
    """Largest batch with a recorded graph."""
    environment: dict[str, str] = field(default_factory=dict)
    """Variables for the engine, e.g. NCCL_DEBUG INFO PYTORCH_CUDA_ALLOC_CONF expandable_segments:True; recorded."""
    api_key_file: Path | None = None
    """File with the API key that requests must bring; never on a command line or in a log."""
    api_key_env: str = ""
    """Name of an environment variable with that key."""
    trust_remote_code: bool = False
    """Run Python code that the model's folder brings."""
    metrics: bool = True
    """Prometheus metrics under /metrics, for eyas-serve watch."""
    extra: str = ""
    """Further arguments of sglang.launch_server, as one shell-quoted text: --extra="--flag value", with the sign."""
    preflight: bool = True
    """Check draft against target before anything starts. The guard inside the engine stays on either way."""
    guard: Literal["enforce", "report", "off"] = "enforce"
    """The guard inside the engine: ends a server that cannot work, only reports it, or checks nothing."""
    stall_seconds: float = 300.0
    """So many seconds without any progress are a stall; the whole start may take as long as it needs."""
    on_stall: Literal["stop", "report"] = "stop"
    """After a stall's report, with every rank's state and stacks, stop the engine or go on waiting."""
    acceptance_floor: float = 1.05
    """READY only if the acceptance length of the first generation, or of the first seven together, reaches this; a
    guard that does not enforce only reports it."""
    log_rotate_mb: int = 256
    """The engine's log is put aside under a number at this size; nothing is deleted."""
    run_dir: Path | None = None
    """Folder for the server's log, ranks' status and resolved config; else a fresh temporary one."""


DRAFTED_AT_A_TIME = 48  # requests that SGLang runs with a draft unless told (`speculative_hook.py`, 0.5.16, 0.5.20)
AnyConfig = TypeVar("AnyConfig", bound=ServeConfig)


def with_room(config: AnyConfig, in_flight: Iterable[int]) -> AnyConfig:
    """The same settings with room for this many requests in flight, so that none waits where speeds are compared."""
    most = max(in_flight)
    return config if config.max_running_requests or most <= DRAFTED_AT_A_TIME else replace(
        config, max_running_requests=most)


@dataclass(frozen=True, kw_only=True)
class BenchConfig(ServeConfig):
    """Acceptance length and speed on prompts, with the draft and without it under the same settings."""

    prompts: Path
    """JSONL, a conversation a line, as `messages` or `conversations` (ShareGPT)."""
    turns: Literal["last", "live"] = "last"
    """Of a conversation ask its last user turn, the file's answers before it; or live every user turn one after the
    other, the server's own answers before it."""
    out: Path = Path("bench.json")
    """The report."""
    max_new_tokens: int = 128
    """Tokens to generate for each prompt."""
    limit: int | None = None
    """Use only the first so many prompts."""
    concurrency: int = 1
    """Requests in flight at a time."""
    sweep: tuple[int, ...] = ()
    """Further numbers of requests at a time, e.g. 4 16 64."""
    data_sets: tuple[Path, ...] = ()
    """Further files like --prompts; each is reported on its own, too."""
    stream: bool = True
    """Stream answers, which times the first token; without it a client in Python costs less."""
    against: Path | None = None
    """An earlier report to compare with."""
    warmup: int = 2
    """Prompts sent first and not measured; at least as many as are in flight at a time, for an engine compiles kernels
    when it first meets a batch's size."""
    baseline: bool = True
    """Measure without the draft too, and compare the outputs token for token."""
    url: str | None = None
    """Measure this running server instead of starting any; no baseline then, unless --baseline-url names one. A
    key is read from EYAS_API_KEY, or as for a launch."""
    baseline_url: str | None = None
    """A running server without the draft, to compare --url with."""
    baseline_report: Path | None = None
    """An earlier report whose baseline is used again, where its settings and prompts are the same."""
    port: int = 0
    radix_cache: bool = False
    metrics: bool = False


@dataclass(frozen=True, kw_only=True)
class LaunchConfig(ServeConfig):
    """Serve until interrupted, watched from the first byte of weights to the last request."""

    json_events: bool = False
    """Print a line of JSON for each event instead of text."""
    no_live: bool = False
    """Print lines even on a terminal, no live table."""


@dataclass(frozen=True, kw_only=True)
class TuneConfig(ServeConfig):
    """Find the draft tree that pays at each concurrency, `none` among them; writes a report and a serve.toml."""

    prompts: Path
    """JSONL, a conversation a line, as `messages` or `conversations` (ShareGPT), asked up to its last user turn."""
    out: Path = Path("tune.json")
    """The report."""
    serve_toml: Path = Path("serve.toml")
    """Settings of the best arm at the smallest concurrency, for `eyas-serve launch --config`; with radix cache and
    metrics, which are off while measuring."""
    shapes: tuple[str, ...] = ("1/1/2", "2/1/3", "3/1/4", "5/1/6", "3/2/6", "3/4/8", "3/4/16")
    """Trees to try, as steps/topk/tokens. The target alone is always tried, first."""
    backends: tuple[str, ...] = ()
    """Attention backends to try with each of them, e.g. triton flashinfer; the engine's own choice by default."""
    concurrencies: tuple[int, ...] = (1, 4, 16, 64)
    """Requests in flight at a time."""
    max_new_tokens: int = 128
    """Tokens to generate for each prompt."""
    limit: int | None = 128
    """Use only the first so many prompts."""
    first: int = 8
    """Prompts of an arm's first look, at least twice as many as are in flight, and more where they last less than 0.4
    of `seconds`; the rest only if it is not far behind."""
    seconds: float = 5.0
    """Each arm that is not stopped is measured for about so long, prompts being asked again where they are over."""
    drop_below: float = 0.85
    """An arm whose first look, taken twice, is slower than this share of the best arm's is stopped."""
    port: int = 0
    radix_cache: bool = False
    metrics: bool = False
