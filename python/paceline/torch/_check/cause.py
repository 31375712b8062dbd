"""Finds why slices do not add up to the batch: tries rules for what loss_fn returns, and names only those that hold."""

from __future__ import annotations

import dataclasses
from typing import Literal

import torch

from paceline.torch._batch.objective import Objective, Reduction
from paceline.torch._check.probe import Probe, distances, spans_of
from paceline.torch._check.report import Kind
from paceline.torch._check.weights import LossWatch, known_tensors, weights_of

Found = tuple[Kind, str]  # the kind of the cause, and its text
Reading = Literal["sum", "mean", "mean over items", "other mean", "none"]
_Gradients = list[torch.Tensor | None]

# For a kind of loss and the reduction that the trainer was made with: the kind of the cause, and its text.
_READINGS: dict[tuple[Reading, Reduction], tuple[Kind, str]] = {
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
        "Say how much each item has: weight=lambda batch: ... with one number for each. Nothing that was tried from the batch fits. If it is a function of a mean, as RMSE is, return the mean itself, whose minimum is the same.",
    ),
    ("other mean", "sum"): (
        "reduction",
        'loss_fn returns a mean, but the trainer was told "sum". Return the sum, or make the trainer with reduction="mean" and give weight=.',
    ),
}

_CLOSE = 1e-2  # tolerance of a coefficient; wide, since the gradients of the parts may be almost parallel


@dataclasses.dataclass
class Reader:
    """Compares what ``loss_fn`` itself returns for the whole batch with what it returns for parts."""

    probe: Probe
    sizes: list[list[int]]
    reduction: Reduction
    tolerance: float

    def read(self) -> Found:
        """The cause, the most certain first."""
        linear = self._linear()
        if linear is not None and linear is not _READINGS["other mean", "mean"]:
            return linear
        found = self._weighted()
        if found is not None:
            return found
        kind, text = linear or self._coupling()
        return kind, text + self._about_time()

    def _linear(self) -> Found | None:
        """Explain the gradients of the whole batch as a weighted sum of those of two parts."""
        items = self.probe.batch.size
        whole = self.probe.raw([(0, items)]).gradients
        # Several cuts are tried, because at one of them both parts may happen to have an average item.
        for cut in sorted({sizes[0] for sizes in self.sizes} | {max(1, items // 3)}):
            parts = [self.probe.raw([span]).gradients for span in ((0, cut), (cut, items))]
            weight = self.probe.objective.share(0, cut)
            reading = _read(whole, *parts, items=cut / items, weight=weight, rounding=self.tolerance)
            if (reading, self.reduction) in _READINGS:
                return _READINGS[reading, self.reduction]
        return None

    def _weighted(self) -> Found | None:
        if self.reduction == "sum":
            return None
        weight = self._weight()
        if weight is None:
            return None
        expression, described = weight
        says = (
            "weight= says something else"
            if self.probe.objective.is_weighted
            else "items have different amounts of these"
        )
        return (
            "weight",
            f"loss_fn returns a mean over {described}, and {says}. With weight=lambda batch: {expression} every split that was tried gives "
            "the gradients of the whole batch.",
        )

    def _weight(self) -> tuple[str, str] | None:
        """The first weight that makes slices add up: as an expression, and in words."""
        probe = self.probe
        with LossWatch() as watch:
            probe.raw([(0, probe.batch.size)])
        slices, known = _Slices(probe, self.sizes, self.tolerance), known_tensors(probe.loss_fn, probe.module)
        for expression, described, values in weights_of(probe.batch.tensors(), watch, known):
            if slices.add_up(Objective(None, len(values), "mean", values)):
                return expression, described
        return None

    def _about_time(self) -> str:
        """What to say of modules that take dimension 0 for time."""
        named = self.probe.module.named_modules()
        timed = [
            f"{name or 'the module'} ({type(part).__name__})"
            for name, part in named
            if getattr(part, "batch_first", None) is False
        ]
        if not timed:
            return ""
        return (
            f" {', '.join(timed[:3])} takes dimension 0, which is split, for time. If that is the item in the batch, the module needs batch_first=True. If dimension 1 is "
            "the item, say so, by batch_dim=1."
        )

    def _coupling(self) -> Found:
        try:
            coupled = _couples_items(self.probe, self.probe.batch.size, self.tolerance)
        except Exception:  # the batch cannot be put together in another order, or loss_fn refuses it
            coupled = None
        if coupled is None:
            return "unknown", "the items of the batch influence each other, or their number influences the result."
        if coupled:
            return (
                "coupled items",
                "the loss of an item depends on which other items are with it, as in contrastive and pairwise losses, or by statistics "
                "over the batch, or the loss is a function of a mean, as RMSE is. Such a loss is no sum over items, and no split of it is exact. Instead of a function of a mean "
                "return the mean itself, whose minimum is the same. If it adds up means over different things, such as "
                "labelled items and valid pixels, return these as a mapping, and give weight= a mapping with the weights of each.",
            )
        return (
            "batch size",
            "the result depends on how many items are in a slice: code that reads the batch size, or a term that is counted once for "
            "each slice, such as a regulariser in a sum. Divide by what belongs to the item, or add such a term to the gradients after the step.",
        )


class _Slices:
    """The slices of some splits, whose losses tell which objectives are worth a comparison of gradients."""

    def __init__(self, probe: Probe, sizes: list[list[int]], tolerance: float) -> None:
        self._probe, self._tolerance, self._all = probe, tolerance, (0, sum(sizes[0]))
        self._splits = [spans_of(one) for one in sizes]
        self._losses = {span: probe.raw([span]).loss for spans in ([self._all], *self._splits) for span in spans}

    def add_up(self, objective: Objective) -> bool:
        """Whether loss and gradients of the whole are the sum of those of the slices, as this objective says."""
        terms = {span: loss * factor for span, loss in self._losses.items() if (factor := objective.factor(*span, 0))}
        wanted = terms.get(self._all, 0.0)
        for spans in self._splits:
            found = [terms[span] for span in spans if span in terms]
            if not abs(sum(found) - wanted) <= self._tolerance * sum(map(abs, [wanted, *found])):
                return False
        probe = dataclasses.replace(self._probe, objective=objective)
        whole = probe.split([self._all]).gradients
        far = (distances(whole, probe.split(spans).gradients) for spans in self._splits)
        return max((one for found in far for one in found.values()), default=0.0) <= self._tolerance


def _read(
    whole: _Gradients, first: _Gradients, second: _Gradients, *, items: float, weight: float, rounding: float
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


def _couples_items(probe: Probe, items: int, tolerance: float) -> bool | None:
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


def _sum(left: _Gradients, right: _Gradients) -> _Gradients:
    """The sum of two lists of gradients. A gradient that one of them lacks counts as zero."""
    longest = max(len(left), len(right))
    left, right = ([*one, *[None] * (longest - len(one))] for one in (left, right))
    return [a if b is None else b if a is None else a + b for a, b in zip(left, right, strict=True)]


def _dot(left: _Gradients, right: _Gradients) -> float:
    total = 0.0
    for a, b in zip(left, right, strict=False):
        if a is not None and b is not None:
            a, b = (torch.view_as_real(one) if one.is_complex() else one for one in (a, b))
            total += float((a.double() * b.double()).sum())
    return total
