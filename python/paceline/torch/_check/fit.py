"""Finds the kind of a loss: how its value for the whole batch follows from its values for parts."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal

import torch

from paceline.torch._batch.objective import Reduction
from paceline.torch._check.probe import Probe, distances, spans_of
from paceline.torch._check.report import Kind

Reading = Literal["sum", "mean", "mean over items", "other mean", "none"]
Gradients = list[torch.Tensor | None]
Share = Callable[[int, int], float]

# For a kind of loss and the reduction that the trainer was made with: the kind of the cause, and its text.
READINGS: dict[tuple[Reading, Reduction], tuple[Kind, str]] = {
    ("sum", "mean"): (
        "reduction",
        'loss_fn returns a sum over its items, but the trainer was told "mean". Return the mean, or make the trainer with '
        'reduction="sum" and return the plain sum: step divides it by the number of items, so a loss that is divided already would count for less. '
        "To train on the sum itself, as for a VAE, also pass total=1: then nothing is divided, and the gradient is the one that the sum has on one "
        "device.",
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
        "loss_fn returns a mean over something that not every item has as much of, such as unmasked tokens, or the class weights of its labels. "
        "Say how much each item has: weight=lambda batch: ... with one number for each. Nothing that was tried from the batch fits.",
    ),
    ("other mean", "sum"): (
        "reduction",
        'loss_fn returns a mean, but the trainer was told "sum". Return the sum, or make the trainer with reduction="mean" and give weight=.',
    ),
}

_CLOSE = 1e-2  # tolerance of a coefficient; wide, since the gradients of the parts may be almost parallel

# For a loss f(mean over items): its name, the inverse of f, the derivative of the inverse, and how to get to a mean.
_CURVES: tuple[tuple[str, Callable[[float], float], Callable[[float], float], str], ...] = (
    (
        "the square root of a mean, as RMSE does",
        lambda loss: loss * loss,
        lambda loss: 2 * loss,
        "Return the mean itself (MSE, without the root), whose minimum is the same. For the gradient of the root divide each .grad by "
        "2 * loss.sqrt() after the step.",
    ),
    (
        "the logarithm of a mean",
        math.exp,
        math.exp,
        "Return the mean itself, whose minimum is the same. For the gradient of the logarithm divide each .grad by the loss after the step.",
    ),
    (
        "the exponential of a mean, as perplexity does",
        math.log,
        lambda loss: 1 / loss,
        "Return the mean itself, whose minimum is the same. For the gradient of the exponential multiply each .grad by loss.exp() after the step.",
    ),
)


class Fit:
    """Tests rules that explain the loss of the whole batch by the losses of its slices, for some splits."""

    def __init__(self, probe: Probe, splits: Sequence[Sequence[int]], tolerance: float) -> None:
        self._probe = probe
        self._tolerance = tolerance
        self._splits = [spans_of(sizes) for sizes in splits]
        self._whole = probe.raw([(0, sum(splits[0]))])
        self._losses = {span: probe.raw([span]).loss for spans in self._splits for span in spans}

    def is_mean_over(self, share: Share) -> bool:
        """Whether loss and gradients of the whole are the mean of those of the slices, weighted by their `share`."""
        return self._holds(share, lambda loss: loss, lambda loss: 1.0)

    def curve(self, share: Share) -> str | None:
        """Text that says which function of a mean the loss is, and what to do. None if it is none of the known ones."""
        for function, inverse, slope, cure in _CURVES:
            if self._holds(share, inverse, slope):
                return f"loss_fn returns {function}. The mean over the batch can be put together from slices, its function cannot. {cure}"
        return None

    def _holds(self, share: Share, inverse: Callable[[float], float], slope: Callable[[float], float]) -> bool:
        try:
            wanted = inverse(self._whole.loss)
            for spans in self._splits:
                terms = [share(*span) * inverse(self._losses[span]) for span in spans if share(*span)]
                if not abs(sum(terms) - wanted) <= self._tolerance * sum(map(abs, [wanted, *terms])):
                    return False
            whole = [None if one is None else one * slope(self._whole.loss) for one in self._whole.gradients]
            for spans in self._splits:
                total: Gradients = [None] * len(whole)
                for span in spans:
                    if share(*span):
                        term = self._probe.raw([span], share(*span) * slope(self._losses[span])).gradients
                        total = _sum(total, term)
                if max(distances(whole, total).values(), default=0.0) > self._tolerance:
                    return False
        except (ArithmeticError, ValueError):  # the inverse has no value there, so the loss is not this function
            return False
        return True


def read_raw(
    whole: Gradients, first: Gradients, second: Gradients, *, items: float, weight: float, rounding: float
) -> Reading:
    """The kind of a loss, from its gradients for the `whole` batch and for its `first` and `second` part.

    Solves whole = a * first + b * second by least squares. For a sum, a and b are 1. For a mean, a is the first part's share of the
    `items` or of the `weight`, and b is the rest. If a loss couples items, a remainder is left that no a and b explain.
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
    """Whether an item's loss depends on the other items of its slice. None if there are too few items to find out.

    Uses four parts p, q, r, s of equal size. Without coupling f(p, q) + f(r, s) = f(p, s) + f(r, q), whatever f does with the size.
    """
    part = items // 4
    if part == 0:
        return None
    p, q, r, s = ((part * k, part * (k + 1)) for k in range(4))
    pairs = [probe.raw([left, right]).gradients for left, right in ((p, q), (r, s), (p, s), (r, q))]
    one, other = _sum(pairs[0], pairs[1]), _sum(pairs[2], pairs[3])
    return max(distances(one, other).values(), default=0.0) > tolerance


def _sum(left: Gradients, right: Gradients) -> Gradients:
    """The sum of two lists of gradients. A gradient that one of them lacks counts as zero."""
    longest = max(len(left), len(right))
    left, right = ([*one, *[None] * (longest - len(one))] for one in (left, right))
    return [a if b is None else b if a is None else a + b for a, b in zip(left, right, strict=True)]


def _dot(left: Gradients, right: Gradients) -> float:
    total = 0.0
    for a, b in zip(left, right, strict=False):
        if a is not None and b is not None:
            a, b = (torch.view_as_real(one) if one.is_complex() else one for one in (a, b))
            total += float((a.double() * b.double()).sum())
    return total
