"""Items dealt out to ranks by what they cost."""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from paceline import InvalidArgument
from paceline._words import plural
from paceline.plan import split_items, split_padded

Cost = Callable[[float], float] | Sequence[float] | torch.Tensor | None

# Ranks whose speeds differ by less than this count as equally fast.
_ALIKE = 1e-3


class ByCost:
    """What each item of a data set costs, and how to deal some of them out so that all ranks finish together.

    Parameters
    ----------
    lengths
        One number per item.
    cost
        None: an item costs its length. A function of the length, or one number per item.
    padded
        Whether a rank pads its items to the longest of them, so that each costs as much as this one.

    Raises
    ------
    InvalidArgument
        For lengths and costs that are no numbers, of another number than items, or negative or not finite.
    """

    # Of work in an average batch without padding: shares of work are integers, as shares of items are.
    UNITS = 1_000_000

    def __init__(self, lengths: Sequence[float] | torch.Tensor, cost: Cost, padded: bool) -> None:
        self.costs = _costs(lengths, cost)
        self.padded = padded
        if padded:
            _check_longest(_numbers(lengths), self.costs)
        self._mean = max(sum(self.costs) / max(1, len(self.costs)), 1e-300)

    def parts(self, batch: list[int], speeds: Sequence[float], number: int) -> list[list[int]]:
        """The items of each rank: none where the speed is 0, and else at least one if there are enough. `number`: which batch of the training it is."""
        if not all(speeds):
            found = iter(self.parts(batch, [speed for speed in speeds if speed], number))
            return [next(found) if speed else [] for speed in speeds]
        costs = [self.costs[index] for index in batch]
        split = (split_padded if self.padded else split_items)(costs, [(0.0, 1.0 / speed) for speed in speeds])
        parts = [[batch[i] for i in items] for items in split.items]
        if self.padded:
            return _in_turns(parts, speeds, number)
        # DDP and FSDP wait for the gradient of every rank, and a rank that is to be measured has to run something. So a rank
        # without items gets the cheapest item of the rank that has most. This happens with very unequal speeds, or costs of zero.
        for part in parts:
            giver = max(parts, key=len)
            if not part and len(giver) > 1:
                cheapest = min(giver, key=lambda index: self.costs[index])
                giver.remove(cheapest)
                part.append(cheapest)
        return parts

    def units(self, parts: Sequence[Sequence[int]], batch_size: int) -> tuple[int, ...]:
        """The work of each rank, in units of which an average batch of so many items has `UNITS` without padding."""
        each = ([self.costs[index] for index in part] for part in parts)
        work = (max(costs, default=0.0) * len(costs) if self.padded else sum(costs) for costs in each)
        return tuple(round(self.UNITS * one / (self._mean * batch_size)) for one in work)

    def mark(self) -> int:
        """A checksum."""
        return zlib.crc32(array("d", [*self.costs, float(self.padded)]).tobytes())


def _in_turns(parts: list[list[int]], speeds: Sequence[float], number: int) -> list[list[int]]:
    # split_padded gives the longest items to the first of equal ranks. Here equal ranks take turns: few long items need
    # another amount of memory than many short ones, and may take another time than the costs say.
    turned = list(parts)
    left = list(range(len(parts)))
    while left:
        alike = [rank for rank in left if abs(speeds[rank] / speeds[left[0]] - 1) <= _ALIKE]
        for k, rank in enumerate(alike):
            turned[rank] = parts[alike[(k - number) % len(alike)]]
        left = [rank for rank in left if rank not in alike]
    return turned


def _check_longest(lengths: list[float], costs: list[float]) -> None:
    for (shorter, cost), (longer, less) in pairwise(sorted(zip(lengths, costs, strict=True))):
        if less < cost and longer > shorter:
            raise InvalidArgument(
                f"cost: an item of length {longer:g} costs {less:g}, one of length {shorter:g} costs {cost:g}. With padded=True all of a rank's items "
                "are padded to its longest, which must be the costliest."
            )


def _costs(lengths: Sequence[float] | torch.Tensor, cost: Cost) -> list[float]:
    values = _numbers(lengths)
    if callable(cost):
        values = [float(cost(length)) for length in values]
    elif cost is not None:
        costs = _numbers(cost)
        if len(costs) != len(values):
            raise InvalidArgument(
                f"cost has {plural(len(costs), 'entry', 'entries')} for {plural(len(values), 'length')}; pass one per item"
            )
        values = costs
    for index, value in enumerate(values):
        if not 0.0 <= value < float("inf"):
            raise InvalidArgument(f"the cost of item {index} is {value}; it must be finite and not negative")
    return values


def _numbers(values: Any) -> list[float]:
    if hasattr(values, "tolist"):  # a tensor, or an array of NumPy
        if values.ndim != 1:
            raise InvalidArgument(f"lengths and cost are one number per item, not of shape {tuple(values.shape)}")
        values = values.tolist()
    try:
        return [float(value) for value in values]
    except (TypeError, ValueError) as error:
        raise InvalidArgument(f"lengths and cost are one number per item: {error}") from None
