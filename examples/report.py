"""The demo's table and picture, from the JSON files of its stages."""

from __future__ import annotations

import json
from itertools import accumulate
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

INK, BLUE, ORANGE, GREY = "#1f2933", "#2f6fde", "#e07b39", "#9aa5b1"


def table(result: dict[str, Any]) -> str:
    """The numbers that matter, for a terminal."""
    speed, base = result["served_tokens_per_second"], result["baseline_tokens_per_second"]
    rows = [
        ("acceptance length, tree 3/2/6, served", f"{result['acceptance_length_served']:.2f}",
         f"reference decoder {result['acceptance_length_reference']:.2f}"),
        ("acceptance length, chain 3/1/4, served", f"{result['acceptance_length_chain']:.2f}",
         f"reference decoder {result['acceptance_length_reference_chain']:.2f}"),
        ("outputs with draft = without (fp32, greedy)", "yes" if result["outputs_identical"] else "NO", ""),
        (f"tokens/s with the draft ({result['dtype']})", f"{speed:.1f}",
         f"without {base:.1f}, ratio {speed / base:.2f}"),
        ("trained tokens", f"{result['train_tokens']:,}", f"engine {' '.join(map(str, result['engine'].values()))}"),
        ("time of all stages", f"{result['wall_seconds'] / 60:.1f} min", ""),
    ]
    width = max(len(row[0]) for row in rows)
    return "\n".join(f"  {name:<{width}}  {value:>9}  {note}" for name, value, note in rows)


def draw(out: Path, picture: Path) -> None:
    """Four panels: training, acceptance length, acceptance per position, tokens/s."""
    plt.rcParams |= {"font.size": 10, "axes.spines.top": False, "axes.spines.right": False, "text.color": INK,
                     "axes.titleweight": "bold", "axes.titlesize": 11}
    figure, axes = plt.subplots(2, 2, figsize=(11, 7.5), constrained_layout=True)
    result = json.loads((out / "report.json").read_text(encoding="utf-8"))
    _training(axes[0, 0], [json.loads(line) for line in
                           (out / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()])
    _lengths(axes[0, 1], result)
    served = {name: json.loads((out / f"served_{name}.json").read_text(encoding="utf-8"))
              for name in ("tree", "chain")}
    _positions(axes[1, 0], served)
    _speed(axes[1, 1], json.loads((out / "served_speed.json").read_text(encoding="utf-8")))
    figure.suptitle(f"{result['target']} with an EAGLE-3 draft trained on {result['train_tokens']:,} tokens, "
                    f"served by {result['engine']['name']} {result['engine']['version']} on "
                    f"{result['machine']['cores']} CPU cores", fontweight="bold")
    figure.savefig(picture, dpi=140)
    plt.close(figure)


def _training(axis: Any, rows: list[dict[str, Any]]) -> None:
    steps = [row for row in rows if "loss" in row]
    seen = [tokens / 1000 for tokens in accumulate(row["tokens"] for row in steps)]
    for i, colour in zip(range(len(steps[0]["step_accuracy"])), (BLUE, ORANGE, "#3b9c6d", GREY), strict=False):
        axis.plot(seen, _smooth([row["step_accuracy"][i] for row in steps]), color=colour, lw=1.4,
                  label=f"step {i + 1}")
    axis.set(title="Training: accuracy per TTT step, teacher-forced", xlabel="thousand tokens seen",
             ylabel="top-1 accuracy", ylim=(0, 1))
    axis.legend(frameon=False, loc="upper left", ncols=2)
    measured = [(seen[row["step"] - 1], row["heldout"]["acceptance_length"]) for row in rows
                if "heldout" in row and row["step"]]
    twin = axis.twinx()
    twin.plot(*zip(*measured, strict=True), "D", color=INK, ms=5)
    twin.set(ylabel="expected acceptance length (diamonds)", ylim=(1, 3))


def _smooth(values: list[float], window: int = 15) -> list[float]:
    """Mean of the last `window` values at each place."""
    return [sum(part) / len(part) for i in range(len(values)) for part in [values[max(0, i + 1 - window):i + 1]]]


def _lengths(axis: Any, result: dict[str, Any]) -> None:
    names = ("tree 3/2/6", "chain 3/1/4")
    served = (result["acceptance_length_served"], result["acceptance_length_chain"])
    reference = (result["acceptance_length_reference"], result["acceptance_length_reference_chain"])
    for offset, values, colour, label in ((-0.18, served, BLUE, "served by SGLang"),
                                          (0.18, reference, GREY, "reference decoder")):
        bars = axis.bar([i + offset for i in range(2)], values, 0.34, color=colour, label=label)
        axis.bar_label(bars, fmt="%.2f", padding=2)
    axis.axhline(1, color=INK, lw=0.8, ls=":")
    axis.text(1.45, 1.02, "nothing accepted", ha="right", va="bottom", fontsize=8)
    axis.set(title="Acceptance length, held out (bonus counted)", xticks=(0, 1), xticklabels=names,
             ylim=(0, max(served + reference) * 1.25))
    axis.legend(frameon=False, loc="upper right", ncols=2)


def _positions(axis: Any, served: dict[str, Any]) -> None:
    for (name, report), colour in zip(served.items(), (BLUE, ORANGE), strict=True):
        rates = report["conditional_rates"]
        axis.plot(range(1, len(rates) + 1), rates, "o-", color=colour, label=name)
    axis.set(title="Accepted at position k, given k - 1 were", xlabel="position", xticks=(1, 2, 3), ylim=(0, 1))
    axis.legend(frameon=False)


def _speed(axis: Any, speed: dict[str, Any]) -> None:
    values, settings = (speed["baseline_tokens_per_second"], speed["tokens_per_second"]), speed["config"]
    bars = axis.barh(("without draft", "with draft"), values, color=(GREY, BLUE), height=0.5)
    axis.bar_label(bars, fmt="%.1f tok/s", padding=3)
    axis.set(title=f"Speed, tree, {settings['dtype']}, {settings['concurrency']} at a time: "
             f"{values[1] / values[0]:.2f} times",
             xlim=(0, max(values) * 1.25))
