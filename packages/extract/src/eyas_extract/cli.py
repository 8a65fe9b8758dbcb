"""The command `eyas-extract`. Parses, calls, prints."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from eyas_contract import InvalidInput, Manifest
from eyas_contract.canonical import to_plain
from eyas_contract.commands import duration, expand_config, run_command
from eyas_contract.contract import write_text_atomic
from eyas_extract.config import (
    CheckConfig,
    CheckFilesConfig,
    EngineConfig,
    MergeConfig,
    PlanConfig,
    RegenerateConfig,
    RepairConfig,
    RunConfig,
    ShowConfig,
    SplitConfig,
    StatsConfig,
)

if TYPE_CHECKING:
    from eyas_extract.check import Report

COMMANDS: dict[str, type] = {"regenerate": RegenerateConfig, "run": RunConfig, "plan": PlanConfig, "show": ShowConfig,
                             "check": CheckConfig, "repair": RepairConfig, "stats": StatsConfig, "merge": MergeConfig,
                             "split": SplitConfig, "engine": EngineConfig, "check-files": CheckFilesConfig}


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; ends the process with the command's exit code."""
    words = list(sys.argv[1:] if argv is None else argv)

    def body() -> int:
        config = tyro.extras.subcommand_cli_from_dict(
            dict(COMMANDS), args=expand_config(words, COMMANDS), prog="eyas-extract",
            description="Hidden states of a target, extracted once, checked and kept. "
            "Every command takes --config FILE.toml; flags win over it.")
        return _dispatch(config)

    raise SystemExit(run_command(body))


def _dispatch(config: Any) -> int:
    actions: dict[type, Callable[[Any], int]] = {
        RegenerateConfig: _regenerate, RunConfig: _run, PlanConfig: _plan, ShowConfig: _show, CheckConfig: _check,
        RepairConfig: _repair, StatsConfig: _stats, MergeConfig: _merge, SplitConfig: _split, EngineConfig: _engine,
        CheckFilesConfig: _check_files}
    return actions[type(config)](config)


def _regenerate(config: RegenerateConfig) -> int:
    from eyas_extract.conversations import by_reason
    from eyas_extract.regenerate import regenerate

    done = regenerate(config)
    reasons = by_reason(done.rejects)
    if config.json:
        print(json.dumps({"rows": done.rows, "rejected": dict(reasons.most_common()), "new_tokens": done.new_tokens,
                          "seconds": done.seconds}, indent=1))
        return 0
    print(f"{config.out}: {done.rows} rows answered, {len(done.rejects)} left out; this run {done.new_tokens:,} tokens "
          f"in {duration(done.seconds)}, {done.new_tokens / max(done.seconds, 1e-9):,.0f} tokens/s")
    _print_reasons(reasons)
    return 0


def _run(config: RunConfig) -> int:
    from eyas_extract.run import run

    done = run(config)
    plain = json.dumps(to_plain(done), indent=1, sort_keys=True) + "\n"
    write_text_atomic(config.out / "summary.json", plain)
    if config.json:
        print(plain, end="")
        return 0
    if done.check:
        print(f"target checked: {done.check}")
    print(f"{config.out}: {done.rows} rows -> {done.samples} samples, {done.tokens:,} tokens, {done.trained_tokens:,} "
          f"trained, {done.bytes / 1e6:,.1f} MB; this run {done.new_tokens:,} tokens in {duration(done.seconds)}")
    print(f"left out: {sum(done.rejected.values())}")
    _print_reasons(Counter(done.rejected))
    return 0


def _print_reasons(reasons: Counter[str]) -> None:
    for reason, count in reasons.most_common():
        print(f"  {count:>6} x {reason}")


def _plan(config: PlanConfig) -> int:
    from eyas_extract.plan import plan

    result = plan(config)
    if config.json:
        print(json.dumps(to_plain(result), indent=1))
        return 0
    print(f"{result.samples} samples, {result.tokens:,} tokens, {result.trained_tokens:,} trained; "
          f"{result.rejected} left out")
    print(f"{result.bytes_per_token:,} bytes a token, {result.bytes / 1e9:,.3f} GB in all; "
          f"{result.free_bytes / 1e9:,.1f} GB free: {'fits' if result.fits else 'DOES NOT FIT'}")
    if result.seconds:
        print(f"{result.tokens_per_second:,.0f} tokens/s on one batch, about {duration(result.seconds)} in all")
    return 0


def _show(config: ShowConfig) -> int:
    from eyas_extract.show import show, text

    shown = show(config)
    print(json.dumps(to_plain(shown), ensure_ascii=False) if config.json else text(shown, colour=sys.stdout.isatty()))
    return 0


def _check(config: CheckConfig) -> int:
    from eyas_extract.check import check

    report = check(config.store)
    if config.data is not None and config.target is not None:
        from eyas_extract.provenance import token_faults

        faults = token_faults(config.store, config.target, config.data)
        report = dataclasses.replace(report, damage=(*report.damage, *faults))
    elif config.data is not None or config.target is not None:
        raise InvalidInput("check", "--data or --target alone", "both", "Name the other too.")
    if config.json:
        print(json.dumps(to_plain(report), indent=1))
    else:
        _print_report(config.store, report)
    return 1 if report.damage else 0


def _check_files(config: CheckFilesConfig) -> int:
    from eyas_contract.engines import render
    from eyas_extract.loose import check_files

    report = check_files(config.folder, config.target, config.prompts, config.teacher)
    if config.json:
        print(json.dumps(to_plain(report), indent=1))
    else:
        advice = "Training leaves bad samples out up to --max-bad-samples, and stops above it."
        if report.last_state == "neither":
            advice = "The last states are not this target's: none of the files can be trained on."
        print(f"{report.files - len(report.bad)} whole, {len(report.bad)} bad of {report.files} files; last state: "
              f"{report.last_state}. {advice}")
        if report.findings:
            print(render(report.findings))
    return 1 if report.bad or report.last_state == "neither" else 0


def _print_report(store: Path, report: Report) -> None:
    for damage in report.damage:
        print(f"{damage.shard}{', sample ' + damage.sample if damage.sample else ''}: {damage.fault}")
    print(f"{store}: {report.shards} shards, {report.samples} samples, {report.tokens:,} tokens, "
          f"{report.trained_tokens:,} trained, {'complete' if report.complete else 'not complete yet'}; "
          f"{f'{len(report.damage)} faults' if report.damage else 'sound'}")


def _repair(config: RepairConfig) -> int:
    from eyas_extract.repair import QUARANTINE, repair

    done = repair(config)
    if config.json:
        print(json.dumps(to_plain(done), indent=1))
    else:
        print(f"{done.faults} faults; {len(done.shards)} shards made anew ({', '.join(done.shards) or 'none'}), "
              f"{done.samples} samples, {done.tokens:,} tokens; the old ones are in {config.out / QUARANTINE}")
        if done.rejects:
            print(f"left out, since their states cannot be used now: {len(done.rejects)}")
            _print_reasons(Counter(reject.reason for reject in done.rejects))
        _print_report(config.out, done.after)
    return 1 if done.after.damage else 0


def _stats(config: StatsConfig) -> int:
    from eyas_extract.stats import stats

    found = stats(config.store)
    if config.json:
        print(json.dumps(to_plain(found), indent=1))
        return 0
    print(f"{config.store}: states of layers {list(found.aux_layer_ids)} and the last of {found.target}, "
          f"{found.store_dtype}, {'complete' if found.complete else 'not complete yet'}\n"
          f"{found.shards} shards, {found.samples} samples, {found.tokens:,} tokens, {found.trained_tokens:,} trained, "
          f"{found.bytes / 1e9:,.3f} GB, {found.bytes_per_token:,.0f} bytes a token\n"
          "tokens of a sample: least {}, median {}, 90 % within {}, most {}".format(*found.lengths))
    print(f"left out: {sum(found.rejected.values())}")
    _print_reasons(Counter(found.rejected))
    return 0


def _merge(config: MergeConfig) -> int:
    from eyas_extract.reshape import merge

    _print_stores([(config.out, merge(config.stores, config.out))], config.json)
    return 0


def _split(config: SplitConfig) -> int:
    from eyas_extract.reshape import split

    outs = (config.first, config.second)
    _print_stores(list(zip(outs, split(config.store, outs, config.share), strict=True)), config.json)
    return 0


def _print_stores(stores: Sequence[tuple[Path, Manifest]], as_json: bool) -> None:
    if as_json:
        print(json.dumps([{"store": str(store), "shards": len(made.shards), "samples": made.num_samples,
                           "tokens": made.num_tokens, "trained_tokens": made.num_trained} for store, made in stores],
                         indent=1))
        return
    for store, made in stores:
        print(f"{store}: {len(made.shards)} shards, {made.num_samples} samples, {made.num_tokens:,} tokens, "
              f"{made.num_trained:,} trained")


def _engine(config: EngineConfig) -> int:
    from eyas_extract.engine import serve

    serve(config, lambda line: print(line, flush=True))
    return 0
