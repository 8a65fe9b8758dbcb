"""The first generations: tokens that the draft should know, and whether it knew any of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from eyas_contract import EngineFailure, EyasError
from eyas_contract.golden import load_golden
from eyas_serve.acceptance import Acceptance
from eyas_serve.client import Client
from eyas_serve.config import ServeConfig
from eyas_serve.probe.session import probe_client
from eyas_serve.renderer import Renderer

TOKENS = 48
# Of several kinds, for a good draft may know nothing of an odd answer: to the first, SmolLM2 writes digits without end.
QUESTIONS = ("Count from one to one hundred in words.", "Why is the sky blue?",
             "What is 12 times 7? Explain it step by step.", "Write a Python function that reverses a string.",
             "Write three sentences about the sea.", "How do I make tea?")


@dataclass(frozen=True)
class Proof:
    """What the first generations showed.

    Attributes:
        acceptance: of all of them; no rounds without a draft.
        generations: how many it took until something was accepted, or how many there were.
    """

    acceptance: Acceptance
    generations: int

    @property
    def text(self) -> str:
        """`acceptance length 2.31 in the first generation`."""
        where = "generation" if self.generations == 1 else f"{self.generations} generations"
        return f"acceptance length {self.acceptance.length:.2f} in the first {where}"


def proof_prompts(config: ServeConfig) -> Iterator[list[int]]:
    """The golden record's tokens, then questions through the chat template; a few ids where there is neither."""
    golden = config.draft is not None and (config.draft / "golden.json").is_file()
    if golden:
        assert config.draft is not None
        yield list(load_golden(config.draft).golden.input_ids)
    try:
        renderer = Renderer(config.target)
        yield from [list(renderer.encode([{"role": "user", "content": question}])) for question in QUESTIONS]
    except EyasError:  # no tokenizer here, or a template that refuses the questions: the engine may do without
        if not golden:
            yield [1, 2, 3, 4]


def prove(client: Client, config: ServeConfig) -> Proof:
    """Generate through the draft, prompt after prompt, until enough of it was accepted; without a draft once.

    One generation below the floor condemns no draft: the verdict is on all of them together.

    Raises:
        EngineFailure: no answer, one of the wrong length, or with a draft one without a round of speculation.
    """
    histograms: list[tuple[int, ...]] = []
    for prompt in proof_prompts(config):
        answer = client.generate(prompt, TOKENS, ignore_eos=True)
        if len(answer.output_ids) != TOKENS:
            raise EngineFailure(client.url, f"{len(answer.output_ids)} tokens", f"{TOKENS} tokens of a first "
                                "generation", "See the log.")
        if config.draft is not None and not sum(answer.histogram):
            raise EngineFailure(client.url, "a first generation without a round of speculation", "the draft in use",
                                "An argument in --extra switched speculation off.")
        histograms.append(tuple(answer.histogram))
        if config.draft is None or Acceptance.of(histograms).length >= config.acceptance_floor:
            break
    return Proof(Acceptance.of(histograms), len(histograms))


def findings(client: Client, config: ServeConfig) -> str:
    """What the probe makes of a draft that nothing was accepted of."""
    assert config.draft is not None
    try:
        return probe_client(client, config.draft).text(False).strip()
    except EyasError as error:
        return f"(the probe could not say more: {error})"


def useless(client: Client, config: ServeConfig, proof: Proof) -> EngineFailure:
    """The verdict on a server that answers while its draft is never right."""
    return EngineFailure(
        f"{client.url}, draft {config.draft}",
        f"{proof.text}, {proof.acceptance.rounds} rounds: the server is up, but its draft is of no use\n"
        f"{findings(client, config)}",
        f"at least {config.acceptance_floor:.2f} (--acceptance-floor)",
        "Correct what the probe names; where it passes, the draft is served as trained, and needs more training. "
        "--acceptance-floor 0 serves it all the same.")
