"""How the gradient of a batch is made of those of its parts: what that says of the loss."""

from __future__ import annotations

from typing import Literal

import torch

from paceline.torch._objective import Reduction
from paceline.torch._probe import Probe, distances

Reading = Literal["sum", "mean", "mean over items", "other mean", "none"]
Gradients = list[torch.Tensor | None]

# What such a loss means where another reduction was said: the kind of the cause, and its text.
READINGS: dict[tuple[Reading, Reduction], tuple[str, str]] = {
    ("sum", "mean"): (
        "reduction",
        'loss_fn returns a sum over its items, but the trainer was told "mean". Return the mean, or make the trainer with '
        'reduction="sum" and return the plain sum: step divides it by the number of items, so a loss that is divided already would count for less.',
    ),
    ("mean", "sum"): (
        "reduction",
        'loss_fn returns a mean over its items, but the trainer was told "sum". Make it with reduction="mean" (the default), or return the sum.',
    ),
    ("mean over items", "mean"): (
        "weight",
        "loss_fn returns the mean over its items, but weight= says that they do not count the same. Return the mean over the weight, one "
        "loss for each item, or leave weight= out.",
    ),
    ("other mean", "mean"): (
        "weight",
        "loss_fn returns a mean over something that not every item has as much of, such as unmasked tokens. Say how much each item has: "
        'weight=lambda batch: (batch["labels"] != -100).sum(1), for example.',
    ),
    ("other mean", "sum"): (
        "reduction",
        'loss_fn returns a mean, but the trainer was told "sum". Return the sum, or make the trainer with reduction="mean" and give weight=.',
    ),
}

_CLOSE = 1e-2  # of a coefficient: wide, since the parts' gradients may point almost the same way


def read_raw(
    whole: Gradients, first: Gradients, second: Gradients, *, items: float, weight: float, rounding: float
) -> Reading:
    """What kind of loss gives `whole` for two parts together that give `first` and `second` alone.

    Least squares: whole = a * first + b * second. For a sum both are 1; for a mean a is the first part's share, of the `items` or
    of the `weight`, and b the rest. A loss that couples items leaves a remainder that no a and b explain.
    """
    aa, ab, bb = _dot(first, first), _dot(first, second), _dot(second, second)
    ya, yb, yy = _dot(first, whole), _dot(second, whole), _dot(whole, whole)
    determinant = aa * bb - ab * ab
    if determinant <= 1e-6 * aa * bb or yy == 0:
        return "none"
    a, b = (ya * bb - yb * ab) / determinant, (yb * aa - ya * ab) / determinant
    remainder = max(0.0, yy - a * ya - b * yb)
    if remainder > max(10 * rounding, 1e-6) ** 2 * yy:
        return "none"
    if abs(a - 1) < _CLOSE and abs(b - 1) < _CLOSE:
        return "sum"
    if abs(a + b - 1) > _CLOSE or a < 0 or b < 0:
        return "none"
    if abs(a - weight) < _CLOSE:
        return "mean"
    return "mean over items" if abs(a - items) < _CLOSE else "other mean"


def couples_items(probe: Probe, items: int, tolerance: float) -> bool | None:
    """Whether it matters who is together with whom, at one size of slice; None if there are too few items to tell.

    Four parts p, q, r, s of equal size: without coupling f(p, q) + f(r, s) = f(p, s) + f(r, q), whatever f does with the size.
    """
    part = items // 4
    if part == 0:
        return None
    p, q, r, s = ((part * k, part * (k + 1)) for k in range(4))
    pairs = [probe.raw([left, right]).gradients for left, right in ((p, q), (r, s), (p, s), (r, q))]
    names = [str(index) for index in range(len(pairs[0]))]
    one, other = _sum(pairs[0], pairs[1]), _sum(pairs[2], pairs[3])
    return max(distances(one, other, names).values(), default=0.0) > tolerance


def _sum(left: Gradients, right: Gradients) -> Gradients:
    return [a if b is None else b if a is None else a + b for a, b in zip(left, right, strict=True)]


def _dot(left: Gradients, right: Gradients) -> float:
    total = 0.0
    for a, b in zip(left, right, strict=True):
        if a is not None and b is not None:
            a, b = (torch.view_as_real(one) if one.is_complex() else one for one in (a, b))
            total += float((a.double() * b.double()).sum())
    return total
