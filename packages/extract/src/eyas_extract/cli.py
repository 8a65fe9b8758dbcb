"""The command `eyas-extract`: regenerate, run, plan, show, check. Parses, calls, prints."""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Annotated, Any

import tyro

from eyas_contract.canonical import to_plain
from eyas_contract.commands import duration, expand_config, run_command
from eyas_contract.contract import write_text_atomic
from eyas_extract.config import CheckConfig, PlanConfig, RegenerateConfig, RunConfig, ShowConfig

COMMANDS: dict[str, type] = {"regenerate": RegenerateConfig, "run": RunConfig, "plan": PlanConfig, "show": ShowConfig,
                             "check": CheckConfig}
Command = (Annotated[RegenerateConfig, tyro.conf.subcommand("regenerate")]
           | Annotated[RunConfig, tyro.conf.subcommand("run")]
           | Annotated[PlanConfig, tyro.conf.subcommand("plan")]
           | Annotated[ShowConfig, tyro.conf.subcommand("show")]
           | Annotated[CheckConfig, tyro.conf.subcommand("check")])


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point; ends the process with the command's exit code."""
    words = list(sys.argv[1:] if argv is None else argv)

    def body() -> int:
        config = tyro.cli(Command, args=expand_config(words, COMMANDS), prog="eyas-extract",
                          description="Hidden states of a target, extracted once, checked and kept. "
                          "Every command takes --config FILE.toml; flags win over it.")
        return _dispatch(config)

    raise SystemExit(run_command(body))


def _dispatch(config: Any) -> int:
    if isinstance(config, PlanConfig):  # before its parent, RunConfig
        return _plan(config)
    if isinstance(config, RunConfig):
        return _run(config)
    if isinstance(config, RegenerateConfig):
        return _regenerate(config)
    return _show(config) if isinstance(config, ShowConfig) else _check(config)


def _regenerate(config: RegenerateConfig) -> int:
    from eyas_extract.regenerate import regenerate

    done = regenerate(config)
    print(f"{config.out}: {done.rows} rows answered, {len(done.rejects)} left out; this run {done.new_tokens:,} tokens "
          f"in {duration(done.seconds)}, {done.new_tokens / max(done.seconds, 1e-9):,.0f} tokens/s")
    _print_reasons(Counter(reject.reason for reject in done.rejects))
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
    if config.json:
        print(json.dumps(to_plain(report), indent=1))
    else:
        for damage in report.damage:
            print(f"{damage.shard}{', sample ' + damage.sample if damage.sample else ''}: {damage.fault}")
        print(f"{config.store}: {report.shards} shards, {report.samples} samples, {report.tokens:,} tokens, "
              f"{report.trained_tokens:,} trained, {'complete' if report.complete else 'not complete yet'}; "
              f"{f'{len(report.damage)} faults' if report.damage else 'sound'}")
    return 1 if report.damage else 0
