"""A run's folder: who may write into it, and what a run that is continued must still be."""

from __future__ import annotations

from typing import Any

from eyas_contract import Contract, InvalidInput, canonical, compare
from eyas_contract.commands import plain_config, save_config
from eyas_contract.contract import read_json, write_text_atomic
from eyas_contract.outputs import held, require_own, require_place, with_temporary
from eyas_draft import checkpoint, metrics
from eyas_draft.config import FREE_ON_RESUME, TrainConfig
from eyas_draft.setup import Setup
from eyas_draft.store import Store

SETTINGS, COVERAGE, DATA = "config.resolved.json", "coverage.json", "data.json"
BEGUN = with_temporary("contract.json", COVERAGE, SETTINGS, DATA, metrics.NAME, checkpoint.BEST) | {
    checkpoint.FOLDER, "tensorboard", "wandb"}
"""What a run may have left that ended before its first checkpoint."""


def claim(config: TrainConfig, setup: Setup) -> None:
    """Write the run's contract, settings and samples; where there is a checkpoint, compare them with its run's first.

    Raises:
        InvalidInput: settings, contract or samples that differ from those of the run that is to be continued (every
            difference is named), or a folder with anything but a run, or that cannot be written, or in which another
            process trains.
    """
    run, settings, data = config.out, plain_config(config), _data(setup.store)
    begun = checkpoint.latest(run) is not None
    if begun:
        differences = _differences(config, settings, data, setup.contract)
        if differences:
            raise InvalidInput(str(run), "a run with other settings: " + "; ".join(differences),
                               "the same settings and samples, to continue it exactly",
                               "Give another --out to start anew.")
    else:
        _require_unbegun(config, settings)
    require_place(run / SETTINGS, "a folder for the run, by --out")
    with held(run):  # a run without a checkpoint yet may be going on here, with other settings
        if not begun:
            checkpoint.mark_best(run, None)
        setup.contract.save(run)
        write_text_atomic(run / COVERAGE, canonical.dumps(setup.coverage) + "\n")
        write_text_atomic(run / DATA, canonical.dumps(data) + "\n")
        save_config(config, run, SETTINGS)


def _data(store: Store) -> dict[str, Any]:
    """What tells a store's samples from others, wherever the store lies."""
    return {"samples": len(store), "tokens": store.manifest.num_tokens, "sha256": store.samples_digest()}


def _differences(config: TrainConfig, settings: dict[str, Any], data: dict[str, Any], contract: Contract) -> list[str]:
    """Between a run with a checkpoint and what would continue it."""
    run = config.out
    found = _changed(_settings(config), settings)
    found += [str(m) for m in compare(Contract.load(run), contract, str(run), "this store")]
    if (run / DATA).is_file():  # runs made before it was kept have none: their samples are taken for the same
        before = read_json(run / DATA, "the samples of a run, by eyas-draft train")
        if before != data:
            found.append(f"samples: {before.get('samples')} of {before.get('tokens')} tokens before, {data['samples']} "
                         f"of {data['tokens']} now, not the same in the same order, in {config.store}")
    return found


def _require_unbegun(config: TrainConfig, settings: dict[str, Any]) -> None:
    """Refuse a folder without a checkpoint that is neither new, nor empty, nor what a run of ours has left."""
    if (config.out / SETTINGS).is_file() and not _changed(_settings(config), settings):
        return
    require_own(config.out, BEGUN, "a new or empty folder, or a run")


def _settings(config: TrainConfig) -> dict[str, Any]:
    return dict(read_json(config.out / SETTINGS, "the settings of a run, by eyas-draft train"))


def _changed(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return [f"{key}: {before.get(key)!r} before, {now.get(key)!r} now" for key in sorted(set(before) | set(now))
            if key not in FREE_ON_RESUME and before.get(key) != now.get(key)]
