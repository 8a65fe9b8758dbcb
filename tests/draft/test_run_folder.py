"""What may begin in a folder, what is continued there, and settings that are refused before anything is written."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
import storemaker
import torch

from eyas_contract import InvalidInput, Manifest
from eyas_contract.outputs import lock
from eyas_draft.config import EvalConfig, PlanConfig, TrainConfig, VerifyConfig
from eyas_draft.evaluate import evaluate
from eyas_draft.export import verify
from eyas_draft.golden import make_golden
from eyas_draft.golden_config import GoldenConfig
from eyas_draft.plan import plan
from eyas_draft.ranges import require_in_range
from eyas_draft.ranks import usable_device
from eyas_draft.train import Trainer


def settings(store: Path, target: Path, out: Path, **changes: Any) -> TrainConfig:
    return TrainConfig(store, target, out, **{"vocab_size": 0, "ttt_steps": 2, "tokens_per_batch": 128, "max_steps": 2,
                                              "precision": "fp32", **changes})


def begun(config: TrainConfig) -> Path:
    """Claim the folder, and no more: as a run that was killed before its first checkpoint."""
    Trainer(config).stepper.close()
    return config.out


@pytest.fixture
def own_store(store: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(store, tmp_path / "store"))


def test_a_run_goes_on_with_its_own_samples_wherever_they_lie(own_store: Path, tiny_target: Path, tmp_path: Path,
                                                              rows: list[storemaker.Row]) -> None:
    run = tmp_path / "run"
    Trainer(settings(own_store, tiny_target, run)).run()
    moved = own_store.rename(tmp_path / "moved")
    assert Trainer(settings(moved, tiny_target, run)).step == 2
    grown = storemaker.write_store(tmp_path / "store", tiny_target, [*rows[1:], rows[0]])
    before = {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()}
    with pytest.raises(InvalidInput, match=r"samples: 96 of \d+ tokens before, 96 of \d+ now, not the same"):
        Trainer(settings(grown, tiny_target, run))
    assert {path.name: path.read_bytes() for path in run.iterdir() if path.is_file()} == before


def test_a_store_to_which_is_still_added_is_refused(own_store: Path, tiny_target: Path, tmp_path: Path) -> None:
    dataclasses.replace(Manifest.load(own_store), complete=False).save(own_store)
    with pytest.raises(InvalidInput, match=r"not complete: 96 samples so far.*same command"):
        Trainer(settings(own_store, tiny_target, tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_a_run_without_a_checkpoint_may_begin_anew(own_store: Path, tiny_target: Path, tmp_path: Path,
                                                   rows: list[storemaker.Row]) -> None:
    run = begun(settings(own_store, tiny_target, tmp_path / "run", lr=5.0))
    (run / "best.json").write_text('{"step": 3, "acceptance_length": 2.5}')
    storemaker.write_store(own_store, tiny_target, rows[:90])
    begun(settings(own_store, tiny_target, run, seed=4))
    assert json.loads((run / "config.resolved.json").read_text())["lr"] == 1e-3
    assert json.loads((run / "data.json").read_text())["samples"] == 90
    assert not (run / "best.json").exists()


def test_folders_of_others_are_not_taken_for_a_run_that_never_began(own_store: Path, tiny_target: Path,
                                                                    tmp_path: Path) -> None:
    (own_store / "config.resolved.json").write_text('{"data": "prompts.jsonl"}')  # as eyas-extract leaves it
    contract = (own_store / "contract.json").read_bytes()
    with pytest.raises(InvalidInput, match=r"not empty: manifest\.json"):
        Trainer(settings(own_store, tiny_target, own_store))
    assert (own_store / "contract.json").read_bytes() == contract


def test_all_settings_out_of_range_are_named_before_anything_is_read(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    with pytest.raises(InvalidInput) as caught:
        Trainer(settings(nowhere, nowhere, tmp_path / "run", accumulate=0, ttt_steps=0, num_layers=0, decay=-1.0,
                         tokens_per_batch=0, checkpoint_every=-3, lr=float("nan"), holdout=1.0, fraction=0.0))
    flags = ("accumulate 0", "ttt-steps 0", "num-layers 0", "decay -1.0", "tokens-per-batch 0", "checkpoint-every -3",
             "lr nan", "holdout 1.0", "fraction 0.0")
    assert all(f"--{flag}" in caught.value.found for flag in flags)
    assert "--fraction above 0 and at most 1" in caught.value.wanted
    assert not (tmp_path / "run").exists()
    for wrong, word in ((lambda: verify(VerifyConfig(nowhere, nowhere, nowhere, nowhere, samples=0)), "--samples 0"),
                        (lambda: plan(PlanConfig(nowhere, accumulate=0)), "--accumulate 0"),
                        (lambda: evaluate(EvalConfig(nowhere, nowhere, nowhere, batch_size=0)), "--batch-size 0")):
        with pytest.raises(InvalidInput, match=word):
            wrong()


def test_what_stands_as_default_is_in_range() -> None:
    here = Path()
    for config in (TrainConfig(here, here, here), PlanConfig(here), VerifyConfig(here, here, here, here),
                   EvalConfig(here, here, here)):
        require_in_range(config)


@pytest.mark.skipif(torch.cuda.is_available(), reason="CUDA is here")
def test_a_device_that_is_not_there_is_refused_before_anything_is_written(store: Path, tiny_target: Path,
                                                                          tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match=r"--device: cuda \(.*--device cpu"):
        Trainer(settings(store, tiny_target, tmp_path / "run", device="cuda"))
    with pytest.raises(InvalidInput, match="--device: cuda"):
        evaluate(EvalConfig(tmp_path, tmp_path, tmp_path, device="cuda"))
    with pytest.raises(InvalidInput, match="--device: cuda"):
        make_golden(GoldenConfig(tmp_path, tiny_target, device="cuda"))
    with pytest.raises(InvalidInput, match="--device: abacus"):
        usable_device("abacus")
    assert not (tmp_path / "run").exists()


def test_a_loss_that_is_none_writes_nothing(store: Path, tiny_target: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidInput, match="--loss"):
        Trainer(settings(store, tiny_target, tmp_path / "run", loss="huber"))
    assert not (tmp_path / "run").exists()


def test_prompts_to_decode_need_samples_held_out(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    with pytest.raises(InvalidInput, match=r"--decode-prompts: 4, with --holdout 0"):
        Trainer(settings(nowhere, nowhere, tmp_path / "run", decode_prompts=4, holdout=0.0))


def test_two_do_not_train_in_one_folder(store: Path, tiny_target: Path, tmp_path: Path) -> None:
    """The second would take the first one's metrics away and write the same checkpoints."""
    config = settings(store, tiny_target, tmp_path / "run")
    late = Trainer(config)
    handle = lock(config.out)
    with pytest.raises(InvalidInput, match="another process of eyas writes to it now"):
        late.run()
    assert not (config.out / "metrics.jsonl").exists()
    with pytest.raises(InvalidInput, match="another process of eyas writes to it now"):
        Trainer(settings(store, tiny_target, config.out, lr=0.5))
    assert json.loads((config.out / "config.resolved.json").read_text())["lr"] == config.lr
    os.close(handle)
    Trainer(config).run()
    assert Trainer(config).step == 2
