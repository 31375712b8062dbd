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
    Seconds a device needs for a share of n items; nondecreasing in n.

    Make one with `affine`; `CostModel()` is the free device. Immutable.
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
        Seconds each further item costs.
        """

class Split:
    """
    The shares of one step, and when the last device will be done by the models.
    """
    def __repr__(self) -> str: ...
    @property
    def makespan_seconds(self) -> float:
        """
        When the last device finishes, by the models.
        """
    @property
    def shares(self) -> list[int]:
        """
        Items per device; they sum to the batch.
        """

class ItemSplit:
    """
    Which device gets which items, and when the last one will be done.
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
        Per device, the sum of its items' costs; of `split_padded` their count times the largest cost.
        """
    @property
    def lower_bound_seconds(self) -> float:
        """
        No split has a smaller makespan; equal to it when the split is proven best.
        """
    @property
    def makespan_seconds(self) -> float:
        """
        When the last device finishes, by the models.
        """

class ItemCostFit:
    """
    What an item costs, learned from timings: a shape shared by all devices, a scale for each.

    The coefficients are those of the fastest device: a micro-batch takes fixed_seconds + per_token_seconds * tokens +
    per_squared_token_seconds * (sum of squared lengths).
    """
    def __repr__(self) -> str: ...
    def item_seconds(self, tokens: typing.SupportsFloat | typing.SupportsIndex) -> float:
        """
        What one more item of this length adds on the fastest device: its cost for `split_items`.
        """
    @property
    def fixed_seconds(self) -> float:
        """
        Seconds of a micro-batch that do not depend on its tokens.
        """
    @property
    def models(self) -> list[tuple[float, float]]:
        """
        Per device the pair (fixed_seconds, seconds_per_cost) for `split_items`.
        """
    @property
    def per_squared_token_seconds(self) -> float:
        """
        Seconds by the sum of squared lengths: attention.
        """
    @property
    def per_token_seconds(self) -> float:
        """
        Seconds each further token costs.
        """
    @property
    def relative_rms(self) -> float:
        """
        Root mean square of (predicted - measured) / measured over the samples.
        """
    @property
    def scales(self) -> list[float]:
        """
        Per device, how many times slower than the fastest; 0 for a device without samples.
        """

def correction_floor(
    model: CostModel,
    overhead: typing.SupportsFloat | typing.SupportsIndex = 0.25,
    granularity: typing.SupportsInt | typing.SupportsIndex = 1,
) -> int:
    """
    The smallest micro-batch whose fixed cost is at most `overhead` of its time, rounded up to `granularity`.
    """

def fit_item_cost(
    tokens: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
    seconds: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex],
    *,
    devices: collections.abc.Sequence[typing.SupportsInt | typing.SupportsIndex] | None = None,
    squared_tokens: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex] | None = None,
) -> ItemCostFit:
    """
    Learn what an item costs from timed micro-batches, by nonnegative least squares of the relative error.

    Parameters
    ----------
    tokens
        Tokens of each micro-batch, in all its items.
    seconds
        What each took, above 0.
    devices
        The device each ran on, from 0; None: all on one.
    squared_tokens
        For each the sum of the squared lengths of its items; None: each was a single item.

    Returns
    -------
    ItemCostFit
        The shape shared by the devices, their scales, and the error.

    Raises
    ------
    InvalidArgument
        Without samples, and for numbers that were not measured.

    Notes
    -----
    What the samples do not tell apart is not known: with one length only, everything is fixed seconds.

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
        The smallest share that is not zero and the largest share, for all devices or one per device; None: no limit.
    granularity
        Shares are multiples of it; if the batch is not, exactly one share has the remainder.
    may_be_zero
        Whether a device may be left without work (the default), for all devices or one per device.
    startup_seconds
        What a device pays once if it has work, for all devices or one per device.
    reduction_seconds
        Seconds the step ends later when k devices have work, at index k, from 0 to the number of devices.
    previous
        The shares now in force: among optimal splits the one that changes the fewest devices wins, then lower-numbered devices do.

    Returns
    -------
    Split
        `shares` and `makespan_seconds`.

    Raises
    ------
    InvalidArgument
        For arguments that make no sense, and for limits that no split respects, naming the constraint.

    Notes
    -----
    Each grain goes to the device that would finish it first, which is optimal for nondecreasing costs (Ibaraki & Katoh, Resource
    Allocation Problems, MIT Press 1988). With minimums above zero subsets of devices are searched: all of them up to 8 devices, a part beyond.

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
    Split items that do not cost the same, so that the last device finishes as early as possible.

    Parameters
    ----------
    costs
        What each item costs, not negative: tokens, squared tokens, `ItemCostFit.item_seconds`, anything that adds up.
    models
        One per device: a pair (fixed_seconds, seconds_per_cost), or a `CostModel`. A device without items costs nothing.
    tolerance
        The search ends once the makespan is within this part of the lower bound.

    Returns
    -------
    ItemSplit
        Every item on exactly one device; deterministic, ties go to the lower index.

    Raises
    ------
    InvalidArgument
        For arguments that make no sense.

    Notes
    -----
    Longest processing time on unequal speeds (Gonzalez, Ibarra & Sahni 1977), then exchanges between the latest device and
    others. Up to 16 items a bounded depth-first search follows (Korf 1998), which mostly finds the optimum.

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
    Split items over devices that pad theirs to the longest of them, so that the last device finishes as early as possible.

    A device that gets n items, the costliest of cost c, takes fixed_seconds + seconds_per_cost * n * c: all its items in one
    batch, padded. Where nothing is padded, and costs add up, use `split_items`.

    Parameters
    ----------
    costs
        What each item costs, not negative: what one item padded to its length takes, e.g. tokens.
    models
        One per device: a pair (fixed_seconds, seconds_per_cost), or a `CostModel`; for a speed, (0, 1 / speed).

    Returns
    -------
    ItemSplit
        Every item on exactly one device, and at least one on each if there are enough; `loads` are n * c. A device's items are
        neighbours in order of cost. Deterministic; among equal devices the lower index gets the longer items.

    Raises
    ------
    InvalidArgument
        For arguments that make no sense.

    Notes
    -----
    The exact minimum of all splits that give every device an item, by dynamic programming over the order of the devices: up to 12
    devices, and beyond while there are at most 4096 ways to choose how many of each model. For more, devices that differ least
    count as alike, and `gap` shows what is not proven.

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
    Shares in the ratio of `weights`, by largest remainder, on a tie the lower index; a weight of zero gets nothing.

    Raises
    ------
    InvalidArgument
        If a weight is negative or not finite, or none is above zero.
    """
