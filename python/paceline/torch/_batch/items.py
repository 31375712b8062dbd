"""Batches whose items do not cost the same: the order in which the devices run them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from paceline import InvalidArgument
from paceline._core.engine import BatchPlan
from paceline._words import plural
from paceline.torch._batch.batch import Batch
from paceline.torch._batch.moving import Move, same
from paceline.torch._batch.objective import Check, Objective, Pin, accept

Cost = torch.Tensor | Callable[[Any], torch.Tensor]

_MOST_NAMED = 4  # items of a micro-batch that an error names


def costs_of(cost: Cost | None, batch: Any, size: int, check: Check = accept) -> list[float] | None:
    """One number per item, or None if all items cost the same.

    Raises
    ------
    InvalidArgument
        If the costs are not 1-D with one per item, if one is negative or not finite, or if `check` refuses them.
    """
    if cost is None:
        return None
    if not isinstance(cost, torch.Tensor) and not callable(cost):
        raise InvalidArgument(
            f"cost: {type(cost).__name__}; a 1-D tensor with one cost per item, or a callable that makes one from the batch, is needed."
        )
    values = cost if isinstance(cost, torch.Tensor) else cost(batch)
    if not isinstance(values, torch.Tensor) or values.dim() != 1 or values.shape[0] != size or values.is_complex():
        got = (
            f"{values.dtype} of shape {tuple(values.shape)}"
            if isinstance(values, torch.Tensor)
            else type(values).__name__
        )
        raise InvalidArgument(
            f"cost: {got} for a batch of {plural(size, 'item')}; a 1-D tensor with one real cost per item is needed."
        )
    check(values, "cost")
    values = values.detach().to("cpu", torch.float64)
    bad = ~(values.isfinite() & (values >= 0))
    if bool(bad.any()):
        item = int(bad.nonzero()[0])
        raise InvalidArgument(f"cost: item {item} costs {values[item].item()}; costs must be finite and not negative.")
    numbers: list[float] = values.tolist()
    return numbers


class OrderedBatch:
    """A batch in the order of a plan. Positions ``[begin, end)`` are items from anywhere in the batch, gathered when they are needed."""

    def __init__(self, batch: Batch, order: torch.Tensor, costs: list[float]) -> None:
        self._batch = batch
        self._order = order
        self._costs = costs  # by position
        self.size = batch.size
        self.item_shapes = batch.item_shapes

    def padded_to(self, begin: int, end: int) -> float:
        """Like `Batch.padded_to`: the largest cost, since a slice is trimmed to its longest item."""
        return max(self._costs[begin:end])

    def slice(self, begin: int, end: int, move: Move = same) -> Any:
        """Like `Batch.slice`, by position."""
        return self._batch.gathered(self._order[begin:end], move)

    def slice_apart(self, begin: int, end: int, move: Move = same) -> Any:
        """Like `Batch.slice_apart`. Slices are copies."""
        return self.slice(begin, end, move)

    def count_edits(self) -> None:
        """Like `Batch.count_edits`. Changes of copies change nothing else."""

    def rows(self, begin: int, end: int) -> torch.Tensor:
        """Like `Batch.rows`."""
        return self._order[begin:end]

    def gathered(self, rows: torch.Tensor, move: Move = same) -> Any:
        """Like `Batch.gathered`, by the caller's indices."""
        return self._batch.gathered(rows, move)

    def described(self, begin: int, end: int) -> str:
        """The items in words."""
        items = self._order[begin:end].tolist()
        named = ", ".join(map(str, items[:_MOST_NAMED]))
        if len(items) == 1:
            return f"item {named} of the batch"
        return f"items {named}{', ...' if len(items) > _MOST_NAMED else ''} of the batch ({len(items)} of similar cost)"


class Items:
    """A planned batch: its slices, its weights and its outputs, each in the right order."""

    def __init__(
        self, order: list[int], batch: Batch, pin: Pin, costs: list[float] | None = None, plan: BatchPlan | None = None
    ) -> None:
        self.plan = plan  # None where a ledger's claims say what runs
        costs = costs or [1.0] * len(order)
        self._order = torch.tensor(order, device="cpu")
        self.batch = OrderedBatch(batch, pin(self._order), [costs[item] for item in order])
        self._pin = pin

    def objective(self, objective: Objective) -> Objective:
        """The same objective, for slices by position."""
        return objective.ordered(self._order, self._pin)

    def restored(self, output: torch.Tensor) -> torch.Tensor:
        """Rows by position, in the caller's order."""
        position = torch.empty_like(self._order)
        position[self._order] = torch.arange(len(position), device="cpu")
        return output.index_select(0, position.to(output.device))
