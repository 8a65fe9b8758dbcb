"""SGLang for `train_h200.py`: servers in processes of their own, and what they are asked."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Any

from eyas_serve.acceptance import Acceptance

# As in the baseline that is compared with.
FLAGS = ["--attention-backend", "triton", "--sampling-backend", "pytorch", "--grammar-backend", "none",
         "--disable-prefill-cuda-graph"]


class Engine:
    """One SGLang server; use as a context manager, then `ready`."""

    def __init__(self, model: Path, port: int, log: Path, *flags: str, python: str = sys.executable,
                 device: str = "cuda") -> None:
        self.url, self.log = f"http://127.0.0.1:{port}", log
        words = [python, "-m", "sglang.launch_server" if device == "cuda" else "eyas_serve.engine.main", "--model-path",
                 str(model), "--host", "127.0.0.1", "--port", str(port), *flags]
        if device == "cuda":
            words += FLAGS
        else:
            words += ["--device", "cpu", "--dtype", "float32", "--prefill-attention-backend", "intel_amx",
                      "--decode-attention-backend", "intel_amx", "--skip-server-warmup", "--mem-fraction-static",
                      "0.3", "--max-total-tokens", "4096", "--max-running-requests", "8"]
        environment = {**os.environ, "OMP_NUM_THREADS": "4" if device == "cuda" else "1"}
        with log.open("w") as sink:
            self.process = subprocess.Popen(words, stdout=sink, stderr=subprocess.STDOUT, start_new_session=True,
                                            env=environment)

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(self.process.pid, number)
            except ProcessLookupError:
                break
            time.sleep(2)
        self.process.wait()

    def ready(self, seconds: float = 240) -> None:
        """Wait until it answers; RuntimeError with its last words where it does not."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and self.process.poll() is None:
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=5):
                    return
            except OSError:
                time.sleep(0.5)
        raise RuntimeError(f"no server at {self.url}:\n" + "\n".join(self.log.read_text().splitlines()[-25:]))

    def generate(self, prompts: list[list[int]], **sampling: Any) -> list[dict[str, Any]]:
        """Continue all prompts in one request."""
        asked = prompts[0] if len(prompts) == 1 else prompts
        body = json.dumps({"input_ids": asked, "sampling_params": sampling}).encode()
        request = urllib.request.Request(self.url + "/generate", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=600) as answer:
            reply = json.loads(answer.read())
        return [reply] if isinstance(reply, dict) else list(reply)


def answer_all(engines: list[Engine], prompts: list[list[int]], *, at_once: int = 256, deadline: float = 1e18,
               **sampling: Any) -> dict[int, list[int]]:
    """Output ids by number of prompt; requests not begun at the deadline (monotonic seconds), or lost, are left out."""
    def ask(number: int) -> list[tuple[int, list[int]]]:
        if time.monotonic() > deadline:
            return []
        part = prompts[number * at_once:(number + 1) * at_once]
        try:
            replies = engines[number % len(engines)].generate(part, **sampling)
        except OSError as error:
            print(f"{len(part)} prompts lost: {error}", flush=True)
            return []
        return [(number * at_once + i, reply["output_ids"]) for i, reply in enumerate(replies)]
    with ThreadPoolExecutor(4 * len(engines)) as pool:
        return dict(pair for pairs in pool.map(ask, range(-(-len(prompts) // at_once))) for pair in pairs)


def measure(engine: Engine, prompts: list[list[int]], concurrency: int, max_new_tokens: int) -> dict[str, Any]:
    """Acceptance length and speed over greedy answers, `concurrency` at a time, after a warm-up."""
    def ask(prompt: list[int]) -> dict[str, Any]:
        return engine.generate([prompt], temperature=0, max_new_tokens=max_new_tokens)[0]
    with ThreadPoolExecutor(concurrency) as pool:
        list(pool.map(ask, prompts[:concurrency + 2]))
        start = time.monotonic()
        replies = list(pool.map(ask, prompts))
        seconds = time.monotonic() - start
    names = ("spec_correct_drafts_histogram", "spec_accept_histogram")
    histograms = [next((r["meta_info"][n] for n in names if n in r["meta_info"]), ()) for r in replies]
    found = Acceptance.of(histograms)
    tokens = sum(len(r["output_ids"]) for r in replies)
    return {"prompts": len(prompts), "concurrency": concurrency, "acceptance_length": round(found.length, 4),
            "rounds": found.rounds, "histogram": list(found.histogram), "tokens": tokens,
            "conditional_rates": [round(r, 4) for r in found.conditional_rates()],
            "seconds": round(seconds, 3), "tokens_per_second": round(tokens / seconds, 1)}
