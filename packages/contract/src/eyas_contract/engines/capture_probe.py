"""Judges what a target class handed over when it was asked for aux states on one short input: counts and measures."""

from __future__ import annotations

from collections.abc import Sequence

from eyas_contract.engines.findings import Finding


def check_captured(target_class: str, has_hook: bool, shapes: Sequence[tuple[int, ...]], wanted: int, tokens: int,
                   hidden_size: int) -> list[Finding]:
    """Findings about one probe; empty where all is well.

    Args:
        target_class: its name, for the messages.
        has_hook: whether the class has a method that takes the layers.
        shapes: [tokens, width] of each state that came back, in layer order.
        wanted: number of layers asked for.
        tokens: number of input tokens.
        hidden_size: width of one of the target's states.
    """
    if not has_hook:
        return [Finding("states-missing", "error", target_class, "no method that takes the layers to capture",
                        "set_eagle3_layers_to_capture, by SGLang",
                        "this class cannot serve an EAGLE-3 draft in this build",
                        "Use a build whose class has the hook, or serve without EAGLE-3.")]
    if len(shapes) != wanted:
        return [Finding("states-count", "error", target_class, f"hook present but {len(shapes)} of {wanted} states "
                        "came back", f"{wanted} states", "the draft skips `fc`, or reads other layers than trained",
                        "Use a build whose class captures all of them.")]
    result = []
    widths = sorted({shape[-1] for shape in shapes if shape[-1] != hidden_size})
    if widths:
        result.append(Finding("states-width", "error", target_class, f"{wanted} states of "
                              f"{', '.join(map(str, widths))}, expected {hidden_size}",
                              f"{hidden_size}, the target's hidden_size",
                              "`fc` does not fit (a target that carries several residual streams?)",
                              "Train on what this class hands over, or use another build."))
    rows = sorted({shape[0] for shape in shapes if shape[0] != tokens})
    if rows:
        result.append(Finding("states-width", "error", target_class, f"states of {', '.join(map(str, rows))} rows",
                              f"{tokens}, one per token", "states belong to other tokens (prefix cache, chunking)",
                              "Switch the prefix cache off while capturing."))
    return result
