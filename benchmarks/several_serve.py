"""Part `serve` of `several_gpus.sh`: SGLang with 1, 2, 4, 8 tensor-parallel ranks, watched, measured, and killed.

Servers of each number of ranks: the target alone, with its draft, and on GPUs with its draft and our attention. Of one
number they start side by side on GPUs (a start is most of the time) and are measured one after another. A target whose
heads the ranks do not divide is padded (see `several_models.py`), with its draft. Without --draft one is made from the
target's last layer, and READY then does not ask for acceptance.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import threading
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from typing import Any

from several import Part, conversations, gpu_memory, part  # puts the tests' helpers on the path

# isort: split
import handmade
from serve_attention import Prompts, long_prompts, measured
from several_models import kv_heads, logits_differ, padded_pair

from eyas_contract import EngineFailure, EyasError
from eyas_serve.acceptance import Acceptance
from eyas_serve.client import Generation
from eyas_serve.config import BenchConfig, ServeConfig
from eyas_serve.events import Event
from eyas_serve.handshake import READY
from eyas_serve.measure import measure
from eyas_serve.progress import SERVING
from eyas_serve.prompts import load_prompts
from eyas_serve.server import Server

GPU_ARGS = ("--page-size", "1", "--max-running-requests", "8")
TIE = {"float32": 1e-3, "bfloat16": 0.25}  # nats between the two best tokens that rounding may decide: 2 bf16 steps
LOADING = "loading target weights"


@dataclasses.dataclass
class Launch:
    """A server and what was seen of it."""

    kind: str
    ranks: int
    server: Server
    seen: dict[str, list[str]]
    seconds: float = 0.0

    @property
    def name(self) -> str:
        """For the results."""
        return f"{self.kind}, TP {self.ranks}"


class Serve:
    """Inputs, and what every server has in common."""

    def __init__(self, part: Part) -> None:
        self.part, self.answers = part, dict[str, list[Generation]]()
        self.own = part.draft is None
        draft = handmade.make_draft(part.target, part.work / "handmade") if self.own else part.draft
        # The tiny target needs no padding for 2 ranks; on a CPU it is padded all the same, so that this way is walked.
        ranks = 2 * kv_heads(part.target) if part.cpu else part.sizes[-1]
        self.target, self.draft = padded_pair(part.target, draft, part.work / "padded", ranks)
        self.questions = part.prompts or conversations(part.work / "prompts.jsonl", 32, (1, 1), seed=77)
        self.prompts = load_prompts(self.questions, self.target, 4 if part.cpu else 32)
        self.few: Prompts = [list(prompt.input_ids) for prompt in self.prompts[:2 if part.cpu else 8]]
        self.new_tokens = 16 if part.cpu else 64

    def config(self, kind: str, ranks: int, number: int = 0) -> ServeConfig:
        """A server of a kind: `target alone`, `draft` or `draft, eyas attention`."""
        part, drafted = self.part, kind != "target alone"
        ours = kind.endswith("eyas attention")
        extra = "" if part.cpu else " ".join(["--attention-backend", "eyas" if ours else "triton", *GPU_ARGS])
        environment = {}
        if not part.cpu:
            first = number % len(part.gpus) if ranks == 1 else 0
            environment = {"CUDA_VISIBLE_DEVICES": ",".join(part.gpus[first:first + ranks])}
        tree = {"steps": 3, "topk": 2, "num_draft_tokens": 6} if part.cpu else {
            "steps": 3, "topk": 4, "num_draft_tokens": 16}
        return ServeConfig(
            target=self.target, draft=self.draft if drafted else None, device=part.device, dtype=part.dtype, port=0,
            tp=ranks, radix_cache=False, metrics=False, extra=extra, environment=environment,
            mem_fraction=None if part.cpu else 0.8, max_total_tokens=4096 if part.cpu else 100_000,
            cuda_graph_max_bs=None if part.cpu else 8, acceptance_floor=0.0 if self.own else 1.05,
            stall_seconds=1500.0 if part.cpu else 120.0,
            run_dir=part.work / f"{kind.replace(', ', '_').replace(' ', '_')}_tp{ranks}", **tree)


def launch(serve: Serve, kind: str, ranks: int, number: int) -> Launch:
    """Start a server; note which phases the view showed of each rank."""
    seen: dict[str, list[str]] = defaultdict(list)

    def listen(event: Event) -> None:
        for row in event.facts.get("ranks", ()):
            if row["phase"] not in seen[row["rank"]]:
                seen[row["rank"]].append(row["phase"])

    begun = time.monotonic()
    server = Server(serve.config(kind, ranks, number), print, listen).start()
    return Launch(kind, ranks, server, seen, time.monotonic() - begun)


def one_size(serve: Serve, ranks: int) -> None:
    """All servers of a number of ranks; the last with a draft then loses a rank while it serves."""
    kinds = ["target alone", "draft"]
    if not serve.part.cpu and (ranks > 1 or serve.part.sizes == [1]):
        kinds.insert(1, "draft, eyas attention")
    at_once = 1 if serve.part.cpu else len(kinds)
    for first in range(0, len(kinds), at_once):
        with ExitStack() as stack, ThreadPoolExecutor(at_once) as pool:
            starting = [(kind, pool.submit(launch, serve, kind, ranks, number))
                        for number, kind in enumerate(kinds[first:first + at_once])]
            launched = []
            for kind, future in starting:
                try:
                    launched.append(future.result())
                    stack.callback(launched[-1].server.stop)
                except EyasError as error:
                    words = str(error).replace(f"{serve.part.work}/", "")  # of no use on another machine
                    serve.part.check(f"starts ({kind})", ranks, words[-2000:], "READY", False)
            for this in launched:
                watched(serve, this)
                measured_one(serve, this)
            if ranks == serve.part.sizes[-1] > 1 and launched and launched[-1].kind == "draft":
                killed_serving(serve, launched[-1])


def watched(serve: Serve, this: Launch) -> None:
    """What the start showed of each rank, and what each rank's guard said."""
    part, names = serve.part, [f"tp{n}-pp0-dp0" for n in range(this.ranks)]
    part.check(f"the view follows every rank ({this.kind})", this.ranks, this.seen,
               f"{names}, each through some phase to {READY}",
               sorted(this.seen) == names and all(len(p) > 1 and p[-1] == READY for p in this.seen.values()))
    said = {name: [status.phase, *status.checks] for name, status in sorted(this.server.progress.ranks.items())}
    wanted = ["hooks", "weights", "vocabulary"] if this.kind != "target alone" else ["hooks"]
    part.check(f"every rank's guard has reported ({this.kind})", this.ranks, said,
               f"{names}, each {READY}, checked: {', '.join(wanted)}",
               sorted(said) == names and all(row[0] == READY and set(wanted) <= set(row[1:]) for row in said.values()))


def measured_one(serve: Serve, this: Launch) -> None:
    """Speed with several requests at a time; greedy tokens one at a time, compared with those of one rank alone."""
    part, config = serve.part, this.server.config
    bench = BenchConfig(**{**vars(config), "prompts": serve.questions, "max_new_tokens": serve.new_tokens,
                           "concurrency": 2 if part.cpu else 8})
    run = measure(this.server.client, serve.prompts, bench, this.name)
    reference = serve.answers.get("reference")
    row, answers = measured(this.server, serve.few, serve.new_tokens, reference)
    differing = row.pop("differing")
    part.number(ranks=this.ranks, server=this.kind, start_seconds=round(this.seconds, 1),
                first_acceptance_length=this.server.acceptance_length, concurrency=bench.concurrency,
                tokens_per_second=round(run.tokens_per_second, 1), one_at_a_time=row,
                acceptance_length=round(Acceptance.of(answer.histogram for answer in run.answers).length, 4))
    if reference is None:
        serve.answers["reference"] = answers
    else:
        same_tokens(serve, this.ranks, f"greedy tokens are those of one rank without a draft ({this.kind})", differing)
    if not part.cpu:
        attention(serve, this)


def same_tokens(serve: Serve, ranks: int, check: str, differing: list[dict[str, Any]]) -> None:
    """Identical, but for places where rounding decides between the best tokens."""
    tie = TIE[serve.part.dtype]
    serve.part.check(check, ranks, {"prompts": len(serve.few), "differ": differing},
                     f"identical, or differing first between tokens at most {tie} nats below the best",
                     all(row["gap_nats"] is not None and row["gap_nats"] <= tie for row in differing))


def attention(serve: Serve, this: Launch) -> None:
    """Long prompts: our attention (measured first) beside Triton's, both with the draft."""
    if this.kind == "target alone" or (this.ranks == 1 and len(serve.part.sizes) > 1):
        return
    prompts = long_prompts(serve.questions, serve.target, 4000, 4)
    key = f"eyas, TP {this.ranks}"
    row, answers = measured(this.server, prompts, serve.new_tokens, serve.answers.get(key))
    differing = row.pop("differing")
    serve.part.number(ranks=this.ranks, server=this.kind, prompt_tokens=[len(ids) for ids in prompts], **row)
    if this.kind.endswith("eyas attention"):
        serve.answers[key] = answers
    elif key in serve.answers:
        same_tokens(serve, this.ranks, "attention eyas and triton give the same tokens", differing)


def verdict_of(events: list[Event]) -> dict[str, Any]:
    """The facts of the verdict, if there was one."""
    return next((event.facts for event in events if event.kind == "verdict"), {})


def killed_serving(serve: Serve, this: Launch) -> None:
    """The last rank dies by SIGKILL while a request is in flight."""
    events: list[Event] = []
    this.server.listeners.append(events.append)
    victim = f"tp{this.ranks - 1}-pp0-dp0"

    def ask() -> None:
        with contextlib.suppress(EyasError):  # as it must
            this.server.client.generate(serve.few[0], 256, ignore_eos=True)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    time.sleep(0.5)
    os.kill(this.server.progress.ranks[victim].pid, signal.SIGKILL)
    judge(serve, this.ranks, "a rank killed while serving", victim, SERVING, this.server.watch, events)


def killed_loading(serve: Serve, ranks: int) -> None:
    """The last rank dies by SIGKILL as soon as it says that it loads weights."""
    events: list[Event] = []
    victim, config = f"tp{ranks - 1}-pp0-dp0", serve.config("target alone", ranks)
    assert config.run_dir is not None
    config = dataclasses.replace(config, run_dir=config.run_dir.with_name("killed_loading"))
    assert config.run_dir is not None
    status, over = config.run_dir / "ranks" / f"{victim}.json", threading.Event()

    def kill() -> None:
        while not over.wait(0.001):
            said = json.loads(status.read_text()) if status.is_file() else {}
            if said.get("phase") == LOADING:
                os.kill(said["pid"], signal.SIGKILL)
                return

    killer = threading.Thread(target=kill, daemon=True)
    killer.start()
    server = Server(config, print, events.append)
    try:
        judge(serve, ranks, "a rank killed while loading", victim, LOADING, server.start, events)
    finally:
        over.set()
        server.stop()


def judge(serve: Serve, ranks: int, check: str, victim: str, phase: str, wait: Any, events: list[Event]) -> None:
    """What the launcher makes of a rank's death."""
    begun, said = time.monotonic(), "no failure at all"
    try:
        wait()
    except EngineFailure as error:
        said = error.found
    facts = verdict_of(events)
    wanted = {"rank": victim, "cause": "killed", "phase": phase}
    found = {name: facts.get(name) for name in wanted}
    serve.part.check(check, ranks, {**found, "seconds": round(time.monotonic() - begun, 1), "said": said[:300]},
                     f"rank {victim}, cause killed, phase {phase}, and the message names the rank",
                     found == wanted and victim in said)


def main() -> None:
    """All sizes."""
    this = part("serve")
    serve = Serve(this)
    if serve.target != this.target:
        found = logits_differ(this.target, serve.target, serve.few[0])
        this.check("the padded target is the given one", 1, found, "relative difference of logits at most 1e-4, fp32",
                   found <= 1e-4)
    this.number(kv_heads=kv_heads(this.target), served_with=kv_heads(serve.target),
                draft="made from the target" if serve.own else "given")
    memory = [] if this.cpu else gpu_memory()
    for ranks in this.sizes:
        one_size(serve, ranks)
        this.nothing_left(ranks, "EYAS_STATUS_DIR", memory)
    most = this.sizes[-1]
    if most > 1:
        killed_loading(serve, most)
        this.nothing_left(most, "EYAS_STATUS_DIR", memory)
    else:
        for check in ("a rank killed while serving", "a rank killed while loading"):
            this.skip(check, 2, "the rank named", "one GPU")
    if this.cpu:
        this.skip("attention eyas and triton give the same tokens", most, "the same tokens", "no GPU")


if __name__ == "__main__":
    main()
