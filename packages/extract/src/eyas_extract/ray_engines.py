"""Engines that Ray places, on as many machines as it has, and starts again when a worker or a machine dies.

Needs `eyas-extract[ray]` here and on Ray's machines, and a store on a file system that they share.
"""

from __future__ import annotations

import dataclasses
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from eyas_contract import EngineFailure, InvalidInput
from eyas_extract.engine_process import Engine, EngineSettings
from eyas_extract.protocol import CaptureSettings
from eyas_extract.server import Server

RESTARTS = 3  # of one worker, by Ray


class EngineWorker:
    """A Ray actor: an engine as a child of Ray's worker process. Dies with it, by the keeper beside it."""

    def __init__(self, settings: EngineSettings, capture: CaptureSettings, run_dir: Path) -> None:
        import ray

        self.settings = dataclasses.replace(settings, host=ray.util.get_node_ip_address())
        self.capture, self.run_dir = capture, run_dir
        self.engine = Engine(self.settings, capture, run_dir)

    def url(self) -> str:
        """Where the engine answers; one that died is started again."""
        if not (self.engine.alive() and self.engine.server.healthy()):
            self.engine.stop()
            self.engine = Engine(self.settings, self.capture, self.run_dir)
        return self.engine.server.url

    def stop(self) -> None:
        """End the engine."""
        self.engine.stop()


class RaySource:
    """One of Ray's engines, as the workers want it. `start` before use."""

    def __init__(self, actor: Any) -> None:
        self.actor = actor

    def start(self) -> None:
        """Wait until it answers. Raises EngineFailure where Ray cannot bring it up."""
        import ray

        try:
            self.server = Server(ray.get(self.actor.url.remote()))
        except ray.exceptions.RayError as error:
            lines = str(error).strip().splitlines()
            raise EngineFailure("Ray", lines[-1] if lines else type(error).__name__, "a worker with an engine",
                                "See Ray's log, and server.log in the store's .engine folders.") from error

    def revive(self) -> None:
        """Ray starts the worker again where that died, else the worker its engine."""
        self.start()


def open_engines(address: str, count: int, settings: EngineSettings, capture: CaptureSettings, run_dir: Path,
                 stack: ExitStack) -> list[RaySource]:
    """Start engines through Ray, all at once.

    Args:
        address: `local` for this machine alone, else a cluster's as `ray.init` takes it, such as `auto`.
        stack: ends them.

    Raises:
        InvalidInput: Ray is not installed.
        EngineFailure: it cannot bring them up.
    """
    try:
        import ray
    except ImportError as error:
        raise InvalidInput("--ray", "ray is not installed", "it beside eyas-extract",
                           "Install eyas-extract[ray], here and on Ray's machines.") from error
    ray.init(None if address == "local" else address, include_dashboard=False, log_to_driver=False,
             **({"_node_ip_address": "127.0.0.1"} if address == "local" else {}))
    stack.callback(ray.shutdown)
    worker = ray.remote(num_cpus=1, num_gpus=settings.tp if settings.device == "cuda" else 0, max_restarts=RESTARTS,
                        max_task_retries=RESTARTS)(EngineWorker)
    sources = []
    for number in range(count):
        folder = run_dir / str(number)
        own = dataclasses.replace(capture, status=str((folder / "ranks").resolve()))
        actor = worker.remote(settings, own, folder)
        stack.callback(_end, actor)
        sources.append(RaySource(actor))
    for source in sources:
        source.start()
    return sources


def _end(actor: Any) -> None:
    import ray

    try:
        ray.get(actor.stop.remote(), timeout=30)
    except ray.exceptions.RayError:  # it is gone, and its engine with it
        return
    ray.kill(actor)
