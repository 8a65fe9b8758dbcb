"""`--log-to`: what metrics.jsonl records, also sent to TensorBoard, Weights & Biases or trackio (extras of eyas-draft).

A continued run goes on in the same TensorBoard folder and trackio run; Weights & Biases shows it as a further run of
the same group. Settings of these tools, such as WANDB_MODE=offline or TRACKIO_DIR, are theirs: environment variables.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol

from eyas_contract import InvalidInput

Name = Literal["tensorboard", "wandb", "trackio"]
PROJECT = "eyas-draft"


class Tracker(Protocol):
    """Takes numbers of a step."""

    def log(self, values: dict[str, float], step: int) -> None:
        """Numbers by name, parts of a name set apart by slashes."""

    def close(self) -> None:
        """Send what is left."""


def require_installed(names: Sequence[Name]) -> None:
    """Raise InvalidInput naming every tracker whose package is not installed."""
    missing = []
    for name in names:
        try:
            importlib.import_module(name)
        except ImportError:
            missing.append(name)
    if missing:
        raise InvalidInput("--log-to", f"{', '.join(missing)} not installed", "the packages that it names",
                           f"Install eyas-draft[{','.join(missing)}].")


def open_trackers(names: Sequence[Name], run: Path, settings: dict[str, Any], step: int) -> list[Tracker]:
    """Start each tracker.

    Args:
        names: which.
        run: run folder; its name is the run's.
        settings: shown beside the numbers.
        step: steps already taken; what was logged after it is forgotten, where the tool can.
    """
    makers: dict[Name, Callable[[], Tracker]] = {
        "tensorboard": lambda: _TensorBoard(run, step), "wandb": lambda: _WeightsAndBiases(run, settings),
        "trackio": lambda: _Trackio(run, settings)}
    return [makers[name]() for name in dict.fromkeys(names)]


def numbers(values: dict[str, Any], prefix: str = "") -> dict[str, float]:
    """A record's numbers by name: `heldout/acceptance_length`, `step_losses/0`; what is no number is left out."""
    flat: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, list):
            value = {str(i): item for i, item in enumerate(value)}
        if isinstance(value, dict):
            flat |= numbers(value, f"{prefix}{name}/")
        elif isinstance(value, int | float):
            flat[prefix + name] = float(value)
    return flat


class _TensorBoard:
    def __init__(self, run: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter
        self._writer: Any = SummaryWriter(str(run / "tensorboard"), purge_step=step + 1 if step else None)

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _WeightsAndBiases:
    def __init__(self, run: Path, settings: dict[str, Any]) -> None:
        wandb: Any = importlib.import_module("wandb")
        self._run = wandb.init(project=os.environ.get("WANDB_PROJECT", PROJECT), name=run.name, group=run.name,
                               dir=str(run), config=settings)

    def log(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def close(self) -> None:
        self._run.finish()


class _Trackio:
    def __init__(self, run: Path, settings: dict[str, Any]) -> None:
        self._trackio: Any = importlib.import_module("trackio")
        self._trackio.init(project=PROJECT, name=run.name, config=settings, resume="allow")

    def log(self, values: dict[str, float], step: int) -> None:
        self._trackio.log(values, step=step)

    def close(self) -> None:
        self._trackio.finish()
