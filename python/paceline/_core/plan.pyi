"""
Pure decisions: cost models, splits of batches and of items.
"""

from __future__ import annotations

import collections.abc
import typing

__all__: list[str] = [
    "CostModel",
    "ItemCostFit",
    "ItemSplit",
    "Split",
    "correction_floor",
    "fit_item_cost",
    "split_batch",
    "split_even",
    "split_items",
    "split_padded",
    "split_weighted",
]

class CostModel:
    """
    Seconds that a device needs for a share of n items; nondecreasing in n.

    Make one with `affine`. `CostModel()` costs nothing. Immutable.
    """
    @staticmethod
    def affine(
        fixed_seconds: typing.SupportsFloat | typing.SupportsIndex,
        per_item_seconds: typing.SupportsFloat | typing.SupportsIndex,
    ) -> CostModel:
        """
        `fixed_seconds + per_item_seconds * n`.

        Raises
        ------
        InvalidArgument
            If a coefficient is negative or not finite.
        """
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...
    def __init__(self) -> None: ...
    def __repr__(self) -> str: ...
    def items_within(
        self,
        budget_seconds: typing.SupportsFloat | typing.SupportsIndex,
        limit: typing.SupportsInt | typing.SupportsIndex,
    ) -> int:
        """
        The largest n in [0, limit] with seconds(n) <= budget_seconds; -1 if even n = 0 does not fit.
        """
    def scaled(self, factor: typing.SupportsFloat | typing.SupportsIndex) -> CostModel:
        """
        The same shape on a device `factor` times slower.
        """
    def seconds(self, items: typing.SupportsInt | typing.SupportsIndex) -> float:
        """
        Seconds for a share of `items` items.
        """
    @property
    def fixed_seconds(self) -> float:
        """
        Seconds that do not depend on the size.
        """
    @property
    def per_item_seconds(self) -> float:
        """
        Seconds that each further item costs.
        """

class Split:
    """
    The shares of one step, and when the models expect the last device to finish.
    """
    def __repr__(self) -> str: ...
    @property
    def makespan_seconds(self) -> float:
        """
        When the models expect the last device to finish.
        """
    @property
    def shares(self) -> list[int]:
        """
        Items per device; they sum to the batch.
        """

class ItemSplit:
    """
    The items of each device, and when the models expect the last device to finish.
    """
    def __repr__(self) -> str: ...
    @property
    def gap(self) -> float:
        """
        (makespan - lower bound) / lower bound.
        """
    @property
    def items(self) -> list[list[int]]:
        """
        Per device, the indices of its items, ascending.
        """
    @property
    def loads(self) -> list[float]:
        """
        Per device, the sum of its items' costs; for `split_padded`, their count times the largest cost.
        """
    @property
    def lower_bound_seconds(self) -> float:
        """
        No split has a smaller makespan. Equal to the makespan if the split is proven best.
        """
    @property
    def makespan_seconds(self) -> float:
        """
        When the models expect the last device to finish.
        """

class ItemCostFit:
    """
    The cost of an item, learned from timings: one shape shared by all devices, and a scale per device.

    The coefficients are those of the fastest device: a micro-batch takes fixed_seconds + per_token_seconds * tokens +
    per_squared_token_seconds * (sum of squared lengths).
    """
    def __repr__(self) -> str: ...
    def item_seconds(self, tokens: typing.SupportsFloat | typing.SupportsIndex) -> float:
        """
        Seconds that one more item of this length adds on the fastest device: its cost for `split_items`.
        """
    @property
    def fixed_seconds(self) -> float:
        """
        Seconds of a micro-batch that do not depend on its tokens.
        """
    @property
    def models(self) -> list[tuple[float, float]]:
        """
        Per device, the pair (fixed_seconds, seconds_per_cost) for `split_items`.
        """
    @property
    def per_squared_token_seconds(self) -> float:
        """
        Seconds per unit of the sum of squared lengths (attention).
        """
    @property
    def per_token_seconds(self) -> float:
        """
        Seconds that each further token costs.
        """
    @property
    def relative_rms(self) -> float:
        """
        Root mean square of (predicted - measured) / measured over the samples.
        """
    @property
    def scales(self) -> list[float]:
        """
        Per device, its time relative to the fastest device; 0 for a device without samples.
        """

def correction_floor(
    model: CostModel,
    overhead: typing.SupportsFloat | typing.SupportsIndex = 0.25,
    granularity: typing.SupportsInt | typing.SupportsIndex = 1,
) -> int:
    """
    The smallest micro-batch whose fixed cost is at most the fraction `overhead` of its time, rounded up to a multiple of `granularity`.
    """

def fit_item_cost(
    tokens: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
    seconds: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
    *,
    devices: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] | None = None,
    squared_tokens: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex] | None = None,
) -> ItemCostFit:
    """
    Learn the cost of an item from timed micro-batches, by nonnegative least squares of the relative error.

    Parameters
    ----------
    tokens
        Tokens of each micro-batch, summed over its items.
    seconds
        Seconds of each micro-batch, above 0.
    devices
        The index of the device that ran each micro-batch, from 0. None: one device ran all.
    squared_tokens
        For each micro-batch, the sum of its items' squared lengths. None: each micro-batch was a single item.

    Returns
    -------
    ItemCostFit
        The shape shared by the devices, their scales, and the error.

    Raises
    ------
    InvalidArgument
        Without samples, and for numbers that cannot be measurements.

    Notes
    -----
    The samples must vary to separate the terms: if all have one length, the whole time counts as fixed seconds.

    Examples
    --------
    >>> from paceline.plan import fit_item_cost
    >>> fit = fit_item_cost([100, 200, 400], [0.2, 0.3, 0.5])
    >>> round(fit.fixed_seconds, 6), round(fit.per_token_seconds, 6), round(fit.relative_rms, 6)
    (0.1, 0.001, 0.0)
    """

def split_batch(
    batch_size: typing.SupportsInt | typing.SupportsIndex,
    models: collections.abc.Sequence[
        CostModel | tuple[typing.SupportsFloat | typing.SupportsIndex, typing.SupportsFloat | typing.SupportsIndex]
    ],
    *,
    minimum: typing.SupportsInt
    | typing.SupportsIndex
    | None
    | collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex | None]
    | None = None,
    maximum: typing.SupportsInt
    | typing.SupportsIndex
    | None
    | collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex | None]
    | None = None,
    granularity: typing.SupportsInt | typing.SupportsIndex = 1,
    may_be_zero: bool | collections.abc.Sequence[bool] | None = None,
    startup_seconds: typing.SupportsFloat
    | typing.SupportsIndex
    | collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex]
    | None = None,
    reduction_seconds: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex] | None = None,
    previous: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] | None = None,
) -> Split:
    """
    Split a batch so that the last device finishes as early as possible: the exact integer optimum.

    Parameters
    ----------
    batch_size
        Items of the whole batch.
    models
        One per device: a `CostModel`, or a pair (fixed_seconds, per_item_seconds).
    minimum, maximum
        The smallest nonzero share and the largest share, for all devices or one per device. None: no limit.
    granularity
        Shares are multiples of this number. If the batch is not a multiple, exactly one share has the remainder.
    may_be_zero
        Whether a device may get no work (default: True), for all devices or one per device.
    startup_seconds
        Seconds that a device with work spends once, for all devices or one per device.
    reduction_seconds
        At index k, the seconds that the step takes longer when k devices have work; k from 0 to the number of devices.
    previous
        The present shares. Among optimal splits, the one that changes the fewest devices wins; after that, lower-numbered devices win.

    Returns
    -------
    Split
        `shares` and `makespan_seconds`.

    Raises
    ------
    InvalidArgument
        For invalid arguments, and for limits that no split can respect. The message names the constraint.

    Notes
    -----
    Each grain goes to the device that would finish it first, which is optimal for nondecreasing costs (Ibaraki & Katoh, Resource
    Allocation Problems, MIT Press 1988). With minimums above zero, subsets of devices are searched: all subsets up to 8 devices, some of them beyond.

    Examples
    --------
    >>> from paceline.plan import split_batch
    >>> split_batch(512, [(0.004, 0.0001), (0.004, 0.0003)]).shares
    [384, 128]
    """

def split_even(
    batch_size: typing.SupportsInt | typing.SupportsIndex, device_count: typing.SupportsInt | typing.SupportsIndex
) -> list[int]:
    """
    Shares that differ by at most one item, the larger ones first.
    """

def split_items(
    costs: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
    models: collections.abc.Sequence[
        CostModel | tuple[typing.SupportsFloat | typing.SupportsIndex, typing.SupportsFloat | typing.SupportsIndex]
    ],
    *,
    tolerance: typing.SupportsFloat | typing.SupportsIndex = 0.0001,
) -> ItemSplit:
    """
    Split items of unequal cost so that the last device finishes as early as possible.

    Parameters
    ----------
    costs
        The cost of each item, 0 or more, in any unit that adds up: tokens, squared tokens, `ItemCostFit.item_seconds`.
    models
        One per device: a pair (fixed_seconds, seconds_per_cost), or a `CostModel`. A device without items takes no time.
    tolerance
        The search ends once the makespan is within this fraction of the lower bound.

    Returns
    -------
    ItemSplit
        Every item on exactly one device. Deterministic; ties go to the lower index.

    Raises
    ------
    InvalidArgument
        For invalid arguments.

    Notes
    -----
    Longest processing time on unequal speeds (Gonzalez, Ibarra & Sahni 1977), then exchanges between the latest device and
    others. Up to 16 items, a bounded depth-first search follows (Korf 1998), which usually finds the optimum.

    Examples
    --------
    >>> from paceline.plan import split_items
    >>> split_items([5, 5, 4, 3, 3], [(0, 1), (0, 1)]).items
    [[0, 1], [2, 3, 4]]
    """

def split_padded(
    costs: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
    models: collections.abc.Sequence[
        CostModel | tuple[typing.SupportsFloat | typing.SupportsIndex, typing.SupportsFloat | typing.SupportsIndex]
    ],
) -> ItemSplit:
    """
    Split items over devices that pad their items to the longest, so that the last device finishes as early as possible.

    A device runs all its items in one padded batch. With n items, the costliest of cost c, it takes
    fixed_seconds + seconds_per_cost * n * c. Without padding, where costs add up, use `split_items`.

    Parameters
    ----------
    costs
        The cost of each item, 0 or more, when padded to its own length; for example its tokens.
    models
        One per device: a pair (fixed_seconds, seconds_per_cost), or a `CostModel`. For a known speed, use (0, 1 / speed).

    Returns
    -------
    ItemSplit
        Every item on exactly one device, and at least one item on each device if there are enough. `loads` are n * c. A device's
        items are neighbours in order of cost. Deterministic; among equal devices the lower index gets the longer items.

    Raises
    ------
    InvalidArgument
        For invalid arguments.

    Notes
    -----
    Dynamic programming over the order of the devices finds the exact minimum of all splits that give every device an item. It is exact
    up to 12 devices, and beyond as long as there are at most 4096 ways to choose how many devices of each model come first. Beyond
    that, the devices that differ least count as equal, and `gap` shows how far the result may be from the best.

    Examples
    --------
    >>> from paceline.plan import split_padded
    >>> split_padded([2, 9, 3, 1, 2, 8, 3, 2], [(0, 1), (0, 1)]).items
    [[1, 5], [0, 2, 3, 4, 6, 7]]
    """

def split_weighted(
    batch_size: typing.SupportsInt | typing.SupportsIndex,
    weights: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
) -> list[int]:
    """
    Shares in the ratio of `weights`, rounded by largest remainder; the lower index wins ties. A weight of zero gets nothing.

    Raises
    ------
    InvalidArgument
        If a weight is negative or not finite, or if all are zero.
    """
