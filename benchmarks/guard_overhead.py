"""What the guard and the metrics cost: one target and draft served several times on one device, measured in turn.

    python benchmarks/guard_overhead.py --target T --draft D --prompts P.jsonl --out OUT.json [--device cpu]

`off` is bare SGLang with no plug-in at all; `guard` adds the guard (enforce); `on` is a server as `eyas-serve launch`
starts it: guard, and SGLang's metrics, read every 5 s. `--kinds` chooses what is measured beside `off`. All stay up;
the same prompts, with the same number of tokens to generate, go to one after the other, and every round begins with
another server, so that a drift of the machine cancels. Many short rounds, and of their ratios of tokens/s, kind / off,
the median, which a disturbed round does not move; its interval is the sign test's, 95 % whatever the distribution. That
interval does not hold what a server keeps by chance for as long as it lives, its cores and its memory: `--of-each 2`
serves each kind twice, takes the mean of a kind's servers, and says how far two of one kind differ (`--kinds --of-each
2`: bare servers alone). `--alone` starts a server for every measurement, and nothing else: slow, but that goes too.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import platform
import statistics
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from host import expose_plugin, nvidia_smi

from eyas_contract import EngineFailure
from eyas_contract.contract import write_text_atomic
from eyas_serve.before_start import choose_port, cores
from eyas_serve.child import Child
from eyas_serve.client import Client
from eyas_serve.config import ServeConfig
from eyas_serve.flags import MODULE, engine_arguments, engine_environment
from eyas_serve.handshake import STATUS_DIR
from eyas_serve.interpreter import find_interpreter
from eyas_serve.log import last_words
from eyas_serve.plugin import SWITCH
from eyas_serve.prompts import load_prompts
from eyas_serve.server import Server

GOAL = 0.01  # share of the throughput
SCRAPE = 5.0  # seconds between two looks at the metrics


class Bare:
    """SGLang alone: no plug-in, no handshake. Use as a context manager; `wait` until it is up."""

    def __init__(self, config: ServeConfig, folder: Path) -> None:
        interpreter, port = find_interpreter(config.engine_python, config.device), choose_port(config.host, 0)
        environment = engine_environment(config, folder, cores())
        for name in (STATUS_DIR, SWITCH):
            environment.pop(name)
        command = [str(interpreter.python), "-m", MODULE, *engine_arguments(config, port)]
        self.log = folder / "bare.log"
        self.client = Client(f"http://{config.host}:{port}")
        self.child = Child(command, environment, self.log)

    def __enter__(self) -> Bare:
        return self

    def __exit__(self, *error: object) -> None:
        self.client.close()
        self.child.stop()

    def wait(self, seconds: float) -> None:
        """Until it answers /health. Raises EngineFailure after `seconds`, or once it has ended."""
        deadline = time.monotonic() + seconds
        while not self.client.healthy():
            if self.child.exit_code() is not None or time.monotonic() > deadline:
                raise EngineFailure("bare SGLang", last_words(self.log), f"a server within {seconds:.0f} s",
                                    "Give --start-seconds, or see the words above.")
            time.sleep(0.2)


@contextmanager
def scraped(client: Client) -> Iterator[list[int]]:
    """Read /metrics now and then, as Prometheus does; the list holds the status of every look."""
    looks, ended = list[int](), threading.Event()

    def look() -> None:
        while not ended.wait(SCRAPE):
            try:
                looks.append(client.get("/metrics")[0])
            except EngineFailure:
                looks.append(0)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield looks
    finally:
        ended.set()
        thread.join()


def throughput(url: str, prompts: Sequence[Sequence[int]], concurrency: int, new_tokens: int) -> float:
    """Generated tokens/s of all prompts, the end-of-text token ignored. Runs in a process of its own, as a server's
    clients do: the threads that watch a server and read its metrics would share the interpreter with it."""
    with closing(Client(url)) as client, ThreadPoolExecutor(concurrency) as pool:
        began = time.perf_counter()
        answers = list(pool.map(lambda ids: client.generate(list(ids), new_tokens, ignore_eos=True), prompts))
        return sum(len(answer.output_ids) for answer in answers) / (time.perf_counter() - began)


def ratio_of(pairs: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Median of on / off with its interval, and whether the cost is at most GOAL: `yes`, `no` or `undecided`."""
    ratios = sorted(on / off for on, off in pairs)
    cut = sign_test_cut(len(ratios))
    low, high = (ratios[cut - 1], ratios[-cut]) if cut else (0.0, math.inf)
    verdict = "yes" if low >= 1 - GOAL else "no" if high < 1 - GOAL else "undecided"
    return {"ratio": statistics.median(ratios), "interval": [low, high] if cut else None, "pairs": len(ratios),
            f"costs_at_most_{GOAL:.0%}": verdict}


def sign_test_cut(count: int) -> int:
    """The k for which the k-th smallest and k-th largest of `count` values hold the median in 95 % of cases; 0 for
    fewer than six."""
    below, k = 0.0, 0
    while (below := below + math.comb(count, k) / 2**count) <= 0.025:
        k += 1
    return k


def server_names(kinds: Sequence[str], of_each: int) -> list[str]:
    """`on` and `off`, or `on 1`, `off 1`, `off 2`, `on 2`, ...: there and back, so that no kind is always first."""
    every = [*kinds, "off"]
    if of_each == 1:
        return every
    return [f"{kind} {i}" for i in range(1, of_each + 1) for kind in (every if i % 2 else every[::-1])]


def measure(speed: Callable[[str], float], names: Sequence[str], options: argparse.Namespace,
            sink: dict[str, Any]) -> None:
    """Rounds over all servers, `--pairs` of them or until `--seconds` are over; two at least, written after each."""
    deadline, rounds = time.monotonic() + options.seconds, list[dict[str, float]]()
    while len(rounds) < options.pairs and (len(rounds) < 2 or time.monotonic() < deadline):
        first = len(rounds) % len(names)
        rounds.append({name: speed(name) for name in (*names[first:], *names[:first])})
        sink["tokens_per_second"] = rounds
        sink |= compare(rounds) if len(rounds) > 1 else {}
        write_text_atomic(options.out, json.dumps(sink, indent=1) + "\n")


def compare(rounds: Sequence[dict[str, float]]) -> dict[str, Any]:
    """`over_off`: `ratio_of` each kind, the mean of its servers taken; `alike`: that of the first two of one kind."""
    kinds: dict[str, list[str]] = {}
    for name in rounds[0]:
        kinds.setdefault(name.split()[0], []).append(name)
    mean = {kind: [statistics.geometric_mean([each[name] for name in names]) for each in rounds]
            for kind, names in kinds.items()}
    alike = {kind: ratio_of([(each[f"{kind} 1"], each[f"{kind} 2"]) for each in rounds])
             for kind, names in kinds.items() if len(names) > 1}
    return {"over_off": {kind: ratio_of(list(zip(speeds, mean["off"], strict=True)))
                         for kind, speeds in mean.items() if kind != "off"},
            "alike": {kind: {key: found[key] for key in ("ratio", "interval")} for kind, found in alike.items()}}


def machine() -> dict[str, Any]:
    """What the numbers were measured on."""
    try:
        device = nvidia_smi("name")[0][0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        device = platform.processor() or platform.machine()
    return {"device": device, "cores": len(os.sched_getaffinity(0)), "python": platform.python_version()}


class Servers:
    """Starts one or the other server, as a context manager that gives its client.

    Attributes:
        looks: HTTP status of every look at the metrics.
        sglang: version, once a server that is `on` has been started.
    """

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.options, self.folder, self.looks, self.sglang = options, folder, list[int](), ""
        self.config = ServeConfig(
            target=options.target, draft=options.draft, device=options.device, dtype=options.dtype, port=0,
            engine_python=options.engine_python, radix_cache=False, preflight=False, steps=options.steps,
            topk=options.topk, num_draft_tokens=options.num_draft_tokens, mem_fraction=options.mem_fraction,
            max_total_tokens=options.max_total_tokens, metrics=False, acceptance_floor=0.0, extra=options.extra)

    @contextmanager
    def started(self, name: str) -> Iterator[Client]:
        """One of `server_names`."""
        kind = name.split()[0]
        if kind == "off":
            folder = Path(tempfile.mkdtemp(dir=self.folder))
            with Bare(self.config, folder) as bare:
                bare.wait(self.options.start_seconds)
                yield bare.client
            return
        with Server(replace(self.config, metrics=kind == "on"), print) as server, ExitStack() as looking:
            assert server.engine is not None
            self.sglang = server.engine.sglang
            looks = looking.enter_context(scraped(server.client)) if kind == "on" else []
            yield server.client
        self.looks += looks


def run(options: argparse.Namespace) -> dict[str, Any]:
    """The rounds; returns what was written."""
    rows = [list(prompt.input_ids) for prompt in load_prompts(options.prompts, options.target)]
    prompts = [rows[i % len(rows)] for i in range(options.count)]
    result: dict[str, Any] = {"machine": machine(), "settings": {
        key: value.name if isinstance(value, Path) else value for key, value in vars(options).items()}}

    def speed(client: Client, some: Sequence[Sequence[int]] = prompts) -> float:
        return asker.submit(throughput, client.url, some, options.concurrency, options.max_new_tokens).result()

    def warmed(client: Client) -> Client:
        speed(client, prompts[:2 * options.concurrency])
        return client

    with (tempfile.TemporaryDirectory(prefix="eyas-overhead-") as name, ExitStack() as both,
          ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as asker):
        folder = Path(name)
        expose_plugin(folder / "entry", "eyas-serve")
        servers = Servers(options, folder)
        if options.alone:
            def alone(which: str) -> float:
                with servers.started(which) as client:
                    return speed(warmed(client))

            measure(alone, server_names(options.kinds, 1), options, result)
        else:
            names = server_names(options.kinds, options.of_each)
            with ThreadPoolExecutor(len(names)) as pool:
                started = pool.map(lambda name: both.enter_context(servers.started(name)), names)
                clients = dict(zip(names, started, strict=True))
            for client in clients.values():
                warmed(client)
            measure(lambda which: speed(clients[which]), names, options, result)
    result |= {"sglang": servers.sglang, "metrics_read": len(servers.looks)}
    if any(status != 200 for status in servers.looks):
        raise EngineFailure("the server that is on", f"HTTP status {set(servers.looks)} for /metrics", "its metrics",
                            "See its log.")
    write_text_atomic(options.out, json.dumps(result, indent=1) + "\n")
    return result


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("target", "draft", "prompts", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--engine-python", type=Path)
    for name, default in (("steps", 3), ("topk", 1), ("num-draft-tokens", 4), ("concurrency", 8), ("count", 16),
                          ("max-new-tokens", 128), ("pairs", 1000), ("max-total-tokens", 65536)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--kinds", nargs="*", choices=("guard", "on"), default=["on"], help="beside `off`")
    parser.add_argument("--of-each", type=int, default=1, help="servers of each kind")
    parser.add_argument("--mem-fraction", type=float, help="of each server")
    parser.add_argument("--seconds", type=float, default=120.0, help="of measuring")
    parser.add_argument("--start-seconds", type=float, default=180.0, help="for a bare server")
    parser.add_argument("--alone", action="store_true", help="start a server for every measurement, and no other")
    parser.add_argument("--extra", default="", help="further arguments of SGLang, for every server")
    options = parser.parse_args(argv)
    if not options.kinds and (options.of_each == 1 or options.alone):
        parser.error("bare SGLang alone is compared with itself: --of-each 2, without --alone")
    return options


def main() -> None:
    """Measure and say the ratios."""
    options = parse()
    result = run(options)

    def said(found: dict[str, Any]) -> str:
        return f"{found['ratio']:.4f}" + (" [{:.4f}, {:.4f}]".format(*found["interval"]) if found["interval"] else "")

    for kind, found in result["alike"].items():
        print(f"tokens/s of one server `{kind}` over another: {said(found)}")
    for kind, found in result["over_off"].items():
        print(f"tokens/s {'with guard' if kind == 'guard' else 'with guard and metrics'} over without: {said(found)}, "
              f"{found['pairs']} rounds; at most {GOAL:.0%} cost: {found[f'costs_at_most_{GOAL:.0%}']}")
    print(options.out)


if __name__ == "__main__":
    main()
