"""Parts `fp8` and `drafts` of `capture.py`: what an e4m3 store saves, and what it costs in acceptance.

`fp8` extracts the same conversations twice through SGLang, to a store of the model's dtype and to one of e4m3, and
compares bytes and states. `drafts` trains a draft from each, with three seeds, and decodes held-out prompts with each
draft by the reference decoder: the target's states are its own there, as when serving, whichever store taught the
draft. `drafts` reads what `fp8` left in `--work`.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import ExitStack
from pathlib import Path

import torch
from capture_path import Results, contract_of, engines, rows_of, states_of

from eyas_contract import TargetSpec, default_aux_layer_ids
from eyas_draft.config import TrainConfig
from eyas_draft.real import RealRounds, openings
from eyas_draft.train import Trainer
from eyas_extract.config import RunConfig
from eyas_extract.run import run

STORES = {"whole": "auto", "fp8": "fp8"}
SEEDS = (0, 1, 2)


def fp8(options: argparse.Namespace, results: Results, work: Path, stack: ExitStack) -> None:
    """Two stores of the same conversations."""
    data = work / "conversations.jsonl"
    data.write_text("".join(rows_of(options.answers, options.draft_rows)))
    spec = TargetSpec.from_folder(options.target)
    aux = default_aux_layer_ids(spec.num_layers)
    servers = engines(options, work, stack, {
        "whole": contract_of(options.target, aux, options.model_dtype),
        "fp8": contract_of(options.target, aux, "F8_E4M3")})
    sizes = {}
    for name, dtype in STORES.items():
        done = run(RunConfig(options.target, data, options.work / name, engine="sglang", overlong="truncate",
                             servers=(servers[name].server.url,), store_dtype=dtype, device=options.device))
        sizes[name] = done.bytes / done.tokens
        results.add(store=name, samples=done.samples, tokens=done.tokens, seconds=done.seconds, check=done.check,
                    bytes_per_token=sizes[name])
    whole, scaled = (states_of(options.work / name, shards=4) for name in STORES)
    for i, k in enumerate((*aux, spec.num_layers - 1)):
        part = slice(i * spec.hidden_size, (i + 1) * spec.hidden_size)
        results.add(layer=k, error=float((scaled[:, part] - whole[:, part]).norm() / whole[:, part].norm()),
                    tokens=len(whole))
    results.add(bytes_share=sizes["fp8"] / sizes["whole"])


def drafts(options: argparse.Namespace, results: Results, work: Path, stack: ExitStack) -> None:
    """Three seeds of drafts from each store, and what of theirs the target accepts."""
    lengths: dict[str, list[float]] = {name: [] for name in STORES}
    for seed in SEEDS:
        for name in STORES:
            begun = time.perf_counter()
            config = TrainConfig(
                store=options.work / name, target=options.target, out=work / f"{name}_{seed}", seed=seed,
                vocab_size=options.draft_vocab, ttt_steps=options.draft_ttt, epochs=8, max_steps=options.draft_steps,
                tokens_per_batch=options.draft_tokens, lr=2e-3, checkpoint_every=options.draft_steps, keep=1,
                device=options.device, shapes="fixed", verify_store=False,
                precision="bf16" if options.device == "cuda" else "fp32")
            trainer = Trainer(config)
            walk = trainer.run()
            trained = time.perf_counter()
            decoded = RealRounds(options.target, trainer.setup.contract, trainer.setup.weights,
                                 openings(trainer.setup.store, trainer.held, options.draft_prompts), chain=3,
                                 max_new_tokens=options.draft_answer, device=torch.device(options.device)
                                 ).measure(trainer.model)
            lengths[name].append(decoded.acceptance_length)
            results.add(store=name, seed=seed, acceptance_length=decoded.acceptance_length, rounds=decoded.rounds,
                        standard_error=decoded.standard_error, steps=options.draft_steps,
                        expected_on_its_own_store=walk.acceptance_length, train_seconds=round(trained - begun, 1),
                        decode_seconds=round(time.perf_counter() - trained, 1))
            del trainer
            if torch.cuda.is_available():
                torch.cuda.empty_cache()
    means = {name: statistics.mean(values) for name, values in lengths.items()}
    results.add(acceptance_length=lengths, means=means, fp8_over_whole=means["fp8"] / means["whole"])
