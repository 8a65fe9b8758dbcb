"""ServeConfig -> the engine's command line and environment. Pure."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from pathlib import Path

from eyas_contract import InvalidInput
from eyas_contract.engines.sglang import server_flags
from eyas_serve.config import ServeConfig
from eyas_serve.handshake import STATUS_DIR
from eyas_serve.plugin import SWITCH

MODULE = "eyas_serve.engine.main"
CPU_TOKENS = 16384


def engine_arguments(config: ServeConfig, port: int) -> list[str]:
    """Arguments of `sglang.launch_server`; the user's own come last and so win.

    Raises:
        InvalidInput: a tree that SGLang cannot build, or `extra` with unbalanced quotes.
    """
    words = ["--model-path", str(config.target), "--host", config.host, "--port", str(port), "--device", config.device,
             "--dtype", config.dtype, "--tp-size", str(config.tp), "--skip-server-warmup",
             *_scale(config)]
    if config.device == "cpu":
        # Named apart: as `--attention-backend` SGLang would replace intel_amx where the processor has no AMX.
        words += ["--prefill-attention-backend", "intel_amx", "--decode-attention-backend", "intel_amx",
                  *([] if config.mem_fraction else ["--mem-fraction-static", "0.3"])]
    tokens = config.max_total_tokens or (CPU_TOKENS if config.device == "cpu" else None)
    if tokens is not None:
        words += ["--max-total-tokens", str(tokens)]
    if not config.radix_cache:
        words.append("--disable-radix-cache")
    if config.draft is not None:
        words += server_flags(str(config.draft), config.steps, config.topk, config.num_draft_tokens)
    return words + extra_arguments(config)


def _scale(config: ServeConfig) -> list[str]:
    """Replicas, machines, memory and graphs, where they are not the engine's own choice."""
    words = []
    for flag, value, usual in (
            ("--dp-size", config.dp, 1), ("--ep-size", config.ep, 1), ("--nnodes", config.nnodes, 1),
            ("--node-rank", config.node_rank, 0), ("--dist-init-addr", config.dist_init_addr, ""),
            ("--mem-fraction-static", config.mem_fraction, None),
            ("--max-running-requests", config.max_running_requests, None),
            ("--cuda-graph-max-bs-decode", config.cuda_graph_max_bs, None)):
        if value != usual:
            words += [flag, str(value)]
    for flag, wanted in (("--disable-cuda-graph", not config.cuda_graph), ("--enable-metrics", config.metrics),
                         ("--trust-remote-code", config.trust_remote_code)):
        words += [flag] if wanted else []
    return words


def extra_arguments(config: ServeConfig) -> list[str]:
    """`extra`, split as a shell would."""
    try:
        return shlex.split(config.extra)
    except ValueError as error:
        raise InvalidInput("--extra", f"{config.extra!r} ({error})", "shell-quoted arguments of sglang.launch_server",
                           "Balance the quotes.") from error


def engine_environment(config: ServeConfig, status_dir: Path, cores: list[int],
                       inherited: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The child's environment: ours, the handshake folder and, on a CPU, a fair share of the cores for each rank.

    Raises:
        InvalidInput: SGLANG_SIMULATE_ACC_LEN is set, which makes SGLang invent acceptance lengths.
    """
    invented = {**inherited, **config.environment}.get("SGLANG_SIMULATE_ACC_LEN")
    if invented:
        raise InvalidInput("environment", f"SGLANG_SIMULATE_ACC_LEN={invented}",
                           "it unset: with it SGLang reports invented acceptance lengths", "Unset it.")
    environment = {**inherited, **config.environment, STATUS_DIR: str(status_dir), SWITCH: config.guard,
                   "PYTHONUNBUFFERED": "1"}
    if config.device == "cpu":
        share = max(len(cores) // config.tp, 1)
        ranks = [cores[i * share % len(cores):i * share % len(cores) + share] for i in range(config.tp)]
        environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(",".join(map(str, rank)) for rank in ranks)
        environment.setdefault("OMP_NUM_THREADS", str(share))
    return environment
