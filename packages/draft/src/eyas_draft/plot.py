"""Pictures of runs, from their metrics.jsonl. matplotlib is needed here alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from eyas_contract import InvalidInput
from eyas_draft.config import PlotConfig
from eyas_draft.metrics import read_rows

Series = list[tuple[float, float]]
WINDOW = 25  # steps averaged


def plot(config: PlotConfig) -> Path:
    """Draw the runs into one picture; returns its path.

    Raises:
        InvalidInput: no metrics, no matplotlib, or a kind of picture that it does not write.
    """
    try:
        from matplotlib.backend_bases import FigureCanvasBase
        from matplotlib.figure import Figure
    except ImportError as error:
        raise InvalidInput("eyas-draft plot", "matplotlib is not installed", "matplotlib", "pip install matplotlib") \
            from error
    kinds = FigureCanvasBase.get_supported_filetypes()
    if config.out.suffix.removeprefix(".").lower() not in kinds:
        raise InvalidInput(str(config.out), "no kind of picture that matplotlib writes", ", ".join(sorted(kinds)),
                           "Give --out another ending, such as .png.")
    figure = Figure(figsize=(12, 7), layout="constrained")
    panels: Any = figure.subplots(2, 2)
    titles = ("loss", "accuracy of the first step", "acceptance length, held out (bonus counted)", "tokens/s")
    for panel, title in zip(panels.flat, titles, strict=True):
        panel.set_title(title)
        panel.set_xlabel("tokens")
        panel.grid(alpha=0.3)
    for run in config.runs:
        for panel, (series, mark) in zip(panels.flat, zip(read_series(run), ("", "", "o", ""), strict=True),
                                         strict=True):
            if series:
                panel.plot(*zip(*series, strict=True), marker=mark, label=run.name)
    panels.flat[0].legend()
    config.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(config.out, dpi=120)
    return config.out


def read_series(run: Path) -> tuple[Series, Series, Series, Series]:
    """(tokens so far, value) of loss, first step's accuracy, held-out acceptance length and tokens a second.

    Raises:
        InvalidInput: the run has no metrics.
        CorruptFile: see `read_rows`.
    """
    path = run / "metrics.jsonl"
    if not path.is_file():
        raise InvalidInput(str(path), "no such file", "a run folder of eyas-draft train", "Give the run's folder.")
    tokens, loss, accuracy, length, speed = 0, Series(), Series(), Series(), Series()
    for row in read_rows(path):
        tokens += row.get("tokens", 0)
        if "heldout" in row:
            length.append((tokens, row["heldout"]["acceptance_length"]))
        else:
            loss.append((tokens, row["loss"]))
            accuracy.append((tokens, row["step_accuracy"][0]))
            speed.append((tokens, row["tokens"] / max(row["seconds"], 1e-9)))
    return smooth(loss), smooth(accuracy), length, smooth(speed)


def smooth(series: Series) -> Series:
    """Means of WINDOW points, at their last place."""
    parts = [series[i:i + WINDOW] for i in range(0, len(series), WINDOW)]
    return [(part[-1][0], sum(value for _, value in part) / len(part)) for part in parts]
