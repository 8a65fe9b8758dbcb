"""The first speculative request: tokens that the draft should know, and whether it knew any of them."""

from __future__ import annotations

from pathlib import Path

from eyas_contract import EngineFailure, EyasError
from eyas_contract.golden import load_golden
from eyas_serve.acceptance import Acceptance
from eyas_serve.client import Client
from eyas_serve.config import ServeConfig
from eyas_serve.probe.session import probe_client
from eyas_serve.prompts import Renderer

TOKENS = 48
QUESTION = "Count from one to one hundred in words."


def proof_prompt(config: ServeConfig) -> list[int]:
    """The golden record's tokens, else a question through the chat template, else a few ids."""
    if config.draft is not None and (config.draft / "golden.json").is_file():
        return list(load_golden(config.draft).golden.input_ids)
    try:
        return list(Renderer(config.target).encode([{"role": "user", "content": QUESTION}]))
    except EyasError:
        return [1, 2, 3, 4]


def first_request(client: Client, config: ServeConfig) -> Acceptance:
    """Generate through the draft; returns the acceptance.

    Raises:
        EngineFailure: no answer, one of the wrong length, or with a draft one without a round of speculation.
    """
    answer = client.generate(proof_prompt(config), TOKENS, ignore_eos=True)
    if len(answer.output_ids) != TOKENS:
        raise EngineFailure(client.url, f"{len(answer.output_ids)} tokens", f"{TOKENS} tokens of a first generation",
                            "See the log.")
    acceptance = Acceptance(answer.histogram)
    if config.draft is not None and not acceptance.rounds:
        raise EngineFailure(client.url, "a first generation without a round of speculation", "the draft in use",
                            "An argument in --extra switched speculation off.")
    return acceptance


def findings(client: Client, draft: Path) -> str:
    """What the probe makes of a draft that nothing was accepted of."""
    try:
        return probe_client(client, draft).text(False)
    except EyasError as error:
        return f"(the probe could not say more: {error})"


def useless(client: Client, config: ServeConfig, acceptance: Acceptance) -> EngineFailure:
    """The verdict on a server that answers while its draft is never right."""
    assert config.draft is not None
    return EngineFailure(
        f"{client.url}, draft {config.draft}",
        f"acceptance length {acceptance.length:.2f} over {acceptance.rounds} rounds of the first generation: the "
        f"server is up, but its draft is of no use\n{findings(client, config.draft)}\n",
        f"at least {config.acceptance_floor:.2f} (--acceptance-floor)",
        "Correct what the probe names, or serve without the draft; --acceptance-floor 0 serves it all the same.")
