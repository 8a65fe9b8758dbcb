"""One rank of the engine: decides whether it captures, finds the marked rows of each batch, hands them on."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path
from typing import Any

from eyas_contract import EngineFailure
from eyas_contract.canonical import dumps
from eyas_contract.contract import write_text_atomic
from eyas_contract.fingerprint import weights_fingerprint
from eyas_extract.inside.ring import Ring
from eyas_extract.inside.sink import Piece
from eyas_extract.inside.tap import Tap
from eyas_extract.protocol import READY, Captor, CaptureSettings, Mark

STORE_NAMES = {"torch.bfloat16": "BF16", "torch.float16": "F16", "torch.float32": "F32"}


class CaptureRank:
    """The capture in this process.

    Args:
        runner: SGLang's ModelRunner, its model loaded.
        settings: what to capture.

    Attributes:
        batch: SGLang's ForwardBatch while one runs, else None.

    Raises:
        EngineFailure: a target or a way of serving that cannot be captured.
    """

    def __init__(self, runner: Any, settings: CaptureSettings) -> None:
        from sglang.srt.runtime_context import get_parallel

        self.settings = settings
        self.batch: Any = None
        engine, config = importlib.metadata.version("sglang"), runner.model_config.hf_text_config
        _require_servable(runner.server_args)
        self.tap = Tap(runner.model, settings.aux_layer_ids, config.num_hidden_layers, config.hidden_size, engine)
        self.ring: Ring | None = None
        if get_parallel().attn_tp_rank != 0:
            return  # the states are the same on every rank
        model_dtype = STORE_NAMES[str(runner.dtype)]
        self.captor = Captor(engine, type(runner.model).__name__, settings.aux_layer_ids, config.hidden_size,
                             model_dtype, settings.store_dtype or model_dtype, settings.root,
                             f"pid{os.getpid()}", "", _fingerprint(runner.model_config.model_path))
        self.ring = Ring(settings, self.captor, runner.device, lambda: self.tap.proof)
        self.captor = self.ring.captor
        write_text_atomic(Path(settings.status) / f"{READY}{self.captor.rank}.json", dumps(self.captor) + "\n")

    def take(self, states: Any) -> None:
        """Send the marked rows of the running batch on their way.

        Args:
            states: list of K + 1 tensors [N, H], aux layers and the last; None for a batch without any.
        """
        batch = self.batch
        if self.ring is None or states is None or batch is None or not batch.forward_mode.is_extend():
            return
        pieces, offset = [], 0
        for request_id, prefix, length in zip(batch.rids, batch.extend_prefix_lens_cpu, batch.extend_seq_lens_cpu,
                                              strict=False):
            mark = Mark.parse(request_id)
            if mark is not None and (rows := min(int(length), mark.rows - int(prefix))) > 0:
                pieces.append(Piece(mark, int(prefix), offset, rows))
            offset += int(length)
        if pieces:
            self.ring.take(states, pieces)


def _fingerprint(model_path: str) -> str:
    return weights_fingerprint(Path(model_path)) if Path(model_path).is_dir() else ""


def _require_servable(server_args: Any) -> None:
    """Raise EngineFailure for settings under which states are lost or cannot be taken (all named)."""
    faults = []
    if int(server_args.pp_size or 1) > 1:
        faults.append("--pp-size above 1: earlier stages' layers are never handed out")
    if server_args.speculative_algorithm:
        faults.append("--speculative-algorithm: a draft reads the states that extraction takes")
    graphs = getattr(getattr(server_args, "cuda_graph_config", None), "prefill", None)
    if str(getattr(graphs, "backend", "")).endswith("tc_piecewise"):
        faults.append("a compiled prefill graph, in which no hook runs: start it with "
                      "--cuda-graph-backend-prefill disabled")
    if faults:
        raise EngineFailure("SGLang's arguments", "; ".join(faults), "an engine that can be captured, by extraction",
                            "Start it without them.")
