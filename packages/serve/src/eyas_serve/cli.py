"""`eyas-serve preflight`, `launch`, `probe`, `bench`, `tune`, `watch`, `read-log` and `read-rounds`."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from types import FrameType

import tyro

from eyas_contract.commands import expand_config, run_command
from eyas_contract.errors import EyasError
from eyas_serve.bench import run_bench
from eyas_serve.bench_report import table
from eyas_serve.config import BenchConfig, LaunchConfig, TuneConfig
from eyas_serve.events import Listener, as_json, as_lines
from eyas_serve.preflight import PreflightConfig, ReadLogConfig, preflight, read_log
from eyas_serve.probe.command import ProbeConfig, probe
from eyas_serve.report import NOT_CHECKED, Report
from eyas_serve.rounds import ReadRoundsConfig, read_rounds, text
from eyas_serve.server import Server
from eyas_serve.tune import run_tune, tune_table
from eyas_serve.watch import WatchConfig, watch

COMMANDS: dict[str, type] = {"preflight": PreflightConfig, "launch": LaunchConfig, "bench": BenchConfig,
                             "read-log": ReadLogConfig, "probe": ProbeConfig, "read-rounds": ReadRoundsConfig,
                             "watch": WatchConfig, "tune": TuneConfig}


def launch(config: LaunchConfig) -> int:
    """Serve until interrupted: SIGINT and SIGTERM stop the whole tree."""
    listen: Listener = as_lines(_say)
    close: Callable[[], None] | None = None
    if config.json_events:
        listen = as_json(_say)
    elif sys.stdout.isatty() and not config.no_live:
        from eyas_serve.view import LiveView

        view = LiveView()
        listen, close = view, view.close
    try:
        with Server(config, listen=listen) as server:
            server.watch()
    finally:
        if close is not None:
            close()
    return 0


def bench(config: BenchConfig, as_json: bool) -> int:
    """Measure; the table goes to stdout, or with --json the report."""
    result = run_bench(config, _complain if as_json else _say)
    files = ", ".join(str(config.out.with_suffix(end)) for end in (config.out.suffix, ".csv", ".html"))
    print(json.dumps(result) if as_json else f"{table(result)}\n{files}")
    return 0


def tune(config: TuneConfig, as_json: bool) -> int:
    """Measure every arm; the table goes to stdout, or with --json the report."""
    result = run_tune(config, _complain if as_json else _say)
    print(json.dumps(result) if as_json else f"{tune_table(result)}\n{config.out}\n{config.serve_toml}")
    return 0


def report(make: Callable[[], Report], as_json: bool) -> int:
    """Print a report; exit code 0 pass or warn, 1 fail, 2 where nothing could be checked."""
    try:
        made = make()
    except EyasError as error:
        _complain(f"error: {error}")
        return NOT_CHECKED
    print(made.text(as_json))
    return made.code()


def main() -> None:
    """The command. Exit code 1 for an EyasError, 2 for wrong usage, 130 for SIGINT, 143 for SIGTERM."""
    signal.signal(signal.SIGTERM, _end)
    sys.exit(run_command(lambda: _run(sys.argv[1:])))


def _run(argv: list[str]) -> int:
    words = [word for word in argv if word != "--json"]
    as_json = len(words) < len(argv)
    if words[:1] == ["launch"]:
        words = argv  # it has --json-events: the parser refuses --json, and names that
    words = expand_config(words, COMMANDS)
    config = tyro.extras.subcommand_cli_from_dict(
        dict(COMMANDS), args=words, prog="eyas-serve",
        description="Launches, guards and measures SGLang with an EAGLE-3 draft. --config FILE.toml gives flags; "
        "--json makes all but launch print JSON, launch has --json-events.")
    if isinstance(config, PreflightConfig):
        return report(lambda: preflight(config), as_json)
    if isinstance(config, ReadLogConfig):
        return report(lambda: Report(f"log {config.log.name}", read_log(config.log)), as_json)
    if isinstance(config, ReadRoundsConfig):
        _say(text(read_rounds(config), as_json))
        return 0
    if isinstance(config, WatchConfig):
        return watch(config, _say, as_json)
    if isinstance(config, ProbeConfig):
        return report(lambda: probe(config), as_json)
    if isinstance(config, TuneConfig):
        return tune(config, as_json)
    return bench(config, as_json) if isinstance(config, BenchConfig) else launch(config)


def _end(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


def _say(line: str) -> None:
    print(line, flush=True)


def _complain(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
