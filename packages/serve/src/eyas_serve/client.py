"""Talking to a running SGLang server: tokens in, tokens and speculation counts out."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import httpx

from eyas_contract import EngineFailure, InvalidInput

CLOSING = 3.0  # seconds for the connections to close
HISTOGRAMS = ("spec_correct_drafts_histogram", "spec_accept_histogram")  # newest name first


@dataclass(frozen=True)
class Generation:
    """One answer.

    Attributes:
        output_ids: generated tokens.
        histogram: histogram[k] = rounds in which k draft tokens were accepted (bonus excluded); empty without a draft.
        seconds: from request to answer.
        finish: `stop` or `length`.
        first: seconds to the first token; None where the answer came whole.
    """

    output_ids: tuple[int, ...]
    histogram: tuple[int, ...]
    seconds: float
    finish: str
    first: float | None = None


class Client:
    """A server at a URL. Greedy requests by token ids, so that no tokenizer stands between two servers' outputs.

    Attributes:
        look: whoever waits for answers calls this meanwhile; it raises where the server is known to be dead, which a
            request in flight may not notice before its timeout.

    Raises:
        InvalidInput: a key that no HTTP header can hold, or no URL.
    """

    def __init__(self, url: str, timeout: float = 600.0, api_key: str = "",
                 look: Callable[[], None] = lambda: None) -> None:
        self.url, self.look, api_key = url.rstrip("/"), look, api_key.strip()
        if not api_key.isascii() or len(api_key.split()) > 1:  # httpx's own complaint would show it
            raise InvalidInput("API key", "spaces within it, or letters beyond ASCII", "one word, by HTTP",
                               "Check the file or the variable that holds it.")
        # Explicit transport: proxies of the environment have no business with a server on this machine.
        try:
            self._http = httpx.Client(base_url=self.url, timeout=timeout, transport=httpx.HTTPTransport(
                limits=httpx.Limits(max_connections=None)),
                headers={"Authorization": f"Bearer {api_key}"} if api_key else None)
        except httpx.InvalidURL as error:
            raise InvalidInput(url, str(error), "a server's address, e.g. http://127.0.0.1:30000",
                               "Correct the URL.") from error

    def close(self) -> None:
        """Close the connections.

        A signal's exception can strike a request within the pool's lock, which is then never given back: closing waits
        for it in a thread of its own, and not for ever, so that a launcher told to end does end.
        """
        closing = threading.Thread(target=self._http.close, daemon=True)
        closing.start()
        closing.join(CLOSING)

    def healthy(self) -> bool:
        """Whether the server answers its health check now."""
        try:
            return self._http.get("/health", timeout=5.0).status_code == 200
        except httpx.HTTPError:
            return False

    def info(self) -> dict[str, Any]:
        """`/server_info`; before 0.5.20 under its older name."""
        for path in ("/server_info", "/get_server_info"):
            response = self._send("GET", path)
            if response.status_code == 200:
                return self._plain(response)
        raise EngineFailure(self.url, f"HTTP {response.status_code} for {path}", "an SGLang server", "Check the URL.")

    @cached_property
    def room(self) -> int | None:
        """Requests that the server runs at a time, over all its replicas; None where it does not say. Asked once."""
        try:
            states = self.info().get("internal_states")
        except EngineFailure:
            return None
        each = [state.get("effective_max_running_requests_per_dp") if isinstance(state, dict) else None
                for state in (states if isinstance(states, list) else [])]
        known = [count for count in each if isinstance(count, int)]
        return sum(known) if known and len(known) == len(each) else None

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and content of a path. Raises EngineFailure where the server cannot be reached."""
        response = self._send("GET", path)
        return response.status_code, response.content

    def generate(self, input_ids: list[int], max_new_tokens: int, *, ignore_eos: bool = False,
                 **fields: str) -> Generation:
        """Greedy continuation of a prompt; `fields` are further fields of SGLang's request (`rid`, `extra_key`).

        Raises:
            EngineFailure: the server cannot be reached or refuses.
        """
        start = time.perf_counter()
        response = self._send("POST", "/generate", {
            "input_ids": input_ids,
            "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens, "ignore_eos": ignore_eos},
            **fields})
        if response.status_code != 200:
            raise EngineFailure(self.url, f"HTTP {response.status_code}: {response.text[:500]}",
                                f"an answer to a prompt of {len(input_ids)} tokens", "See the server's log.")
        return self._answer(self._plain(response), time.perf_counter() - start, None)

    def stream(self, input_ids: list[int], max_new_tokens: int) -> Generation:
        """As `generate`, streamed, to know when the first token came; only the last event is parsed.

        Raises:
            EngineFailure: the server cannot be reached, refuses, or ends in the middle.
        """
        start, first, last, rest = time.perf_counter(), None, b"", b""
        body = {"input_ids": input_ids, "stream": True,
                "sampling_params": {"temperature": 0, "max_new_tokens": max_new_tokens}}
        try:
            with self._http.stream("POST", "/generate", json=body) as response:
                if response.status_code != 200:
                    raise EngineFailure(self.url, f"HTTP {response.status_code}: {response.read()[:500]!r}",
                                        f"an answer to a prompt of {len(input_ids)} tokens", "See the server's log.")
                for data in response.iter_raw():
                    first = time.perf_counter() - start if first is None else first
                    *events, rest = (rest + data).split(b"\n\n")
                    last = next((event for event in reversed(events) if event.startswith(b"data: {")), last)
        except httpx.HTTPError as error:
            raise EngineFailure(self.url, f"{type(error).__name__}: {error}", "an SGLang server that answers",
                                "Check that it runs and is not stuck; see its log.") from error
        seconds = time.perf_counter() - start
        plain = json.loads(last.removeprefix(b"data: ") or b"{}")
        if "output_ids" not in plain or not plain["meta_info"].get("finish_reason"):
            raise EngineFailure(self.url, f"a stream that ended early: {last[:200]!r}", "a whole answer",
                                "See the server's log.")
        return self._answer(plain, seconds, first)

    def _plain(self, response: httpx.Response) -> dict[str, Any]:
        """An answer's JSON object; what else answers is another kind of server, or a page of one in between."""
        try:
            plain = response.json()
        except ValueError:
            plain = None
        if not isinstance(plain, dict):
            raise EngineFailure(self.url, f"no JSON object for {response.url.path}, but {response.content[:200]!r}",
                                "an SGLang server", "Check the URL.")
        return plain

    def _answer(self, plain: dict[str, Any], seconds: float, first: float | None) -> Generation:
        """SGLang's answer as ours. An aborted one is none, though it comes with status 200 where it is streamed."""
        ids, meta = tuple(plain["output_ids"]), plain["meta_info"]
        finish = meta.get("finish_reason") or {}
        counted = meta.get("completion_tokens", len(ids))
        if finish.get("type") not in ("stop", "length"):
            raise EngineFailure(self.url, f"an answer that ended by {finish.get('type')}: {finish.get('message')}",
                                "one that ends by itself or at its length", "See the server's log.")
        if counted != len(ids):
            raise EngineFailure(self.url, f"{len(ids)} of an answer's {counted} tokens in its last event",
                                "all of them", "Serve without --incremental-streaming-output, or measure with "
                                "--no-stream.")
        histogram = next((meta[name] for name in HISTOGRAMS if name in meta), ())
        return Generation(ids, tuple(histogram), seconds, str(finish["type"]), first)

    def _send(self, method: str, path: str, body: Any = None) -> httpx.Response:
        try:
            return self._http.request(method, path, json=body)
        except httpx.HTTPError as error:
            raise EngineFailure(self.url, f"{type(error).__name__}: {error}", "an SGLang server that answers",
                                "Check that it runs and is not stuck; see its log.") from error
