"""One target and draft served by SGLang with different attention backends: the same long prompts, side by side.

    python benchmarks/serve_attention.py --target T --draft D --prompts P.jsonl --context 7500 --out OUT.json

Each backend serves the target with the same tree; prompts are made by joining the file's texts up to the wanted length.
Printed: tokens/s, acceptance length, milliseconds a round, and how many outputs equal those of the first backend. Where
two differ, the server at hand is asked for the two best log-probabilities at that place: their gap is the near tie
that was decided otherwise.
"""

from __future__ import annotations

import argparse
import json
import shlex
from pathlib import Path
from typing import Any

import httpx

from eyas_contract.contract import write_text_atomic
from eyas_serve.acceptance import Acceptance
from eyas_serve.client import Generation
from eyas_serve.config import ServeConfig
from eyas_serve.flags import attention_flags
from eyas_serve.prompts import load_prompts
from eyas_serve.server import Server

Prompts = list[list[int]]


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


def serve(options: argparse.Namespace, backend: str, prompts: Prompts) -> tuple[dict[str, Any], list[Generation]]:
    """All prompts through one backend, one at a time; the first is sent twice and counted once."""
    flags = [*attention_flags(backend, drafted=True), "--page-size", "1"]
    config = ServeConfig(target=options.target, draft=options.draft, dtype="bfloat16", port=0, steps=options.steps,
                         topk=options.topk, num_draft_tokens=options.num_draft_tokens, radix_cache=False,
                         preflight=False, extra=shlex.join([*flags, *shlex.split(options.extra)]))
    with Server(config, print) as server:
        row, answers = measured(server, prompts, options.max_new_tokens, options.reference)
    return {"backend": backend, **row}, answers


def measured(server: Server, prompts: Prompts, max_new_tokens: int,
             reference: list[Generation] | None) -> tuple[dict[str, Any], list[Generation]]:
    """All prompts through a running server, one at a time, greedy; compared with the reference's answers."""
    server.client.generate(prompts[0], max_new_tokens, ignore_eos=True)
    first = [server.client.generate(ids, 1, ignore_eos=True).seconds for ids in prompts]
    answers = [server.client.generate(ids, max_new_tokens, ignore_eos=True) for ids in prompts]
    gaps = near_ties(server.url, prompts, answers, reference) if reference else []
    seconds = sum(answer.seconds for answer in answers) - sum(first)
    acceptance = Acceptance.of(answer.histogram for answer in answers)
    tokens = sum(len(answer.output_ids) - 1 for answer in answers)
    return {"decode_tokens_per_second": round(tokens / seconds, 2),
            "prompt_seconds": round(sum(first), 3), "acceptance_length": round(acceptance.length, 4),
            "milliseconds_a_round": round(1e3 * seconds * acceptance.length / tokens, 3),
            "differing": gaps}, answers


def near_ties(url: str, prompts: Prompts, answers: list[Generation],
              reference: list[Generation]) -> list[dict[str, Any]]:
    """For each answer that differs from the reference's: where, and the gap of this server's two best tokens there."""
    found = []
    for i, (ids, ours, theirs) in enumerate(zip(prompts, answers, reference, strict=True)):
        pairs = zip(ours.output_ids, theirs.output_ids, strict=True)
        at = next((k for k, (a, b) in enumerate(pairs) if a != b), None)
        if at is None:
            continue
        body = {"input_ids": ids + list(ours.output_ids[:at]), "return_logprob": True, "top_logprobs_num": 2,
                "sampling_params": {"temperature": 0, "max_new_tokens": 1}}
        meta = httpx.post(f"{url}/generate", json=body, timeout=300, trust_env=False).json()["meta_info"]
        best, second = meta["output_top_logprobs"][0][:2]
        found.append({"prompt": i, "token": at, "gap_nats": round(best[0] - second[0], 4),
                      "the_two_are_the_best_two": {best[1], second[1]} ==
                      {ours.output_ids[at], theirs.output_ids[at]}})
    return found


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("target", "draft", "prompts", "out"):
        parser.add_argument(f"--{name}", type=Path, required=True)
    for name, default in (("context", 7500), ("count", 8), ("max-new-tokens", 192), ("steps", 3), ("topk", 4),
                          ("num-draft-tokens", 16)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--backends", nargs="+", default=["triton", "eyas", "flashinfer"])
    parser.add_argument("--extra", default="")
    options = parser.parse_args()
    prompts = long_prompts(options.prompts, options.target, options.context, options.count)
    result: dict[str, Any] = {"settings": {key: value.name if isinstance(value, Path) else value
                                           for key, value in vars(options).items() if key != "out"},
                              "prompt_tokens": [len(ids) for ids in prompts], "rows": []}
    options.reference = None
    for backend in options.backends:
        try:
            row, answers = serve(options, backend, prompts)
        except Exception as error:  # a backend that cannot serve this is a result; the others go on
            row, answers = {"backend": backend, "error": str(error)[-2000:]}, None
        options.reference = options.reference or answers
        if answers is not None:
            row["identical"] = sum(ours.output_ids == theirs.output_ids
                                   for ours, theirs in zip(answers, options.reference, strict=True))
        result["rows"].append(row)
        write_text_atomic(options.out, json.dumps(result, indent=1) + "\n")
        print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
