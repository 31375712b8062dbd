"""Finds why slices do not add up to the batch: tries rules for what loss_fn returns, and names only those that hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from paceline.torch._batch.batch import Batch
from paceline.torch._batch.objective import Objective, Reduction
from paceline.torch._check.fit import READINGS, Fit, Share, couples_items, read_raw
from paceline.torch._check.layout import AlongDimension1, batch_first, time_first
from paceline.torch._check.probe import Probe
from paceline.torch._check.report import Kind
from paceline.torch._check.weights import LossWatch, Tensors, known_tensors, weights_of

Found = tuple[Any, str]  # the kind of the cause, and its text


class Reader:
    """Compares what ``loss_fn`` itself returns for the whole batch with what it returns for parts."""

    def __init__(
        self,
        probe: Probe,
        batch: Batch,
        sizes: list[list[int]],
        objective: Objective,
        reduction: Reduction,
        tolerance: float,
    ) -> None:
        self._probe = probe
        self._batch = batch
        self._sizes = sizes
        self._objective = objective
        self._reduction: Reduction = reduction
        self._tolerance = tolerance

    def read(self) -> Found:
        """The cause, the most certain first."""
        linear = self._linear()
        if linear is not None and linear is not READINGS["other mean", "mean"]:
            return linear
        return self._fitting() or self._layout() or linear or self._coupling()

    def _linear(self) -> Found | None:
        """Explain the gradients of the whole batch as a weighted sum of those of two parts."""
        items = self._batch.size
        whole = self._probe.raw([(0, items)]).gradients
        # Several cuts are tried, because at one of them both parts may happen to have an average item.
        for cut in sorted({sizes[0] for sizes in self._sizes} | {max(1, items // 3)}):
            parts = [self._probe.raw([span]).gradients for span in ((0, cut), (cut, items))]
            weight = self._objective.share(0, cut)
            reading = read_raw(whole, *parts, items=cut / items, weight=weight, rounding=self._tolerance)
            if (reading, self._reduction) in READINGS:
                return READINGS[reading, self._reduction]
        return None

    def _fitting(self) -> Found | None:
        if self._reduction == "sum":
            return None
        fit = Fit(self._probe, self._sizes, self._tolerance)
        curve = fit.curve(self._objective.share)
        if curve is not None:
            return "function of a mean", curve
        weight = self._weight(fit, self._probe, self._batch.tensors())
        if weight is None:
            return None
        expression, described = weight
        says = "weight= says something else" if self._objective.is_weighted else "items have different amounts of these"
        return (
            "weight",
            f"loss_fn returns a mean over {described}, and {says}. With weight=lambda batch: {expression} every split that was tried gives "
            "the gradients of the whole batch.",
        )

    def _weight(self, fit: Fit, probe: Probe, tensors: Tensors) -> tuple[str, str] | None:
        """The first weight that makes slices add up: as an expression, and in words."""
        with LossWatch() as watch:
            probe.raw([(0, probe.batch.size)])
        known = known_tensors(probe.loss_fn, probe.module)
        for expression, described, values in weights_of(tensors, watch, known):
            if fit.is_mean_over(Objective(None, len(values), "mean", values).share):
                return expression, described
        return None

    def _layout(self) -> Found | None:
        """Find out whether dimension 1 is the item, in the batch or for the module."""
        along, names = AlongDimension1(self._batch), time_first(self._probe.module)
        parts = dict(self._probe.module.named_modules())
        modules = ", ".join(f"{name or 'the module'} ({type(parts[name]).__name__})" for name in names[:3])
        if along.size > 1 and self._adds_up(along, along.size):
            first = f", or batch_first=True for {modules} where dimension 0 is the item already" if names else ""
            return (
                "layout",
                "dimension 0 of the batch, which is split, is not the item: split along dimension 1 the same batch gives the gradients of the "
                "whole. Pass it with the item first, x.transpose(0, 1), and transpose it back inside loss_fn if the module wants [time, batch]"
                f"{first}.",
            )
        if names:
            with batch_first(self._probe.module):
                if self._adds_up(self._batch, self._batch.size):
                    return (
                        "layout",
                        f"{modules} takes dimension 0, which is split and which is the item in the batch, for time. With batch_first=True every "
                        "split that was tried gives the gradients of the whole batch.",
                    )
        return None

    def _adds_up(self, batch: Any, items: int) -> bool:
        """Whether slices of a batch that is cut in this way add up: as the trainer adds them, or with a weight that can be found."""
        objective = self._objective if batch is self._batch else Objective(None, items, "mean", None)
        share: Share = (lambda begin, end: 1.0) if self._reduction == "sum" else objective.share
        probe = self._probe.over(batch, objective, self._probe.noise.anew(items))
        splits: list[Sequence[int]] = [[items // 2, items - items // 2]]
        if items > 2:
            splits.append([1, items - 1])
        try:
            fit = Fit(probe, splits, self._tolerance)
            return not probe.noise.lost and (fit.is_mean_over(share) or self._weighted(fit, probe, batch))
        except Exception:  # loss_fn does not accept such slices
            return False

    def _weighted(self, fit: Fit, probe: Probe, batch: Any) -> bool:
        return self._reduction == "mean" and self._weight(fit, probe, batch.tensors()) is not None

    def _coupling(self) -> Found:
        try:
            coupled = couples_items(self._probe, self._batch.size, self._tolerance)
        except Exception:  # the batch cannot be put together in another order, or loss_fn refuses it
            coupled = None
        kind: Kind = "unknown"
        text = "the items of the batch influence each other, or their number influences the result."
        if coupled:
            kind = "coupled items"
            text = (
                "the loss of an item depends on which other items are with it, as in contrastive and pairwise losses, or by statistics "
                "over the batch. Such a loss is no sum over items, and no split of it is exact."
            )
        elif coupled is not None:
            kind = "batch size"
            text = (
                "the result depends on how many items are in a slice: code that reads the batch size, or a term that is counted once for "
                "each slice, such as a regulariser in a sum. Divide by what belongs to the item, or add such a term to the gradients after the step."
            )
        return kind, text
