"""One target and draft served by SGLang with different attention backends: the same long prompts, side by side.

    python benchmarks/serve_attention.py --target T --draft D --prompts P.jsonl --contexts 7500 --out OUT.json
    python benchmarks/serve_attention.py --random mla64 --tokenizer T --contexts 8192 65000 --together --out OUT.json

Each backend is one server, with the same tree, that answers all prompts: of a file, joined up to the wanted length, or
random tokens for a model of random weights (`random_models.py`, written first). Printed for each context: tokens/s,
acceptance length, milliseconds a round, the GPU's milliseconds a round in the target's verification, the draft's steps
and its extension, and how many outputs equal those of the first backend. Where two differ, the server at hand is asked
how far below its best token the two lie at that place: the near tie that was decided otherwise. With --at-a-time N all
prompts are then asked N at a time, for their tokens/s and acceptance length together. A backend may be two, as in
eyas+flashinfer: the second for prompts. One that cannot serve the model is a row with its words. With --together all
servers start at once, and are measured one at a time. The servers' logs are kept beside OUT.json.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import shlex
import shutil
import tempfile
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
from host import expose_plugin
from random_models import random_pair, random_prompts

from eyas_contract.contract import write_text_atomic
from eyas_serve.acceptance import Acceptance
from eyas_serve.client import Client, Generation
from eyas_serve.config import BenchConfig, ServeConfig
from eyas_serve.measure import Run, measure
from eyas_serve.prompts import Prompt, load_prompts
from eyas_serve.server import Server
from eyas_serve.watch import parse

Prompts = list[list[int]]
CANDIDATES = 8  # best tokens that are looked at where two answers part: more than two may be within a rounding
EXECUTION = re.compile(r'^sglang:forward_execution_seconds_total\{.*category="(\w+)".*\} (\S+)$', re.MULTILINE)
PARTS = {"target_verify": "verify", "eagle_draft": "draft_steps", "eagle_draft_extend": "draft_extension"}


def long_prompts(path: Path, target: Path, context: int, count: int) -> Prompts:
    """`count` prompts of `context` tokens, the file's prompts joined; each ends with a whole prompt."""
    parts = [list(prompt.input_ids) for prompt in load_prompts(path, target, None)]
    result = []
    for i in range(count):
        ids: list[int] = []
        for j in range(i, i + len(parts) * 100):
            part = parts[j % len(parts)]
            if len(ids) + len(part) > context:
                break
            ids += part
        result.append(ids)
    return result


def backend_flags(backend: str) -> list[str]:
    """SGLang's for one name, or for two: `eyas+flashinfer` decodes and verifies with eyas, prompts with FlashInfer."""
    decode, _, prompts = backend.partition("+")
    if not prompts:
        return ["--attention-backend", decode]
    return ["--decode-attention-backend", decode, "--prefill-attention-backend", prompts,
            "--speculative-attention-mode", "decode"]


def make_server(options: argparse.Namespace, backend: str) -> Server:
    """A server with this backend; not yet started."""
    flags, longest = [*backend_flags(backend), "--page-size", "1"], max(options.contexts)
    scale: dict[str, Any] = {}
    if options.random:  # one prompt is one chunk: over MLA, Triton's attention to a cached prefix takes far longer
        scale = {"max_total_tokens": options.count * sum(options.contexts) + 16384, "mem_fraction": 0.8,
                 "cuda_graph_max_bs": max(2, options.at_a_time), "max_running_requests": max(2, options.at_a_time)}
        flags += ["--chunked-prefill-size", str(longest + 1024), "--max-prefill-tokens", str(longest + 1024)]
    config = ServeConfig(target=options.target, draft=options.draft, dtype="bfloat16", port=0, steps=options.steps,
                         topk=options.topk, num_draft_tokens=options.num_draft_tokens, radix_cache=bool(options.random),
                         preflight=False, acceptance_floor=0.0 if options.random else 1.05,
                         environment={"SGLANG_ENABLE_METRICS_DEVICE_TIMER": "1"}, run_dir=options.work / backend,
                         extra=shlex.join([*flags, *shlex.split(options.extra)]), **scale)
    return Server(config, lambda text: print(f"[{backend}] {text}", flush=True))


@dataclass(frozen=True)
class Counted:
    """What a server has counted so far.

    Attributes:
        seconds: of the GPU in each part of a round; empty where the server does not time them.
        tokens: generated.
    """

    seconds: dict[str, float]
    tokens: float

    @classmethod
    def of(cls, client: Client) -> Counted:
        """By its metrics; nothing where it has none."""
        status, content = client.get("/metrics")
        if status != 200:
            return cls({}, 0.0)
        text = content.decode()
        found = dict(EXECUTION.findall(text))
        return cls({name: float(found[part]) for part, name in PARTS.items() if part in found}, parse(text, 0.0).tokens)

    def milliseconds_since(self, before: Counted, per: float) -> dict[str, float]:
        """The GPU's for each one of `per` things; empty without any."""
        return {name: round(1e3 * (seconds - before.seconds.get(name, 0.0)) / per, 3)
                for name, seconds in self.seconds.items() if per}


def measured(server: Server, prompts: Prompts, max_new_tokens: int,
             reference: list[Generation] | None) -> tuple[dict[str, Any], list[Generation]]:
    """All prompts through a running server, one at a time, greedy; compared with the reference's answers.

    Each is asked thrice: for one token; for one again, which takes as long as the answer's own prompt pass will, be it
    read from the cache or not; and for the answer.
    """
    server.client.generate(prompts[0][:1024][::-1], max_new_tokens, ignore_eos=True)
    first = [server.client.generate(ids, 1, ignore_eos=True).seconds for ids in prompts]
    again = [server.client.generate(ids, 1, ignore_eos=True).seconds for ids in prompts]
    before = Counted.of(server.client)
    answers = [server.client.generate(ids, max_new_tokens, ignore_eos=True) for ids in prompts]
    after = Counted.of(server.client)
    gaps = near_ties(server.url, prompts, answers, reference) if reference else []
    seconds = sum(answer.seconds for answer in answers) - sum(again)
    acceptance = Acceptance.of(answer.histogram for answer in answers)
    tokens = sum(len(answer.output_ids) - 1 for answer in answers)
    return {"decode_tokens_per_second": round(tokens / seconds, 2),
            "prompt_seconds": round(sum(first), 3), "acceptance_length": round(acceptance.length, 4),
            "milliseconds_a_round": round(1e3 * seconds * acceptance.length / tokens, 3),
            "gpu_milliseconds_a_round": after.milliseconds_since(before, acceptance.rounds),
            "differing": gaps}, answers


def measured_at_once(client: Client, prompts: Prompts, at_a_time: int, answers: list[Generation]) -> dict[str, Any]:
    """All prompts with `at_a_time` of them in flight, after a warm-up: tokens/s together, prompts included, and the
    seconds that the prompts alone take; the GPU's milliseconds a token in each part (the warm-up's counted too), and
    how many answers begin as those given one at a time."""
    asked = [Prompt(str(i), tuple(ids)) for i, ids in enumerate(prompts)]
    settings = BenchConfig(target=Path(), prompts=Path(), concurrency=at_a_time, stream=False)

    def run(tokens: int) -> Run:
        return measure(client, asked, replace(settings, max_new_tokens=tokens), f"{at_a_time} at a time")

    before, whole, after = Counted.of(client), run(len(answers[0].output_ids)), Counted.of(client)
    same = sum(one.output_ids[:len(many.output_ids)] == many.output_ids
               for one, many in zip(answers, whole.answers, strict=True))
    return {"at_a_time": at_a_time, "identical": same, "tokens": whole.tokens,
            "tokens_per_second": round(whole.tokens_per_second, 2), "prompt_seconds": round(run(1).seconds, 3),
            "acceptance_length": round(Acceptance.of(answer.histogram for answer in whole.answers).length, 4),
            "gpu_milliseconds_a_token": after.milliseconds_since(before, after.tokens - before.tokens)}


def near_ties(url: str, prompts: Prompts, answers: list[Generation],
              reference: list[Generation]) -> list[dict[str, Any]]:
    """For each answer that differs from the reference's: where, and the gap: how far the farther of the two tokens lies
    below this server's best one there, in nats; None where either is not among its `CANDIDATES` best."""
    found = []
    for i, (ids, ours, theirs) in enumerate(zip(prompts, answers, reference, strict=True)):
        pairs = zip(ours.output_ids, theirs.output_ids, strict=True)
        at = next((k for k, (a, b) in enumerate(pairs) if a != b), None)
        if at is None:
            continue
        body = {"input_ids": ids + list(ours.output_ids[:at]), "return_logprob": True, "top_logprobs_num": CANDIDATES,
                "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
        meta = httpx.post(f"{url}/generate", json=body, timeout=300, trust_env=False).json()["meta_info"]
        scores = {token: score for score, token, *_ in meta["output_top_logprobs"][0]}
        two = [scores.get(answer.output_ids[at], -math.inf) for answer in (ours, theirs)]
        gap = max(scores.values()) - min(two)
        found.append({"prompt": i, "token": at, "gap_nats": round(gap, 4) if math.isfinite(gap) else None})
    return found


class Comparison:
    """The rows so far, written after each of them, and the answers of the first backend that gave any."""

    def __init__(self, options: argparse.Namespace, prompts: dict[int, Prompts]) -> None:
        self.out, self.prompts, self.new_tokens = options.out, prompts, options.max_new_tokens
        self.at_a_time: int = options.at_a_time
        self.reference: dict[int, list[Generation]] = {}
        settings = {key: value.name if isinstance(value, Path) else value for key, value in vars(options).items()
                    if key not in ("out", "work")}
        self.result: dict[str, Any] = {"settings": settings, "rows": [], "prompt_tokens": {
            context: [len(ids) for ids in rows] for context, rows in prompts.items()}}

    def add(self, row: dict[str, Any]) -> None:
        """Keep a row and print it."""
        self.result["rows"].append(row)
        write_text_atomic(self.out, json.dumps(self.result, indent=1) + "\n")
        print(json.dumps(row), flush=True)

    def measure(self, backend: str, server: Server, starting: list[str]) -> None:
        """All contexts through one server; `starting` names the servers that were still busy starting."""
        for context, prompts in self.prompts.items():
            row: dict[str, Any] = {"backend": backend, "context": context, **({"beside": starting} if starting else {})}
            try:
                found, answers = measured(server, prompts, self.new_tokens, self.reference.get(context))
                if self.at_a_time > 1:
                    found["at_once"] = measured_at_once(server.client, prompts, self.at_a_time, answers)
            except Exception as error:  # other contexts and backends go on
                self.add(row | {"error": f"{type(error).__name__}: {error}"[-2000:]})
                continue
            reference = self.reference.setdefault(context, answers)
            same = sum(ours.output_ids == theirs.output_ids for ours, theirs in zip(answers, reference, strict=True))
            self.add(row | found | {"identical": same, "of": len(answers)})


def compare(options: argparse.Namespace, comparison: Comparison) -> None:
    """Serve with each backend; started all at once, or one after the other."""
    servers = {backend: make_server(options, backend) for backend in options.backends}
    with ThreadPoolExecutor(len(servers)) as pool:
        begun = time.monotonic()
        starting = {name: pool.submit(server.start) for name, server in servers.items()} if options.together else {}
        for backend, server in servers.items():
            begun = begun if options.together else time.monotonic()
            start: Future[Server] = starting.get(backend) or pool.submit(server.start)
            try:
                start.result(max(options.start_limit - (time.monotonic() - begun), 1.0))
                comparison.measure(backend, server, [name for name, other in starting.items() if not other.done()])
            except Exception as error:  # a backend that cannot serve this is a result; the others go on
                text = str(error)[-2000:] or f"{type(error).__name__} after {time.monotonic() - begun:.0f} s"
                comparison.add({"backend": backend, "error": text})
            finally:
                server.stop(grace=0.0)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("target", "draft", "prompts", "tokenizer", "work"):
        parser.add_argument(f"--{name}", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--random", choices=("gqa64", "mla64"), help="write such a model; needs --tokenizer")
    parser.add_argument("--draft-kind", choices=("gqa64", "mla64"), default="", help="the draft's; else the target's")
    parser.add_argument("--contexts", "--context", type=int, nargs="+", default=[7500])
    for name, default in (("layers", 5), ("count", 8), ("max-new-tokens", 192), ("steps", 3), ("topk", 4),
                          ("num-draft-tokens", 16), ("start-limit", 240), ("at-a-time", 1)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--backends", nargs="+", default=["triton", "eyas", "flashinfer"])
    parser.add_argument("--together", action="store_true")
    parser.add_argument("--extra", default="")
    options = parser.parse_args()
    wanted = ("tokenizer",) if options.random else ("target", "draft", "prompts")
    if missing := [f"--{name}" for name in wanted if getattr(options, name) is None]:
        parser.error(f"{', '.join(missing)} missing")
    return options


def main() -> None:
    """Command line."""
    options = parsed()
    options.work = Path(tempfile.mkdtemp(prefix="eyas-attention-", dir=options.work))
    expose_plugin(options.work / "entry", "eyas-serve")
    if options.random:
        options.target, options.draft = random_pair(options.random, options.work, options.tokenizer, options.layers,
                                                    options.draft_kind)
        prompts = {context: random_prompts(options.target, context, options.count) for context in options.contexts}
    else:
        prompts = {context: long_prompts(options.prompts, options.target, context, options.count)
                   for context in options.contexts}
    logs = options.out.with_suffix("")
    try:
        compare(options, Comparison(options, prompts))
    finally:
        for log in options.work.glob("*/server.log"):
            shutil.copy(log, f"{logs}-{log.parent.name}.log")
        shutil.rmtree(options.work, ignore_errors=True)


if __name__ == "__main__":
    main()
