"""Trackers get what metrics.jsonl gets: stand-ins of the three packages; TensorBoard itself where installed."""

from __future__ import annotations

import importlib.util
import io
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from eyas_contract import InvalidInput
from eyas_draft.config import TrainConfig
from eyas_draft.metrics import MetricsLog
from eyas_draft.pace import Pace
from eyas_draft.trackers import numbers, open_trackers, require_installed
from eyas_draft.train import Trainer

Calls = list[tuple[Any, ...]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """Stand-ins for all three; returns what they were told."""
    said: Calls = []

    class Writer:
        def __init__(self, folder: str, purge_step: int | None) -> None:
            said.append(("tensorboard", Path(folder).name, purge_step))

        def add_scalar(self, name: str, value: float, step: int) -> None:
            said.append(("scalar", name, value, step))

        def close(self) -> None:
            said.append(("closed", "tensorboard"))

    class Run:
        def __init__(self, name: str) -> None:
            self.name = name

        def log(self, values: dict[str, float], step: int) -> None:
            said.append((self.name, values, step))

        def finish(self) -> None:
            said.append(("closed", self.name))

    def module(name: str, **members: Any) -> None:
        made = ModuleType(name)
        vars(made).update(members)
        monkeypatch.setitem(sys.modules, name, made)

    def init(name: str) -> Any:
        def start(**settings: Any) -> Run:
            said.append((name, settings["project"], settings["name"], settings["config"]["lr"]))
            return Run(name)
        return start

    module("tensorboard")
    module("torch.utils.tensorboard", SummaryWriter=Writer)
    module("wandb", init=init("wandb"))
    module("trackio", init=init("trackio"), log=Run("trackio").log, finish=Run("trackio").finish)
    return said


def test_a_run_tells_all_of_them_what_it_writes_down(store: Path, tiny_target: Path, tmp_path: Path,
                                                     calls: Calls) -> None:
    said = io.StringIO()
    Trainer(TrainConfig(store, tiny_target, tmp_path / "run", vocab_size=64, ttt_steps=2, max_steps=2, epochs=1,
                        precision="fp32", log_seconds=0.0, log_to=("tensorboard", "wandb", "trackio")), said).run()
    assert calls[:3] == [("tensorboard", "tensorboard", None), ("wandb", "eyas-draft", "run", 1e-3),
                         ("trackio", "eyas-draft", "run", 1e-3)]
    assert calls[-3:] == [("closed", name) for name in ("tensorboard", "wandb", "trackio")]
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    wanted = [(numbers({k: v for k, v in row.items() if k != "step"}), row["step"]) for row in rows]
    assert [call[1:] for call in calls[3:-3] if call[0] == "wandb"] == wanted
    assert [call[1:] for call in calls[3:-3] if call[0] == "trackio"] == wanted
    assert [call[1:] for call in calls if call[0] == "scalar"] == [
        (name, value, step) for values, step in wanted for name, value in values.items()]
    assert {"loss", "step_losses/1", "wait"} <= set(wanted[1][0])
    assert "heldout/acceptance_length" in wanted[0][0]
    assert "T operations/s  data wait " in said.getvalue()


def test_a_tracker_that_is_not_installed_is_named_before_anything_runs(monkeypatch: pytest.MonkeyPatch,
                                                                      tmp_path: Path) -> None:
    for name in ("wandb", "trackio"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InvalidInput, match=r"wandb, trackio not installed.*eyas-draft\[wandb,trackio\]"):
        require_installed(("wandb", "trackio"))
    with pytest.raises(InvalidInput, match="wandb"):
        Trainer(TrainConfig(tmp_path, tmp_path, tmp_path / "run", log_to=("wandb",)))
    assert not (tmp_path / "run").exists()


@pytest.mark.skipif(importlib.util.find_spec("tensorboard") is None, reason="tensorboard is not installed")
@pytest.mark.filterwarnings("ignore")  # of its own packages
def test_tensorboard_reads_it_back_after_a_resume_too(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    for resumed in (0, 2):
        log = MetricsLog(tmp_path, resumed, trackers=open_trackers(("tensorboard",), tmp_path, {}, resumed))
        for step in range(resumed + 1, resumed + 4):
            log.write(step=step, loss=step / 2 + resumed, step_losses=[1.0, 2.0])
        log.close()
    read = EventAccumulator(str(tmp_path / "tensorboard"))
    read.Reload()
    assert {"loss", "step_losses/0", "step_losses/1"} <= set(read.Tags()["scalars"])
    assert {event.step: event.value for event in read.Scalars("loss")} == {1: 0.5, 2: 1.0, 3: 3.5, 4: 4.0, 5: 4.5}


def test_pace_is_work_over_the_peak_of_all_devices() -> None:
    pace = Pace(1e9, "NVIDIA H200", 2)
    steps = [{"tokens": 10**6, "seconds": 1.0, "wait": 0.1}, {"tokens": 10**6, "seconds": 3.0, "wait": 0.3}]
    assert [pace.add(step)["mfu"] for step in steps] == [round(1e15 / s / (2 * 989e12), 4) for s in (1, 3)]
    assert pace.note() == f"  MFU {100 * 2e15 / 4 / (2 * 989e12):.0f} %  data wait 10 %"
    unknown = Pace(1e9, "", 1)
    assert unknown.note() == ""
    assert "mfu" not in unknown.add(steps[0])
    assert unknown.note() == "  1000.000 T operations/s  data wait 10 %"
