"""A loss of several terms, each of which is a weighted mean of its own."""

from __future__ import annotations

import copy
import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch

from paceline import InvalidArgument
from paceline.torch._batch.objective import Check, Objective, Pin, Reduction, Total, Weight, accept, keep


def objective_over(
    batch: Any,
    size: int,
    reduction: Reduction,
    weight: Weight | None,
    pin: Pin = keep,
    check: Check = accept,
    total: Total | None = None,
    part: bool = False,
) -> Objective:
    """The objective over a batch of `size` items, or over a `part` of it: with several terms if `weight` is a mapping.

    Raises
    ------
    InvalidArgument
        As `Objective`, and if `total` names what `weight` does not.
    """
    if weight is not None and isinstance(weight, Mapping):
        return Terms(batch, size, reduction, weight, pin, check, total, part)
    if total is not None and isinstance(total, Mapping):
        raise InvalidArgument(
            "total: a mapping, and weight= is none. Name the terms of the loss in weight=, with None for those in which every item counts 1."
        )
    return Objective(batch, size, reduction, weight, pin, check, total, part)


class Terms(Objective):
    """Several objectives over one batch, by the names of the terms. ``loss_fn`` returns a mapping with one loss per name.

    The objective is their sum. Each term is divided by its own total weight W, or by its own `total`. A term that no item of the batch has
    weight in adds nothing. Of a batch's `part`, the caller gives the weights of the whole batch to `divide`, before anything runs.
    """

    def __init__(
        self,
        batch: Any,
        size: int,
        reduction: Reduction,
        weight: Mapping[str, Any],
        pin: Pin,
        check: Check,
        total: Total | None,
        part: bool,
    ) -> None:
        if not weight or not all(isinstance(name, str) for name in weight):
            raise InvalidArgument(
                f"weight: a mapping with the keys {list(weight)}; it needs a name for each term that loss_fn returns."
            )
        totals = dict(total) if isinstance(total, Mapping) else dict.fromkeys(weight, total)
        unknown = [name for name in totals if name not in weight]
        if unknown:
            raise InvalidArgument(f"total: it names {unknown[0]!r}, and the terms in weight= are {', '.join(weight)}.")
        super().__init__(None, size, reduction, None, part=True)
        self.parts = {
            name: Objective(batch, size, reduction, one, pin, check, totals.get(name), True, name)
            for name, one in weight.items()
        }
        self.total, self.divisor = 1.0, 1.0  # the terms are divided
        self.weights: list[float] = [one.weight for one in self.parts.values()]
        self.weight, self.magnitude = 1, sum(one.magnitude for one in self.parts.values())
        if not part:
            self.divide(self.weights)

    @property
    def described(self) -> str:
        """The names of the terms and their totals. Equal on all ranks."""
        return repr([(name, one.total) for name, one in self.parts.items()])

    def divide(self, weights: list[float]) -> None:
        """Divide each term by its weight over the whole batch, where the caller has given no total."""
        for (name, one), weight in zip(self.parts.items(), weights, strict=True):
            if weight < 0 or (weight == 0 and one.magnitude and one.total is None):
                raise InvalidArgument(
                    f"weight[{name!r}]: the weights of the batch sum to {weight}; the term is divided by that sum, so it must be positive."
                )
            one.divisor = one.total or weight or 1
        if not any(weights) and any(one.total is None for one in self.parts.values()):
            raise InvalidArgument("weight: no item has weight in any term. Skip batches without weight.")

    def _with(self, change: Callable[[Objective], Objective]) -> Terms:
        there = copy.copy(self)
        there.parts = {name: change(one) for name, one in self.parts.items()}
        return there

    def ordered(self, order: torch.Tensor, pin: Pin = keep) -> Objective:
        return self._with(lambda one: one.ordered(order, pin))

    def part(self, begin: int, end: int) -> Objective:
        return self._with(lambda one: one.part(begin, end))

    @property
    def is_weighted(self) -> bool:
        return any(one.is_weighted for one in self.parts.values())

    @property
    def divides_sums(self) -> bool:
        return any(one.divides_sums for one in self.parts.values())

    def idle(self, begin: int, end: int) -> bool:
        return all(one.idle(begin, end) for one in self.parts.values())

    def share(self, begin: int, end: int) -> float:
        raise TypeError("Terms: a slice has another share in each term")

    def of_extra(self, path: str) -> Objective:
        for name, one in self.parts.items():
            if path == f"extras[{name!r}]":
                return one
        return Objective(None, self.size, "mean", None)

    def term(self, loss: Any, begin: int, end: int, *, all_run: bool = False) -> torch.Tensor:
        names = ", ".join(map(repr, self.parts))
        if not isinstance(loss, Mapping):
            raise InvalidArgument(
                f"loss_fn returned {type(loss).__name__}, and weight= names several terms: a mapping with a loss for each of {names} is needed."
            )
        # A mean over no item of the slice may be 0/0, so it is left out, and loss_fn may leave it out, too.
        counting = [name for name, one in self.parts.items() if all_run or not one.idle(begin, end)]
        for name in (*loss, *counting):
            if name not in self.parts or name not in loss:
                what = "which weight= does not name" if name in loss else "and it has weight in this slice"
                raise InvalidArgument(
                    f"loss_fn returned {', '.join(map(repr, loss)) or 'nothing'} {'with' if name in loss else 'without'} {name!r}, {what}. The terms "
                    f"are {names}."
                )
        terms = [self.parts[name].term(loss[name], begin, end, all_run=all_run) for name in counting]
        return functools.reduce(operator.add, terms)
