"""Pure decisions: cost models, splits of batches and of items, stages of pipelines."""

from __future__ import annotations

from collections.abc import Sequence
from typing import SupportsFloat, SupportsIndex, SupportsInt

_Int = SupportsInt | SupportsIndex
_Float = SupportsFloat | SupportsIndex

class CostModel:
    """Seconds that a device needs for a share of n items; nondecreasing in n.

    Make one with `affine`. `CostModel()` costs nothing. Immutable.
    """
    @staticmethod
    def affine(fixed_seconds: _Float, per_item_seconds: _Float) -> CostModel:
        """`fixed_seconds + per_item_seconds * n`.

        Raises
        ------
        InvalidArgument
            If a coefficient is negative or not finite.
        """
    def __eq__(self, other: object) -> bool: ...
    def __hash__(self) -> int: ...
    def __init__(self) -> None: ...
    def __repr__(self) -> str: ...
    def items_within(self, budget_seconds: _Float, limit: _Int) -> int:
        """The largest n in [0, limit] with seconds(n) <= budget_seconds; -1 if even n = 0 does not fit."""
    def scaled(self, factor: _Float) -> CostModel:
        """The same shape on a device `factor` times slower."""
    def seconds(self, items: _Int) -> float:
        """Seconds for a share of `items` items."""
    @property
    def fixed_seconds(self) -> float:
        """Seconds that do not depend on the size."""
    @property
    def per_item_seconds(self) -> float:
        """Seconds that each further item costs."""

class Split:
    """The shares of one step, and when the models expect the last device to finish."""
    def __repr__(self) -> str: ...
    @property
    def makespan_seconds(self) -> float:
        """When the models expect the last device to finish."""
    @property
    def shares(self) -> list[int]:
        """Items per device; they sum to the batch."""

class ItemSplit:
    """The items of each device, and when the models expect the last device to finish."""
    def __repr__(self) -> str: ...
    @property
    def gap(self) -> float:
        """(makespan - lower bound) / lower bound."""
    @property
    def items(self) -> list[list[int]]:
        """Per device, the indices of its items, ascending."""
    @property
    def loads(self) -> list[float]:
        """Per device, the sum of its items' costs; for `split_padded`, their count times the largest cost."""
    @property
    def lower_bound_seconds(self) -> float:
        """No split has a smaller makespan. Equal to the makespan if the split is proven best."""
    @property
    def makespan_seconds(self) -> float:
        """When the models expect the last device to finish."""

class ItemCostFit:
    """The cost of an item, learned from timings: one shape shared by all devices, and a scale per device.

    The coefficients are those of the fastest device: a micro-batch takes fixed_seconds + per_token_seconds * tokens +
    per_squared_token_seconds * (sum of squared lengths).
    """
    def __repr__(self) -> str: ...
    def item_seconds(self, tokens: _Float) -> float:
        """Seconds that one more item of this length adds on the fastest device: its cost for `split_items`."""
    @property
    def fixed_seconds(self) -> float:
        """Seconds of a micro-batch that do not depend on its tokens."""
    @property
    def models(self) -> list[tuple[float, float]]:
        """Per device, the pair (fixed_seconds, seconds_per_cost) for `split_items`."""
    @property
    def per_squared_token_seconds(self) -> float:
        """Seconds per unit of the sum of squared lengths (attention)."""
    @property
    def per_token_seconds(self) -> float:
        """Seconds that each further token costs."""
    @property
    def relative_rms(self) -> float:
        """Root mean square of (predicted - measured) / measured over the samples."""
    @property
    def scales(self) -> list[float]:
        """Per device, its time relative to the fastest device; 0 for a device without samples."""

class BlockCost:
    """What one block of a model costs: one of the layers between which it may be cut.

    Seconds are on a device of speed 1. What comes before the first block belongs to the first block; what comes after the last one
    (a head, its logits, the loss) belongs to the last block.
    """
    def __init__(
        self,
        *,
        forward_per_item: _Float,
        backward_per_item: _Float,
        forward_fixed: _Float = 0.0,
        backward_fixed: _Float = 0.0,
        parameter_bytes: _Int = 0,
        saved_bytes_per_item: _Int = 0,
        boundary_bytes_per_item: _Int = 0,
        workspace_bytes_per_item: _Int = 0,
    ) -> None:
        """Parameters
        ----------
        forward_per_item, backward_per_item
            Seconds per item of a micro-batch.
        forward_fixed, backward_fixed
            Seconds of a micro-batch whatever its size.
        parameter_bytes
            Bytes of parameters, their gradients and the optimizer's state.
        saved_bytes_per_item
            What autograd keeps from forward to backward.
        boundary_bytes_per_item
            The input, which is sent if a stage begins with this block.
        workspace_bytes_per_item
            What it needs only while it runs.
        """
    def __repr__(self) -> str: ...
    @property
    def backward_fixed(self) -> float:
        """Seconds of a backward, whatever its items."""
    @property
    def backward_per_item(self) -> float:
        """Seconds per item of a backward."""
    @property
    def boundary_bytes_per_item(self) -> int:
        """The input, which may be sent."""
    @property
    def forward_fixed(self) -> float:
        """Seconds of a forward, whatever its items."""
    @property
    def forward_per_item(self) -> float:
        """Seconds per item of a forward."""
    @property
    def parameter_bytes(self) -> int:
        """Bytes of parameters and what trains them."""
    @property
    def saved_bytes_per_item(self) -> int:
        """What autograd keeps."""

class StageDevice:
    """One device, as far as a pipeline is concerned."""
    def __init__(
        self,
        name: str = "",
        *,
        speed: _Float = 1.0,
        noise: _Float = 0.0,
        memory_bytes: _Int | None = None,
        memory_space: _Int = 0,
    ) -> None:
        """Parameters
        ----------
        name
            For messages.
        speed
            2: blocks take half of the time.
        noise
            Relative standard deviation of the time of a forward or backward.
        memory_bytes
            None: no limit.
        memory_space
            Devices of one memory space send nothing to each other, and share tied parameters.
        """
    def __repr__(self) -> str: ...

class PipelineTimes:
    """When everything happens in a pipeline, in seconds."""
    def __repr__(self) -> str: ...
    @property
    def actions(self) -> list[list[tuple[float, float]]]:
        """Per stage, start and finish of each of its actions."""
    @property
    def busy_seconds(self) -> list[float]:
        """Per stage, how long it works."""
    @property
    def seconds(self) -> float:
        """When the last action ends."""

class StagePlan:
    """A model that is cut into stages, with the device and the actions of each."""
    def __repr__(self) -> str: ...
    @property
    def bound_seconds(self) -> float:
        """No schedule of these stages is quicker."""
    @property
    def bytes(self) -> list[int]:
        """Bytes that each stage needs."""
    @property
    def cuts(self) -> list[int]:
        """The first block of each stage."""
    @property
    def ideal_seconds(self) -> float:
        """The work of the step over the speeds of all devices."""
    @property
    def in_flight(self) -> list[int]:
        """The most micro-batches that each stage has in flight."""
    @property
    def moved_bytes(self) -> int:
        """Parameter bytes in another memory space than in the previous plan."""
    @property
    def order(self) -> list[int]:
        """The device of each stage."""
    @property
    def schedule(self) -> list[list[tuple[str, int]]]:
        """Per stage, what it does, in order: ("F", micro-batch) or ("B", micro-batch)."""
    @property
    def schedule_text(self) -> str:
        """The schedule, a line per stage."""
    @property
    def seconds(self) -> float:
        """Seconds of a step, expected with noise."""
    @property
    def sizes(self) -> list[int]:
        """Items of each micro-batch; they differ by at most one."""

class PoolState:
    """The decisions of a pool, for replays of its ledger. Functions are its events, and return what was decided as the ledger has it."""
    def __init__(
        self,
        *,
        placement: str,
        decline: _Float,
        probe_seconds: _Float = ...,
        samples: _Int,
        margin: _Float,
        memory_margin_bytes: _Float,
        patience: Sequence[_Float],
    ) -> None: ...
    def add_device(
        self,
        now: _Float,
        *,
        name: str,
        device_class: str,
        labels: Sequence[str],
        weight: _Float = 0.0,
        memory_bytes: _Float = ...,
        shares_memory_of: _Int | None = None,
        accepted: Sequence[bool] = [],
    ) -> str: ...
    def add_kind(
        self,
        *,
        name: str,
        sizes: Sequence[_Int],
        max_delay_seconds: _Float = 0.0,
        padded: bool = False,
        idempotent: bool = False,
        queue_limit: _Int = 0,
        model: str = "",
        resident_bytes: _Float = 0.0,
        reload_seconds: _Float = 0.0,
        peak_bytes: _Float = 0.0,
        peak_bytes_per_item: _Float = 0.0,
    ) -> int: ...
    def add_need(self, *, accepted: Sequence[bool]) -> int: ...
    def add_tenant(
        self, *, name: str, weight: _Float = 1.0, devices: _Int = 9223372036854775807, memory_bytes: _Float = ...
    ) -> int: ...
    def cancel(self, now: _Float, *, job: _Int) -> str: ...
    def chose(self, devices: Sequence[_Int | None]) -> None:
        """What the user's placement answers during the next event."""
    def finish(self, now: _Float, *, run: _Int, result: str, seconds: _Float = 0.0) -> str: ...
    def forget(self, *, kind: _Int) -> bool:
        """Whether it was."""
    def has_room(self, *, kind: _Int, tenant: _Int = 0) -> bool:
        """Whether a job of this kind would be taken now, and not rejected for a full queue."""
    def loaded(self, now: _Float, *, kind: _Int, seconds: _Float) -> str: ...
    def lose(self, now: _Float, *, device: _Int) -> str: ...
    def measure(self, now: _Float, *, device: _Int, kind: _Int, model: tuple[_Float, _Float], samples: _Int) -> str: ...
    def restore(self, now: _Float, *, device: _Int) -> str: ...
    def retire(self, now: _Float, *, device: _Int, paused: bool = False, activation_seconds: _Float = ...) -> str: ...
    def submit(
        self,
        now: _Float,
        *,
        kind: _Int,
        need: _Int = 0,
        priority: str = "normal",
        deadline_seconds: _Float = ...,
        not_before_seconds: _Float = 0.0,
        cost: _Float = 1.0,
        gang: _Int = 1,
        after: Sequence[_Int] = [],
        tenant: _Int = 0,
        charge: _Float = 0.0,
        own: bool = False,
        waits: bool = False,
    ) -> tuple[int, str]:
        """The number of the job, and what was decided."""
    def tick(self, now: _Float) -> str: ...
    def unload(self, *, device: _Int, model: str) -> bool:
        """Whether it was there."""
    def withdraw(self, now: _Float, *, run: _Int, cancelled: _Int | None = None) -> str: ...
    def write_to(self, path: str) -> None:
        """Write a ledger."""

class Scaler:
    """Which devices of a pool shall be active: as few as meet the wait."""
    def __init__(self, wait_seconds: _Float) -> None: ...
    def decide(
        self,
        devices: Sequence[tuple[_Float, _Float, _Float, _Float, bool, bool]],
        *,
        seconds: _Float,
        arrived_work: _Float,
        arrived_jobs: _Float,
        waiting_work: _Float,
        runs: tuple[_Float, _Float, _Float],
    ) -> list[bool]:
        """Devices: (speed, price, seconds of its activation, seconds to keep it, active, usable) each. Runs in which the jobs that arrived will run: how many, their work, and the sum of its squares; 0 if nothing is known."""
    def wait_of(self, speeds: Sequence[_Float], waiting_work: _Float) -> float:
        """The wait that is predicted for devices of these speeds."""
    @property
    def desired(self) -> int: ...
    @property
    def wait_seconds(self) -> float: ...
    @property
    def work_per_second(self) -> float: ...

def correction_floor(model: CostModel, overhead: _Float = 0.25, granularity: _Int = 1) -> int:
    """The smallest micro-batch whose fixed cost is at most the fraction `overhead` of its time, rounded up to a multiple of `granularity`."""

def fit_item_cost(
    tokens: Sequence[_Float],
    seconds: Sequence[_Float],
    *,
    devices: Sequence[_Int] | None = None,
    squared_tokens: Sequence[_Float] | None = None,
) -> ItemCostFit:
    """Learn the cost of an item from timed micro-batches, by nonnegative least squares of the relative error.

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

def gpipe(stages: _Int, micro_batches: _Int) -> list[list[tuple[str, int]]]:
    """All forwards, then all backwards. Every stage keeps all micro-batches in flight.

    Parameters
    ----------
    stages, micro_batches
        How many; each at least 1.

    Returns
    -------
    list of list of (str, int)
        Per stage, what it does, in order: ("F", micro-batch) or ("B", micro-batch).

    Raises
    ------
    InvalidArgument
        If there is no stage or no micro-batch.

    Notes
    -----
    Huang et al., GPipe, NeurIPS 2019. Backwards run in the order of the micro-batches, too, so that gradients are summed in that order.
    """

def one_f_one_b(stages: _Int, micro_batches: _Int, extra: Sequence[_Int] | None = None) -> list[list[tuple[str, int]]]:
    """One forward, one backward: stage i of k first runs k - i + extra[i] forwards, then alternates backwards and forwards.

    Parameters
    ----------
    stages, micro_batches
        How many; each at least 1.
    extra
        Additional forwards before the first backward, per stage; None: none. More in flight hides links and noise. No stage has
        fewer in flight than the next one: where `extra` says so, it is raised.

    Returns
    -------
    list of list of (str, int)
        Per stage, what it does, in order: ("F", micro-batch) or ("B", micro-batch).

    Raises
    ------
    InvalidArgument
        If there is no stage or no micro-batch, or for an `extra` of another size or with a negative number.

    Notes
    -----
    Narayanan et al., PipeDream, SOSP 2019.

    Examples
    --------
    >>> from paceline.plan import one_f_one_b
    >>> one_f_one_b(2, 2)[1]
    [('F', 0), ('B', 0), ('F', 1), ('B', 1)]
    """

def pipeline_times(
    schedule: Sequence[Sequence[tuple[str, _Int]]],
    forward: Sequence[_Float],
    backward: Sequence[_Float],
    *,
    send_forward: Sequence[_Float] | None = None,
    send_backward: Sequence[_Float] | None = None,
    scale: Sequence[_Float] | None = None,
) -> PipelineTimes:
    """The exact times of a schedule: an action starts when its stage is free and its input has arrived.

    Parameters
    ----------
    schedule
        Per stage, a list of ("F", micro-batch) and ("B", micro-batch), as `gpipe` and `one_f_one_b` return it.
    forward, backward
        Seconds of one micro-batch on each stage.
    send_forward, send_backward
        Seconds until the next stage has the output, and the stage before the gradient, per sending stage. None: 0.
    scale
        One factor per micro-batch for all its times, for unequal sizes. None: 1.

    Returns
    -------
    PipelineTimes
        `seconds`, `busy_seconds` and `actions`.

    Raises
    ------
    InvalidArgument
        For sizes that do not match, negative or not finite times, and schedules that cannot run: the message names stage and action.

    Examples
    --------
    >>> from paceline.plan import one_f_one_b, pipeline_times
    >>> pipeline_times(one_f_one_b(2, 4), [1.0, 1.0], [2.0, 2.0]).seconds
    15.0
    """

def plan_stages(
    blocks: Sequence[BlockCost],
    devices: Sequence[StageDevice],
    *,
    batch_size: _Int,
    micro_batches: _Int | None = None,
    cuts: Sequence[_Int] | None = None,
    order: Sequence[_Int] | None = None,
    schedule: str = "auto",
    most_in_flight: _Int = 0,
    link_latency_seconds: _Float = 0.0,
    link_bytes_per_second: _Float = 0.0,
    tied_bytes: _Int = 0,
    previous_cuts: Sequence[_Int] | None = None,
    previous_order: Sequence[_Int] | None = None,
    indifference: _Float = 0.0,
) -> StagePlan:
    """Cut a model into stages over unequal devices so that a step takes as little time as possible and every stage fits.

    Parameters
    ----------
    blocks
        A `BlockCost` for each block, in order.
    devices
        A `StageDevice` for each device. Devices that do not pay are left out.
    batch_size
        Items of a step.
    micro_batches
        How many. None: planned, 1 to batch_size.
    cuts, order
        The first block, and the device, of each stage. None: planned.
    schedule
        "auto", "gpipe" or "1f1b". GPipe is never quicker than 1F1B with as many in flight, so "auto" is 1F1B.
    most_in_flight
        The most micro-batches that a stage may have in flight; 0: as many as fit.
    link_latency_seconds, link_bytes_per_second
        How long it takes to send bytes between two memory spaces; 0 bytes per second: bytes take no time.
    tied_bytes
        Parameter bytes that the first and the last block share. Both blocks' `parameter_bytes` include them.
    previous_cuts, previous_order
        The present stages. Among plans whose time is within `indifference` of the best, the one that moves the fewest bytes wins.
    indifference
        0.01: times within 1 % count as equal.

    Returns
    -------
    StagePlan
        Cuts, order, sizes, schedule, bytes and seconds.

    Raises
    ------
    InvalidArgument
        For numbers that make no sense.
    OutOfMemory
        If no plan fits. The message names the device that comes closest, its bytes, and what would help.

    Notes
    -----
    Small cases are searched completely. Up to 8 devices, a dynamic program over sets of devices gives partitions (Pinar, Tabak & Aykanat,
    JPDC 68, 2008), which are compared by the exact times of their schedules and improved step by step.

    Examples
    --------
    >>> from paceline.plan import BlockCost, StageDevice, plan_stages
    >>> block = BlockCost(forward_per_item=1.0, backward_per_item=2.0)
    >>> plan = plan_stages([block] * 6, [StageDevice("fast", speed=2.0), StageDevice("slow")], batch_size=8)
    >>> plan.cuts, plan.order
    ([0, 2], [1, 0])
    """

def split_batch(
    batch_size: _Int,
    models: Sequence[CostModel | tuple[_Float, _Float]],
    *,
    minimum: _Int | None | Sequence[_Int | None] | None = None,
    maximum: _Int | None | Sequence[_Int | None] | None = None,
    granularity: _Int = 1,
    may_be_zero: bool | Sequence[bool] | None = None,
    startup_seconds: _Float | Sequence[_Float] | None = None,
    reduction_seconds: Sequence[_Float] | None = None,
    previous: Sequence[_Int] | None = None,
) -> Split:
    """Split a batch so that the last device finishes as early as possible: the exact integer optimum.

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

def split_even(batch_size: _Int, device_count: _Int) -> list[int]:
    """Shares that differ by at most one item, the larger ones first."""

def split_items(
    costs: Sequence[_Float], models: Sequence[CostModel | tuple[_Float, _Float]], *, tolerance: _Float = 0.0001
) -> ItemSplit:
    """Split items of unequal cost so that the last device finishes as early as possible.

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

def split_padded(costs: Sequence[_Float], models: Sequence[CostModel | tuple[_Float, _Float]]) -> ItemSplit:
    """Split items over devices that pad their items to the longest, so that the last device finishes as early as possible.

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

def split_weighted(batch_size: _Int, weights: Sequence[_Float]) -> list[int]:
    """Shares in the ratio of `weights`, rounded by largest remainder; the lower index wins ties. A weight of zero gets nothing.

    Raises
    ------
    InvalidArgument
        If a weight is negative or not finite, or if all are zero.
    """

def with_covers(
    wanted: Sequence[bool],
    devices: Sequence[tuple[_Float, _Float, _Float, _Float, bool, bool]],
    covers: Sequence[tuple[Sequence[bool], _Int]],
) -> list[bool]:
    """Which devices shall be active: the wanted ones, and as many more as covers need, (which would do, how many) each. Devices are as for `Scaler.decide`."""

POOL_LEDGER_VERSION: int = 1
