"""An engine that captures, without SGLang: HTTP in front, Hugging Face computes, the plug-in's own ring and sink write.

In a thread of the test, or as a process of its own that can be killed:
    python fake_capture.py TARGET ROOT PORT [--die-after N]
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch

from eyas_contract import EngineFailure
from eyas_extract.capture import Capture
from eyas_extract.inside.ring import Ring
from eyas_extract.inside.sink import Piece
from eyas_extract.protocol import Captor, CaptureSettings, Mark
from eyas_extract.target import load_target

AUX = (1, 3, 4)
Fault = Callable[[Piece, list[torch.Tensor]], list[Piece]]


class FakeEngine:
    """Serves until closed.

    Args:
        target: folder of the model.
        root: below which it writes.
        fault: changes what is captured of a piece.
        chunk: rows of one forward pass, as with chunked prefill.
        positions: as SGLang does, it refuses a request of as many tokens, and computes those before it in its batch.
    """

    def __init__(self, target: Path, root: Path, *, fault: Fault | None = None, chunk: int = 50, port: int = 0,
                 die_after: int = 0, store_dtype: str = "F32", aux: tuple[int, ...] = AUX,
                 positions: int = 512) -> None:
        self.capture = Capture(load_target(target, "cpu"), aux)
        captor = Captor("0.0.0", "FakeForCausalLM", aux, 64, "F32", store_dtype, str(root), "tp0-dp0", "")
        settings = CaptureSettings(aux, str(root), str(root), store_dtype, slot_mib=0, slots=3, threads=2)
        self.ring = Ring(settings, captor, "cpu", lambda: "layers proved")
        self.fault, self.chunk, self.die_after = fault, chunk, die_after
        self.positions = positions
        self.seen = 0
        self.silent = False
        self.lock = threading.Lock()
        self.http = ThreadingHTTPServer(("127.0.0.1", port), _handler(self))
        self.url = f"http://127.0.0.1:{self.http.server_address[1]}"
        self.thread = threading.Thread(target=self.http.serve_forever, daemon=True)
        self.thread.start()

    def close(self) -> None:
        """Stop serving."""
        self.http.shutdown()
        self.http.server_close()
        self.ring.close()

    def generate(self, body: dict[str, Any]) -> Any:
        """What `/generate` answers."""
        many = isinstance(body["rid"], list)
        prompts = body["input_ids"] if many else [body["input_ids"]]
        answers = [self._one(ids, rid) for ids, rid in
                   zip(prompts, body["rid"] if many else [body["rid"]], strict=True)]
        return answers if many else answers[0]

    def _one(self, ids: list[int], request_id: str) -> Any:
        if len(ids) >= self.positions:
            raise ValueError(f"The input ({len(ids)} tokens) is longer than the model's context length")
        with self.lock, torch.inference_mode(), self.capture:
            self.seen += 1
            if self.die_after and self.seen > self.die_after:
                os.kill(os.getpid(), signal.SIGKILL)
            states = self.capture.states([ids])
            rows = [state[0] for state in (*states.aux, states.last)]
            target = self.capture.target
            logits = target.head(target.norm(states.last))[0].log_softmax(-1)
            mark = Mark.parse(request_id)
            if mark is not None and not self.silent:
                for start in range(0, len(ids), self.chunk):
                    piece = Piece(mark, start, start, min(self.chunk, len(ids) - start))
                    try:
                        self.ring.take(rows, self.fault(piece, rows) if self.fault else [piece])
                    except EngineFailure:
                        os._exit(1)  # as SGLang ends its whole tree
        logprobs = [[None, ids[0], None], *([float(logits[t, token]), token, None]
                                            for t, token in enumerate(ids[1:]))]
        return {"meta_info": {"input_token_logprobs": logprobs}}


def _handler(engine: FakeEngine) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer({})

        def do_POST(self) -> None:
            try:
                self._answer(engine.generate(json.loads(self.rfile.read(int(self.headers["Content-Length"])))))
            except ValueError as error:
                self._answer({"error": {"message": str(error)}}, 400)

        def _answer(self, plain: Any, status: int = 200) -> None:
            raw = json.dumps(plain).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(raw)))
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *arguments: Any) -> None:
            pass

    return Handler


if __name__ == "__main__":
    torch.set_num_threads(1)
    last = int(sys.argv[sys.argv.index("--die-after") + 1]) if "--die-after" in sys.argv else 0
    running = FakeEngine(Path(sys.argv[1]), Path(sys.argv[2]), port=int(sys.argv[3]), die_after=last)
    print(running.url, flush=True)
    running.thread.join()
