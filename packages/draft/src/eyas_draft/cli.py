"""The command `eyas-draft`: everything about a draft, a subcommand each. The only module that prints."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import tyro

from eyas_contract.canonical import to_plain
from eyas_contract.commands import expand_config, run_command, save_config
from eyas_contract.contract import write_text_atomic
from eyas_contract.outputs import require_place, set_aside
from eyas_draft.config import (
    AdviseConfig,
    EvalConfig,
    ExportConfig,
    PlanConfig,
    PlotConfig,
    TrainConfig,
    VerifyConfig,
    VocabConfig,
)
from eyas_draft.convert import ConvertConfig
from eyas_draft.golden_config import GoldenConfig

COMMANDS: dict[str, type] = {"train": TrainConfig, "export": ExportConfig, "verify": VerifyConfig,
                             "eval": EvalConfig, "vocab": VocabConfig, "convert": ConvertConfig, "golden": GoldenConfig,
                             "plan": PlanConfig, "plot": PlotConfig, "advise": AdviseConfig}


def main(argv: list[str] | None = None) -> int:
    """Run the command; returns its exit code (0 done, 1 an error or a failed check, 2 usage)."""
    words = list(sys.argv[1:] if argv is None else argv)
    as_json = "--json" in words
    words = [word for word in words if word != "--json"]
    return run_command(lambda: _run(words, as_json))


def _run(words: list[str], as_json: bool) -> int:
    config: Any = tyro.extras.subcommand_cli_from_dict(
        dict(COMMANDS), prog="eyas-draft", description=DESCRIPTION, args=expand_config(words, COMMANDS))
    handlers: dict[type, Callable[[Any, bool], int]] = {
        TrainConfig: _train, ExportConfig: _export, VerifyConfig: _verify, EvalConfig: _eval, VocabConfig: _vocab,
        ConvertConfig: _convert, GoldenConfig: _golden, PlanConfig: _plan, PlotConfig: _plot, AdviseConfig: _advise}
    return handlers[type(config)](config, as_json)


DESCRIPTION = "Train, export, check and measure EAGLE-3 drafts. --config FILE.toml gives flags, --json prints JSON."


def _train(config: TrainConfig, as_json: bool) -> int:
    # Ragged batches have ever new shapes, and oneDNN keeps what it compiled for the last 1024: gigabytes.
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "16")
    from eyas_draft.train import Trainer
    trainer = Trainer(config)
    if not as_json and trainer.ranks.first:
        from eyas_draft.vocab import render
        print(render(trainer.setup.coverage, {}), file=sys.stderr)
    result = trainer.run()
    if trainer.ranks.first:
        _show({"out": str(config.out), "steps": trainer.step, "best_acceptance_length": trainer.best,
               "acceptance_length": result.acceptance_length, "rates": list(result.rates),
               "skipped_samples": trainer.loader.skipped}, as_json)
    trainer.ranks.leave()
    return 0


def _export(config: ExportConfig, as_json: bool) -> int:
    from eyas_draft.export import export
    _show(export(config), as_json)
    return 0


def _verify(config: VerifyConfig, as_json: bool) -> int:
    from eyas_draft.export import verify
    verdict = verify(config)
    _show({**asdict(verdict), "verdict": "fail" if verdict.faults else "pass"}, as_json)
    return 1 if verdict.faults else 0


def _convert(config: ConvertConfig, as_json: bool) -> int:
    from eyas_draft.convert import convert
    done = convert(config)
    if as_json:
        _show({**asdict(done), "out": str(done.out)}, True)
    else:
        print("\n".join(done.lines()))
    return 0


def _golden(config: GoldenConfig, as_json: bool) -> int:
    from eyas_draft.golden import make_golden
    _show(make_golden(config), as_json)
    return 0


def _eval(config: EvalConfig, as_json: bool) -> int:
    from eyas_draft.evaluate import evaluate
    if config.out:
        require_place(config.out, "a JSON file for the report, by --out")
    report = evaluate(config)
    if config.out:
        settings = config.out.with_name(config.out.stem + ".config.json")
        set_aside(config.out, settings)
        write_text_atomic(config.out, json.dumps(report) + "\n")
        save_config(config, settings.parent, settings.name)
    _show(report if as_json else {k: v for k, v in report.items() if k != "outputs"}, as_json)
    return 0


def _vocab(config: VocabConfig, as_json: bool) -> int:
    from eyas_draft.setup import special_ids_seen
    from eyas_draft.store import Store
    from eyas_draft.vocab import choose_vocab, coverage, render
    counts = Store(config.store, verify=config.verify_store).token_counts()
    always = special_ids_seen(config.target, counts) if config.target else ()
    report = coverage(counts, choose_vocab(counts, config.vocab_size, always), config.chain)
    if as_json:
        _show(to_plain(report), True)
        return 0
    texts: dict[int, str] = {}
    if config.target:
        from transformers import AutoTokenizer
        tokenizer = AutoTokenizer.from_pretrained(config.target)
        texts = {token_id: tokenizer.decode([token_id]) for token_id, _ in report.lost_ids}
    print(render(report, texts))
    return 0


def _plan(config: PlanConfig, as_json: bool) -> int:
    from eyas_draft.plan import plan, render
    needs = plan(config)
    if as_json:
        _show(asdict(needs), True)
    else:
        print(render(needs, config))
    return 0


def _plot(config: PlotConfig, as_json: bool) -> int:
    from eyas_draft.plot import plot
    _show({"out": str(plot(config))}, as_json)
    return 0


def _advise(config: AdviseConfig, as_json: bool) -> int:
    from eyas_draft.advise import advise
    fit, advice = advise(config.runs)
    if as_json:
        _show({"fit": asdict(fit), "advice": [asdict(row) for row in advice]}, True)
        return 0
    print(f"ceiling {fit.ceiling:.3f}, exponent {fit.exponent:.2f}, repetitions worth anything {fit.repetitions:.1f}, "
          f"residual {fit.error:.4f}; acceptance length held out, bonus counted, 80 % interval")
    for row in advice:
        print(f"  {row.choice:<20} {row.length:.3f}  ({row.low:.3f} to {row.high:.3f})  {row.tokens:,.0f} tokens, "
              f"{row.hours:.2f} h")
    return 0


def _show(values: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(values))
        return
    width = max(map(len, values))
    for name, value in values.items():
        print(f"{name:<{width}}  {value:.4f}" if isinstance(value, float) else f"{name:<{width}}  {value}")

if __name__ == "__main__":
    sys.exit(main())
