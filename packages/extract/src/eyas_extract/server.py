"""Talking to one running SGLang server over HTTP, standard library only: health, prefill of a shard, log-probabilities.

Also chat completions, which any OpenAI-compatible server answers.
"""

from __future__ import annotations

import http.client
import json
from collections.abc import Sequence
from typing import Any
from urllib.parse import urlsplit

from eyas_contract import EngineFailure, EyasError, InvalidInput


class ServerLost(EngineFailure):
    """A server that cannot be reached any more; what it was doing is to be done again."""


class Refused(EngineFailure):
    """An answer that is none: `status` is HTTP's."""

    def __init__(self, where: str, status: int, text: str) -> None:
        super().__init__(where, f"HTTP {status}: {text}", "an answer", "See the server's log.")
        self.status = status
        self.args = (where, status, text)  # what pickle calls __init__ with


class Server:
    """A server at a URL.

    Args:
        url: with or without a path, e.g. `http://host:30000/v1`.
        timeout: seconds without an answer after which a request is given up.

    Raises:
        InvalidInput: no http(s) URL.
    """

    def __init__(self, url: str, timeout: float = 1800.0, api_key: str = "") -> None:
        try:
            parts = urlsplit(url)
            good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
        except ValueError:  # no such port, or half an IPv6 address
            good = False
        if not good:
            raise InvalidInput("server", repr(url), "a URL such as http://127.0.0.1:30000", "Correct it.")
        self.url, self.timeout, self.parts, self.api_key = url.rstrip("/"), timeout, parts, api_key

    def healthy(self) -> bool:
        """Whether it answers its health check now."""
        try:
            return self._send("GET", "/health", None, 5.0)[0] == 200
        except EyasError:
            return False

    def prefill(self, input_ids: Sequence[Sequence[int]], request_ids: Sequence[str]) -> None:
        """Compute the prompts' states and nothing else.

        Each prompt is a room of its own in the prefix cache, so that none is spared the rows of another.

        Raises:
            ServerLost: it cannot be reached.
            Refused: it answers, but with an error.
        """
        self.post("/generate", {"input_ids": [list(ids) for ids in input_ids], "rid": list(request_ids),
                                "extra_key": list(request_ids),
                                "sampling_params": {"temperature": 0, "max_new_tokens": 0}})

    def logprobs(self, input_ids: Sequence[int], request_id: str) -> list[float]:
        """Log-probability of tokens 1, 2, ... of a prompt, as the engine itself computes it."""
        plain = self.post("/generate", {
            "input_ids": list(input_ids), "rid": request_id, "return_logprob": True, "logprob_start_len": 0,
            "sampling_params": {"temperature": 0, "max_new_tokens": 1}})
        return [float(entry[0]) for entry in plain["meta_info"]["input_token_logprobs"][1:]]

    def post(self, path: str, body: Any) -> Any:
        """The JSON answer to a JSON body. Raises as `prefill` does."""
        status, raw = self._send("POST", path, json.dumps(body).encode("ascii"), self.timeout)
        if status != 200:
            raise Refused(f"{self.url}{path}", status, raw[:500].decode("utf-8", "replace"))
        try:
            return json.loads(raw)
        except ValueError as error:
            raise ServerLost(f"{self.url}{path}", f"no JSON: {raw[:200].decode('utf-8', 'replace')!r}",
                             "an answer in JSON", "See whether this is the server's URL.") from error

    def _send(self, method: str, path: str, body: bytes | None, timeout: float) -> tuple[int, bytes]:
        kind = http.client.HTTPSConnection if self.parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self.parts.hostname or "", self.parts.port, timeout=timeout)
        headers = {"Content-Type": "application/json"} | (
            {"Authorization": f"Bearer {self.api_key}"} if self.api_key else {})
        try:
            connection.request(method, self.parts.path.rstrip("/") + path, body, headers)
            response = connection.getresponse()
            return response.status, response.read()
        except (OSError, http.client.HTTPException) as error:
            raise ServerLost(self.url, f"{type(error).__name__}: {error}", "a server that answers",
                             "Check that it runs; see its log.") from error
        finally:
            connection.close()
