"""An SGLang server that captures, run until it is told to stop: what `run --servers` attaches to."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from eyas_contract import EngineFailure
from eyas_extract.config import EngineConfig, RunConfig
from eyas_extract.disk import make_folder
from eyas_extract.engine_process import Engine, EngineSettings
from eyas_extract.engine_run import RUN_DIR
from eyas_extract.protocol import CaptureSettings
from eyas_extract.run import stored_capture
from eyas_extract.target import pick_device, read_spec

POLL = 0.5  # seconds


@contextmanager
def capturing(config: EngineConfig) -> Iterator[Engine]:
    """A running server; ended with the block.

    Raises:
        EyasError: a target that cannot be captured, no usable interpreter, or an engine that does not start.
    """
    spec = read_spec(config.target)
    make_folder(config.root)
    flags = RunConfig(config.target, config.target, config.root, aux_layers=config.aux_layers,
                      store_dtype=config.store_dtype, dtype=config.dtype, tp=config.tp)
    capture, dtype = stored_capture(flags, spec)
    run_dir = config.root / f"{RUN_DIR}-{config.port}"
    settings = EngineSettings(config.target, pick_device(config.device).partition(":")[0], dtype, config.tp,
                              config.engine_python, config.port, config.engine_args)
    stored = next(t.dtype for t in capture.tensors if t.name == "last_hidden_state")
    engine = Engine(settings, CaptureSettings(capture.aux_layer_ids, str(config.root.resolve()),
                                              str((run_dir / "ranks").resolve()), stored), run_dir)
    try:
        yield engine
    finally:
        engine.stop()


def serve(config: EngineConfig, report: Callable[[str], None]) -> None:
    """Start a server and watch it until it ends.

    Raises:
        EngineFailure: it ended by itself. Further as `capturing` does.
    """
    with capturing(config) as engine:
        report(f"READY: {engine.server.url}, below {config.root}, log {engine.log}")
        while engine.alive():
            time.sleep(POLL)
        raise EngineFailure(engine.where, f"it ended (exit code {engine.process.returncode})", "a running engine",
                            f"See its log: {engine.log}")
