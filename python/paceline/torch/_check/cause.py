"""Finds why slices do not add up to the batch: tries rules for what loss_fn returns, and names only those that hold."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from paceline.torch._batch.batch import Batch
from paceline.torch._batch.moving import Move, same
from paceline.torch._batch.objective import Objective, Reduction
from paceline.torch._check.fit import READINGS, Fit, Share, couples_items, read_raw
from paceline.torch._check.probe import Probe
from paceline.torch._check.report import Kind
from paceline.torch._check.weights import LossWatch, known_tensors, weights_of

Found = tuple[Kind, str]  # the kind of the cause, and its text


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
        if linear is not None and linear is not READINGS["other mean", "mean"]:
            return linear
        return self._fitting() or self._layout() or linear or self._coupling()

    def _linear(self) -> Found | None:
        """Explain the gradients of the whole batch as a weighted sum of those of two parts."""
        items = self.probe.batch.size
        whole = self.probe.raw([(0, items)]).gradients
        # Several cuts are tried, because at one of them both parts may happen to have an average item.
        for cut in sorted({sizes[0] for sizes in self.sizes} | {max(1, items // 3)}):
            parts = [self.probe.raw([span]).gradients for span in ((0, cut), (cut, items))]
            weight = self.probe.objective.share(0, cut)
            reading = read_raw(whole, *parts, items=cut / items, weight=weight, rounding=self.tolerance)
            if (reading, self.reduction) in READINGS:
                return READINGS[reading, self.reduction]
        return None

    def _fitting(self) -> Found | None:
        if self.reduction == "sum":
            return None
        fit = Fit(self.probe, self.sizes, self.tolerance)
        curve = fit.curve(self.probe.objective.share)
        if curve is not None:
            return "function of a mean", curve
        weight = self._weight(fit, self.probe)
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

    def _weight(self, fit: Fit, probe: Probe) -> tuple[str, str] | None:
        """The first weight that makes slices add up: as an expression, and in words."""
        with LossWatch() as watch:
            probe.raw([(0, probe.batch.size)])
        known = known_tensors(probe.loss_fn, probe.module)
        for expression, described, values in weights_of(probe.batch.tensors(), watch, known):
            if fit.is_mean_over(Objective(None, len(values), "mean", values).share):
                return expression, described
        return None

    def _layout(self) -> Found | None:
        """Find out whether dimension 1 is the item, in the batch or for the module."""
        named = self.probe.module.named_modules()
        timed = [(name, part) for name, part in named if getattr(part, "batch_first", None) is False]
        modules = ", ".join(f"{name or 'the module'} ({type(part).__name__})" for name, part in timed[:3])
        if self._adds_up_turned():
            first = f", or batch_first=True for {modules} where dimension 0 is the item already" if timed else ""
            return (
                "layout",
                "dimension 0 of the batch, which is split, is not the item: split along dimension 1 the same batch gives the gradients of the "
                "whole. Say so, by batch_dim=1. Or pass it with the item first, x.transpose(0, 1), and transpose it back inside loss_fn if the module wants [time, batch]"
                f"{first}.",
            )
        try:
            for _, part in timed:
                part.batch_first = True
            if timed and self._adds_up(self.probe):
                return (
                    "layout",
                    f"{modules} takes dimension 0, which is split and which is the item in the batch, for time. With batch_first=True every "
                    "split that was tried gives the gradients of the whole batch.",
                )
        finally:
            for _, part in timed:
                part.batch_first = False
        return None

    def _adds_up_turned(self) -> bool:
        """Whether slices along dimension 1 add up."""
        batch = _AlongDimension1(self.probe.batch) if self.probe.batch.may_be_turned else None
        if batch is None or batch.size < 2:
            return False
        probe = dataclasses.replace(self.probe, batch=batch, objective=Objective(None, batch.size, "mean", None))
        return self._adds_up(probe)

    def _adds_up(self, probe: Probe) -> bool:
        """Whether slices of the probe's batch add up: as the trainer adds them, or with a weight that can be found."""
        items = probe.batch.size
        share: Share = (lambda begin, end: 1.0) if self.reduction == "sum" else probe.objective.share
        noise = probe.noise.anew(items)
        probe = dataclasses.replace(probe, noise=noise)
        splits = [[items // 2, items - items // 2], *([[1, items - 1]] if items > 2 else [])]
        try:
            fit = Fit(probe, splits, self.tolerance)
            if noise.lost:
                return False
            return fit.is_mean_over(share) or (self.reduction == "mean" and self._weight(fit, probe) is not None)
        except Exception:  # loss_fn does not accept such slices
            return False

    def _coupling(self) -> Found:
        try:
            coupled = couples_items(self.probe, self.probe.batch.size, self.tolerance)
        except Exception:  # the batch cannot be put together in another order, or loss_fn refuses it
            coupled = None
        if coupled is None:
            return "unknown", "the items of the batch influence each other, or their number influences the result."
        if coupled:
            return (
                "coupled items",
                "the loss of an item depends on which other items are with it, as in contrastive and pairwise losses, or by statistics "
                "over the batch. Such a loss is no sum over items, and no split of it is exact. If it adds up means over different things, such as "
                "labelled items and valid pixels, return these as a mapping, and give weight= a mapping with the weights of each.",
            )
        return (
            "batch size",
            "the result depends on how many items are in a slice: code that reads the batch size, or a term that is counted once for "
            "each slice, such as a regulariser in a sum. Divide by what belongs to the item, or add such a term to the gradients after the step.",
        )


class _AlongDimension1:
    """A batch that is cut along dimension 1. `size` is its length, or 0 if the tensors disagree about it.

    Tensors of one dimension go along unchanged: in a batch [time, item] they have one entry for each time.
    """

    def __init__(self, batch: Batch) -> None:
        self._batch = batch
        sizes = {tensor.shape[1] for _, tensor in batch.tensors() if tensor.dim() > 1}
        self.size = sizes.pop() if len(sizes) == 1 else 0

    def slice(self, begin: int, end: int, move: Move = same) -> Any:
        """Like `Batch.slice`."""
        return self._batch.cut(lambda tensor: tensor[:, begin:end] if tensor.dim() > 1 else tensor, move)

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Like `Batch.rows`."""
        return torch.arange(begin, end)

    def tensors(self) -> list[tuple[str, torch.Tensor]]:
        """Like `Batch.tensors`, with the item first."""
        tensors = [(path, tensor) for path, tensor in self._batch.tensors() if tensor.dim() > 1]
        return [(f"{path}.transpose(0, 1)", tensor.transpose(0, 1)) for path, tensor in tensors]
