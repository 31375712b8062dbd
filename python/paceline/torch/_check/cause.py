"""Finds why slices do not add up to the batch: tries rules for what loss_fn returns, and names only those that hold."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from paceline.torch._batch.batch import Batch, Move, same
from paceline.torch._batch.objective import Objective, Reduction
from paceline.torch._check.fit import READINGS, Fit, Share, couples_items, read_raw
from paceline.torch._check.probe import Probe
from paceline.torch._check.weights import LossWatch, known_tensors, weights_of

Found = tuple[str, str]  # the kind of the cause, and its text


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
        along, names = AlongDimension1(self.probe.batch), time_first(self.probe.module)
        parts = dict(self.probe.module.named_modules())
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
            with batch_first(self.probe.module):
                if self._adds_up(self.probe.batch, self.probe.batch.size):
                    return (
                        "layout",
                        f"{modules} takes dimension 0, which is split and which is the item in the batch, for time. With batch_first=True every "
                        "split that was tried gives the gradients of the whole batch.",
                    )
        return None

    def _adds_up(self, batch: Any, items: int) -> bool:
        """Whether slices of a batch that is cut in this way add up: as the trainer adds them, or with a weight that can be found."""
        objective = self.probe.objective if batch is self.probe.batch else Objective(None, items, "mean", None)
        share: Share = (lambda begin, end: 1.0) if self.reduction == "sum" else objective.share
        noise = self.probe.noise.anew(items)
        probe = dataclasses.replace(self.probe, batch=batch, objective=objective, noise=noise)
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
        kind = "unknown"
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


class AlongDimension1:
    """A batch that is cut along dimension 1. `size` is its length, or 0 if the tensors do not agree about it.

    Tensors of one dimension go along unchanged.
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
        return [
            (f"{path}.transpose(0, 1)", one.transpose(0, 1)) for path, one in self._batch.tensors() if one.dim() > 1
        ]


def time_first(module: nn.Module) -> list[str]:
    """The names of the submodules that expect time in dimension 0."""
    return [name for name, part in module.named_modules() if getattr(part, "batch_first", None) is False]


@contextlib.contextmanager
def batch_first(module: nn.Module) -> Iterator[None]:
    """Let these submodules expect the item in dimension 0."""
    parts = [module.get_submodule(name) for name in time_first(module)]
    try:
        for part in parts:
            part.batch_first = True  # type: ignore[assignment]
        yield
    finally:
        for part in parts:
            part.batch_first = False  # type: ignore[assignment]
