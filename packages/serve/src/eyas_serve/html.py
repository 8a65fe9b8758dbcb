"""The report as one HTML file that opens offline: tables, and plots as inline SVG."""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from typing import Any

from eyas_serve.levels import Row, speedups, warnings

WIDTH, HEIGHT, LEFT, BOTTOM, TOP = 520, 300, 60, 40, 30
COLOURS = ("#1b6ca8", "#d1495b", "#3c8d40", "#8a5a9e", "#b8860b")
STYLE = ("body{font:15px sans-serif;max-width:1120px;margin:2em auto;padding:0 1em;color:#222}table{border-collapse:"
         "collapse;margin:1em 0}td,th{padding:3px 9px;border-bottom:1px solid #ddd;text-align:right;vertical-align:top}"
         "td:first-child,th:first-child{text-align:left;white-space:nowrap}svg{max-width:100%;height:auto}"
         ".plots{display:flex;flex-wrap:wrap;gap:1em}.wide{overflow-x:auto;font-size:13px}"
         ".settings td{text-align:left;overflow-wrap:anywhere}")
Series = dict[str, list[tuple[float, float]]]


def line_chart(title: str, x_name: str, y_name: str, series: Series, mark: float | None = None) -> str:
    """Lines over a logarithmic x; `mark` draws a level line."""
    points = [point for line in series.values() for point in line]
    if not points:
        return ""
    most = top(max([y for _, y in points] + [mark or 0]))
    low, high = math.log2(min(x for x, _ in points)), math.log2(max(x for x, _ in points))

    def place(x: float, y: float) -> tuple[float, float]:
        share = (math.log2(x) - low) / (high - low) if high > low else 0.5
        return LEFT + share * (WIDTH - LEFT - 20), HEIGHT - BOTTOM - y / most * (HEIGHT - BOTTOM - TOP)

    parts = _frame(title, x_name, y_name, most)
    for x in sorted({x for x, _ in points}):
        parts.append(_text(place(x, 0)[0], HEIGHT - BOTTOM + 16, f"{x:g}"))
    if mark is not None:
        y = place(2**low, mark)[1]
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#888" '
                     'stroke-dasharray="4 3"/>')
    for number, (name, line) in enumerate(series.items()):
        colour, spots = COLOURS[number % len(COLOURS)], [place(*point) for point in sorted(line)]
        parts.append(f'<polyline fill="none" stroke="{colour}" stroke-width="2" points="'
                     + " ".join(f"{x:.1f},{y:.1f}" for x, y in spots) + '"/>')
        parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="3.5" fill="{colour}"/>' for x, y in spots]
        parts.append(f'<text x="{LEFT + 8}" y="{TOP + 14 + 16 * number}" fill="{colour}">{html.escape(name)}</text>')
    return "".join([*parts, "</svg>"])


def bar_chart(title: str, y_name: str, bars: Sequence[tuple[str, float, tuple[float, float] | None]]) -> str:
    """Bars with their intervals."""
    if not bars:
        return ""
    most = top(max(max(value, span[1] if span else 0) for _, value, span in bars))
    parts, step = _frame(title, "", y_name, most), (WIDTH - LEFT - 20) / len(bars)

    def height(value: float) -> float:
        return HEIGHT - BOTTOM - value / most * (HEIGHT - BOTTOM - TOP)

    for number, (name, value, span) in enumerate(bars):
        x = LEFT + step * (number + 0.5)
        parts.append(f'<rect x="{x - step * 0.3:.1f}" y="{height(value):.1f}" width="{step * 0.6:.1f}" '
                     f'height="{HEIGHT - BOTTOM - height(value):.1f}" fill="{COLOURS[0]}"/>')
        above = height(span[1] if span else value) - 6
        parts += [_text(x, HEIGHT - BOTTOM + 16, name), _text(x, above, f"{value:.2f}")]
        if span:
            parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{height(span[0]):.1f}" y2="{height(span[1]):.1f}" '
                         'stroke="#222" stroke-width="2"/>')
    return "".join([*parts, "</svg>"])


def top(most: float) -> float:
    """The least round number above `most`, of which fifths are round, too."""
    power = 10 ** math.floor(math.log10(most)) if most > 0 else 1.0
    return float(next(step * power for step in (1, 1.5, 2, 2.5, 3, 4, 5, 7.5, 10, 12.5) if step * power > 1.05 * most))


def number(value: float) -> str:
    """Four digits or fewer, but whole thousands in full."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def _frame(title: str, x_name: str, y_name: str, most: float) -> list[str]:
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{WIDTH}" height="{HEIGHT}" '
             f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
             f"<title>{html.escape(title)}</title>",
             f'<text x="{LEFT}" y="16" font-weight="bold">{html.escape(title)}</text>',
             _text(WIDTH / 2, HEIGHT - 6, x_name),
             f'<text x="{WIDTH - 20}" y="16" text-anchor="end" fill="#666">{html.escape(y_name)}</text>']
    for share in (0, 0.2, 0.4, 0.6, 0.8, 1):
        y = HEIGHT - BOTTOM - share * (HEIGHT - BOTTOM - TOP)
        parts.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e5e5e5"/>'
                     f'<text x="{LEFT - 6}" y="{y + 4:.1f}" text-anchor="end" fill="#666">{number(most * share)}'
                     '</text>')
    return parts


def _text(x: float, y: float, text: str) -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="middle">{html.escape(text)}</text>'


def page(report: dict[str, Any]) -> str:
    """The whole report."""
    rows: list[Row] = report["levels"]
    whole = [row for row in rows if row["data_set"] == "all"]
    arms = list(dict.fromkeys(row["arm"] for row in whole))

    def line(field: str, share: str | None = None, scale: float = 1.0) -> Series:
        return {arm: [(row["concurrency"], scale * (row[field] if share is None else row[field][share]))
                      for row in whole if row["arm"] == arm and row[field]] for arm in arms}

    first = next((row for row in whole if row["rates"]), None)
    ratio = speedups(rows)
    sets = [row for row in rows if row["arm"] == "draft" and row["concurrency"] == whole[0]["concurrency"]]
    plots = [line_chart("Throughput", "requests at a time", "tokens/s", line("tokens_per_second")),
             line_chart("Speed-up by the draft", "requests at a time", "times", {"draft": sorted(ratio.items())}, 1.0)
             if ratio else "",
             bar_chart("Acceptance length, 95 % interval", "tokens a round", [
                 (row["data_set"], row["acceptance_length"], row["interval"]) for row in sets
                 if row["acceptance_length"] is not None]),
             bar_chart("Accepted at position, given the one before", "share", [
                 (str(k), rate, None) for k, rate in enumerate(first["rates"], 1)]) if first else "",
             line_chart("Time to first token, median", "requests at a time", "ms", line("ttft", "p50", 1000)),
             line_chart("Time per output token, median", "requests at a time", "ms", line("tpot", "p50", 1000))]
    settings = "".join(f"<tr><td>{html.escape(name)}</td><td>{html.escape(str(value))}</td></tr>"
                       for name, value in report["config"].items() if value not in (None, "", [], {}))
    title = f"eyas-serve bench: {report['engine']['name']} {report['engine']['version']}"
    identical = {True: "identical", False: "NOT identical", None: "not compared"}[report["outputs_identical"]]
    return (f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{html.escape(title)}</title>'
            f"<style>{STYLE}</style></head><body><h1>{html.escape(title)}</h1><p>Acceptance length is "
            f"{html.escape(report['definition'])}. Outputs with and without the draft: {identical}.</p>"
            f"{''.join(f'<p>Warning: {html.escape(words)}.</p>' for words in warnings(rows))}"
            f"<div class='plots'>{''.join(plots)}</div>"
            f"{_table(HEAD, [_cells(row) for row in rows])}{_against(report.get('against'))}<h2>Settings</h2>"
            f"<table class='settings'>{settings}</table></body></html>\n")


HEAD = ("arm", "at a time", "data set", "requests", "tokens", "tokens/s", "acceptance length [95 %]",
        "accepted at position 1, 2, ... given the one before", "TTFT ms p50 / p90 / p99", "TPOT ms p50 / p90 / p99")


def _cells(row: Row) -> list[str]:
    length = "" if row["acceptance_length"] is None else f"{row['acceptance_length']:.3f}"
    length += f" [{row['interval'][0]:.3f}, {row['interval'][1]:.3f}]" if row["interval"] else ""
    speed = "" if row["tokens_per_second"] is None else number(row["tokens_per_second"])
    return [row["arm"], str(row["concurrency"]), row["data_set"], str(row["requests"]), str(row["tokens"]), speed,
            length, " ".join(f"{rate:.2f}" for rate in row["rates"]), *(
                " / ".join(number(1000 * row[name][share]) for share in ("p50", "p90", "p99")) if row[name] else ""
                for name in ("ttft", "tpot"))]


def _against(against: dict[str, Any] | None) -> str:
    """What `--against` found, where it was asked for."""
    if against is None:
        return ""
    head = ("arm", "at a time", "data set", "acceptance length before", "now", "", "speed, times the earlier")
    rows = [[row["arm"], str(row["concurrency"]), row["data_set"],
             *("" if length is None else f"{length:.3f}" for length in row["acceptance_length"]), row["acceptance"],
             "" if row["speed_ratio"] is None else f"{row['speed_ratio']:.3f}"] for row in against["rows"]]
    other = "".join(f"<p>Other settings: {html.escape(words)}.</p>" for words in against.get("settings", []))
    return f"<h2>Against {html.escape(against['report'])}</h2>{other}{_table(head, rows)}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    def line(tag: str, cells: Sequence[str]) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line("td", cells) for cells in rows)
    return f"<div class='wide'><table><thead>{line('th', head)}</thead><tbody>{body}</tbody></table></div>"
