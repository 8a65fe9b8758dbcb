"""The fake engine's HTTP side: health, /generate whole or streamed, Prometheus metrics, an API key if one was given."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

OUTPUTS = os.environ.get("FAKE_OUTPUTS", "same")
HISTOGRAM = [2, 1, 0, 1]
COUNTS = {"tokens": 0, "rounds": 0, "requests": 0}
PLAN: dict[str, Any] = {}


def api_key() -> str:
    if "--config" not in sys.argv:
        return ""
    if not hasattr(api_key, "value"):
        text = Path(sys.argv[sys.argv.index("--config") + 1]).read_text()
        api_key.value = json.loads(text)["api-key"]  # type: ignore[attr-defined]
    return str(api_key.value)  # type: ignore[attr-defined]


def server_info() -> dict[str, Any]:
    """As SGLang's: with a draft 48 requests run at a time, unless told."""
    told = [sys.argv[i + 1] for i, word in enumerate(sys.argv) if word == "--max-running-requests"]
    room = int(told[-1]) if told else 48 if "--speculative-algorithm" in sys.argv else 4096
    tree = {name: value for name, value in (("speculative_num_steps", 5), ("speculative_eagle_topk", 8),
                                            ("speculative_num_draft_tokens", 32)) if PLAN.get("tells")}
    return {"version": "0.5.20", **tree, "internal_states": [{"effective_max_running_requests_per_dp": room}]}


def histogram() -> list[int]:
    """Of the answer at hand: the plan's, or the plan's for each answer in turn."""
    planned = PLAN.get("histogram", HISTOGRAM)
    return planned[min(COUNTS["requests"], len(planned)) - 1] if isinstance(planned[0], list) else planned


def died() -> Path:
    """Where the time of a scripted death is written down."""
    return Path(os.environ["EYAS_STATUS_DIR"]).parent / "died"


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/metrics":
            self.send(metrics().encode())
        elif self.path == "/health" or self.allowed():
            self.send(json.dumps(server_info() if self.path == "/server_info" else {}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if not self.allowed():
            return
        COUNTS["requests"] += 1
        if PLAN.get("hold") == "warm-up" or COUNTS["requests"] > PLAN.get("answers", COUNTS["requests"]):
            time.sleep(60)
        if (PLAN.get("die") or {}).get("in") == "warm-up":
            died().write_text(str(time.time()))
            os.kill(os.getpid(), signal.SIGKILL)
        count, drafting = body["sampling_params"]["max_new_tokens"], "--speculative-algorithm" in sys.argv
        ids = [(sum(body["input_ids"]) + i) % 50 for i in range(count)]
        if OUTPUTS == "differ" and drafting and count > 8:
            ids[5] += 1
        meta: dict[str, Any] = {"finish_reason": {"type": "length"}, "completion_tokens": count}
        if drafting:
            meta["spec_correct_drafts_histogram"] = histogram()
            COUNTS["rounds"] += sum(meta["spec_correct_drafts_histogram"])
        COUNTS["tokens"] += count
        whole = {"output_ids": ids, "meta_info": meta}
        if body.get("stream"):
            parts = [{"output_ids": ids[:n], "meta_info": {"finish_reason": None}} for n in range(1, count, 3)]
            self.send(b"".join(b"data: " + json.dumps(part).encode() + b"\n\n" for part in [*parts, whole])
                      + b"data: [DONE]\n\n", "text/event-stream")
        else:
            self.send(json.dumps(whole).encode())

    def allowed(self) -> bool:
        if not api_key() or self.headers.get("authorization") == f"Bearer {api_key()}":
            return True
        self.send_response(401)
        self.end_headers()
        return False

    def send(self, data: bytes, kind: str = "application/json") -> None:
        self.send_response(200)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


def metrics() -> str:
    length = 1 + sum(k * n for k, n in enumerate(histogram())) / 4
    labels = '{engine_type="unified",model_name="x",tp_rank="0"}'
    return ("# HELP sglang:generation_tokens_total Number of generation tokens processed.\n"
            "# TYPE sglang:generation_tokens_total counter\n"
            f"sglang:generation_tokens_total{labels} {COUNTS['tokens']}.0\n"
            f"sglang:spec_verify_calls_total{labels} {COUNTS['rounds']}.0\nsglang:spec_accept_length{labels} {length}\n"
            f"sglang:num_running_reqs{labels} 0.0\nsglang:num_queue_reqs{labels} 0.0\n"
            f"sglang:num_requests_total{labels} {COUNTS['requests']}.0\nsglang:token_usage{labels} 0.25\n")


class QuietServer(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 256

    def handle_error(self, request: Any, client_address: Any) -> None:
        pass


def serve(port: int, plan: dict[str, Any]) -> None:
    PLAN.update(plan)
    api_key()
    QuietServer(("127.0.0.1", port), Handler).serve_forever()
