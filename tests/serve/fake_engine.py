"""A scripted stand-in for an engine's interpreter: SGLang's log lines, ranks' status files and HTTP answers, no model.

Run as `fake -c <probe>` it says what is installed; as `fake -m eyas_serve.engine.main <flags>` it plays FAKE_SCENARIO:
`ok`, `slow` (loads for 2.5 s with progress), `stall` (loads and stops), `dies`, `floods` (20 MB of garbage, then dies),
`refuses` (as the guard does), `silent` (up without a handshake), `half` (one of two ranks), `unplugged`, `stubborn`
(a grandchild that ignores SIGTERM).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

OUTPUTS = os.environ.get("FAKE_OUTPUTS", "same")


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def status(rank: int, phase: str, **more: object) -> None:
    folder = Path(os.environ["EYAS_STATUS_DIR"])
    path = folder / f"tp{rank}-pp0-dp0.json"
    temporary = folder / f"{rank}.tmp"
    temporary.write_text(json.dumps({"rank": path.stem, "pid": os.getpid(), "phase": phase, **more}))
    temporary.replace(path)


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer({"version": "0.5.20"} if self.path == "/server_info" else {})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        count, drafting = body["sampling_params"]["max_new_tokens"], "--speculative-algorithm" in sys.argv
        ids = [(sum(body["input_ids"]) + i) % 50 for i in range(count)]
        if OUTPUTS == "differ" and drafting and count > 8:
            ids[5] += 1
        meta = {"finish_reason": {"type": "length"}}
        if drafting:
            meta["spec_correct_drafts_histogram"] = [2, 1, 0, 1]
        self.answer({"output_ids": ids, "meta_info": meta})

    def answer(self, value: object) -> None:
        data = json.dumps(value).encode()
        self.send_response(200)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: object) -> None:
        pass


def load(seconds: float) -> None:
    say("[2026-01-01 00:00:00] Load weight begin. avail mem=1 GB")
    for step in range(11):
        status(0, "loading target weights", done=step * 10 << 20, total=100 << 20)
        time.sleep(seconds / 11)
    say("[2026-01-01 00:00:00] Load weight end.")


def serve(port: int) -> None:
    say("INFO:     Application startup complete.")
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()


def crash() -> None:
    say("[2026-01-01 00:00:00 TP5] Scheduler hit an exception: Traceback (most recent call last):\n"
        '  File "x.py", line 1, in load\nRuntimeError: rank 5 lost its disk\n\n'
        "[2026-01-01 00:00:00 TP0] Scheduler hit an exception: Traceback (most recent call last):\n"
        "ConnectionError: peer closed\n")
    os.kill(os.getpid(), signal.SIGKILL)


def play(scenario: str, port: int) -> None:
    if scenario == "unplugged":
        say("[2026-01-01 00:00:00] Failed to load plugin eyas_serve from group sglang.srt.plugins")
        time.sleep(60)
    if scenario == "silent":
        serve(port)
    status(0, "starting")
    load(2.5 if scenario == "slow" else 0.1)
    if scenario == "stall":
        time.sleep(60)
    if scenario == "floods":
        sys.stdout.flush()
        os.write(1, os.urandom(20 << 20))
        say("")
    if scenario in ("dies", "floods"):
        crash()
    if scenario == "refuses":
        status(0, "loading draft weights", error="draft checkpoint: SGLang drops decoder_layers.0.x. Wanted: y. Do z.")
        say("eyas_contract.errors.EngineFailure: draft checkpoint: SGLang drops decoder_layers.0.x. Wanted: y. Do z.")
        sys.exit(1)
    if scenario == "stubborn":
        subprocess.Popen([sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
                          "print('grandchild', flush=True); time.sleep(60)"])
    status(0, "ready", expected=2 if scenario == "half" else 1)
    serve(port)


if __name__ == "__main__":
    if sys.argv[1] == "-c":
        say(json.dumps({"sglang": "0.5.20", "torch": "2.13.0", "eyas-native": "0.1.0", "plugin": True}))
    else:
        assert sys.argv[1:3] == ["-m", "eyas_serve.engine.main"], sys.argv
        play(os.environ.get("FAKE_SCENARIO", "ok"), int(sys.argv[sys.argv.index("--port") + 1]))
