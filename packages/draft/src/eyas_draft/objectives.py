"""What is minimised at a scored row: target distribution p, draft distribution q = softmax(logits), both over the draft
vocabulary (p renormalised to it). Every objective gives its value and its gradient by the logits in closed form.

| name | value of a row | |
|---|---|---|
| `ce` | -sum p log q | soft cross-entropy |
| `kl` | sum p (log p - log q) | forward KL: `ce` less the target's entropy, the same gradient |
| `tv` | 1 - alpha, alpha = sum min(p, q) | what sampling loses: the chance that the draft's token is rejected |
| `lk-alpha` | -log alpha | the same, steep where little is accepted |
| `lk-lambda` | w kl + (1 - w) tv, w = exp(-3 alpha) held fixed | KL while little is accepted, then acceptance |
| `choice` | -log q[argmax p] | cross-entropy with the target's first choice, what greedy decoding accepts |

A mix is a sum of weighted names: `ce`, or `ce=0.5,choice=0.5`.

Source: EAGLE-3 (arXiv 2503.01840) section 3.2 for `ce`; speculative sampling (arXiv 2211.17192) section 3 for alpha as
the acceptance rate; the LK family as SpecForge's `lk_loss_type` names it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from eyas_contract import InvalidInput

Mix = tuple[tuple[str, float], ...]
Scored = tuple[Tensor, Tensor]
"""(value [N], gradient by the logits [N, V])."""

LAMBDA_DECAY = 3.0
TINY = 1e-20


def parse_mix(text: str) -> Mix:
    """`"ce"` or `"ce=0.5,choice=0.5"` -> ((name, weight), ...).

    Raises:
        InvalidInput: an unknown name, or a weight that is not a positive number.
    """
    parts: list[tuple[str, float]] = []
    for word in text.split(","):
        name, _, weight = word.strip().partition("=")
        try:
            value = float(weight or 1.0)
        except ValueError:
            value = 0.0
        if name not in OBJECTIVES or not 0 < value < float("inf"):
            raise InvalidInput("--loss", text, f"names of {sorted(OBJECTIVES)}, each with a positive weight",
                               "For example: --loss ce, or --loss ce=0.5,choice=0.5.")
        parts.append((name, value))
    return tuple(parts)


def evaluate(mix: Mix, logits_nv: Tensor, target_nv: Tensor) -> Scored:
    """The mix's value [N] and its gradient by the logits [N, V]; both arguments in float32 or wider."""
    values, grads = zip(*(OBJECTIVES[name](logits_nv, target_nv) for name, _ in mix), strict=True)
    weights = [weight for _, weight in mix]
    return _weighted(weights, values), _weighted(weights, grads)


def _weighted(weights: list[float], parts: tuple[Tensor, ...]) -> Tensor:
    total = parts[0] if weights[0] == 1.0 else parts[0] * weights[0]
    for weight, part in zip(weights[1:], parts[1:], strict=True):
        total = total + part * weight
    return total


def _cross_entropy(logits: Tensor, p: Tensor) -> Scored:
    largest = logits.amax(-1, keepdim=True)
    shifted = logits - largest
    raised = shifted.exp()
    mass = raised.sum(-1, keepdim=True)
    return mass.log().squeeze(-1) - (p * shifted).sum(-1), raised / mass - p


def _forward_kl(logits: Tensor, p: Tensor) -> Scored:
    value, grad = _cross_entropy(logits, p)
    return value + torch.special.xlogy(p, p).sum(-1), grad


def _acceptance(logits: Tensor, p: Tensor) -> Scored:
    """alpha and its gradient; at p = q, where it has none, that of the side p < q."""
    q = logits.softmax(-1)
    below = (q < p) * q
    return torch.minimum(p, q).sum(-1), below - q * below.sum(-1, keepdim=True)


def _total_variation(logits: Tensor, p: Tensor) -> Scored:
    alpha, grad = _acceptance(logits, p)
    return 1 - alpha, -grad


def _log_acceptance(logits: Tensor, p: Tensor) -> Scored:
    alpha, grad = _acceptance(logits, p)
    alpha = alpha.clamp(min=TINY)
    return -alpha.log(), -grad / alpha[:, None]


def _adaptive(logits: Tensor, p: Tensor) -> Scored:
    alpha, rise = _acceptance(logits, p)
    kl, kl_grad = _forward_kl(logits, p)
    weight = (-LAMBDA_DECAY * alpha).exp()
    return weight * kl + (1 - weight) * (1 - alpha), weight[:, None] * kl_grad - (1 - weight)[:, None] * rise


def _first_choice(logits: Tensor, p: Tensor) -> Scored:
    wanted = torch.zeros_like(p).scatter_(1, p.argmax(-1, keepdim=True), 1.0)
    return _cross_entropy(logits, wanted)


OBJECTIVES: dict[str, Callable[[Tensor, Tensor], Scored]] = {
    "ce": _cross_entropy, "kl": _forward_kl, "tv": _total_variation, "lk-alpha": _log_acceptance,
    "lk-lambda": _adaptive, "choice": _first_choice}
