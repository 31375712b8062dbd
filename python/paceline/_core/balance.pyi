from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any, SupportsFloat, SupportsIndex, SupportsInt

import paceline._core.plan

_Int = SupportsInt | SupportsIndex
_Float = SupportsFloat | SupportsIndex

class WhatIfAnswer:
    """The best split for the devices asked about, and the time of a step."""
    def __repr__(self) -> str: ...
    @property
    def best_seconds(self) -> float:
        """Estimated time of a step with the best shares for the present devices."""
    @property
    def error(self) -> float:
        """Relative standard error of `seconds`."""
    @property
    def names(self) -> list[str]:
        """Names of the present devices, then of the added ones."""
    @property
    def present_seconds(self) -> float:
        """Estimated time of a step with the present shares and devices."""
    @property
    def seconds(self) -> float:
        """Estimated time of a step with these shares."""
    @property
    def shares(self) -> list[int]:
        """Items per name; 0 for removed devices."""
    @property
    def text(self) -> str:
        """The answer as a sentence."""

class StepPlan:
    """What each device runs in the next step, and the estimates behind it."""
    def __repr__(self) -> str: ...
    @property
    def batch_size(self) -> int:
        """Items of the whole batch."""
    @property
    def granularity(self) -> int:
        """What the shares are multiples of, but for the rest."""
    @property
    def models(self) -> list[paceline._core.plan.CostModel]:
        """The present estimate per device, a `plan.CostModel`; empty before the first timing."""
    @property
    def moved(self) -> bool:
        """Whether the shares differ from the last plan's for the same batch size."""
    @property
    def noise(self) -> list[float]:
        """Per device, the relative standard deviation of its time."""
    @property
    def predicted_seconds(self) -> float:
        """The makespan that the models predict; 0 before the first timing."""
    @property
    def reason(self) -> str:
        """The reason for the plan, as a sentence."""
    @property
    def shares(self) -> list[int]:
        """Items per device; they sum to the batch."""
    @property
    def step(self) -> int:
        """Steps recorded before this one."""

class Balancer:
    """The closed loop: timings in, plans out.

    Every plan is a pure function of the arguments and of the calls made so far. Not thread-safe.

    Parameters
    ----------
    devices
        Names of the devices.
    policy
        "auto", "even" or "weighted".
    device_classes
        One class for all devices or one per device. Devices of one class share the shape of their cost and count as equally fast until measured. Default: one class.
    weights
        For "weighted": one weight per device, zeros allowed.
    granularity
        Shares are multiples of this number. 0, for "auto" only: of about 1/32 of an even share.
    minimum, maximum
        The smallest nonzero share and the largest share, for all devices or one per device. None: no limit.
    may_be_zero
        Whether a device may get no work (default: True), for all devices or one per device.
    startup_seconds
        Seconds that a device with work spends once per step, for all devices or one per device. Measurements that `record` gets replace them.
    reduction_seconds
        At index k, the seconds that a step takes longer when k devices have work; k from 0 to the number of devices. Measurements that `record` gets replace them.
    calibrate
        "auto" only: run the first two steps off the even split, to separate fixed time from time per item.
    proportional
        Assume that a device's time is proportional to its share, without a fixed part.
    unit
        What batches and shares count, for texts and readers of the ledger.
    ledger
        Keep a ledger of all calls, which `ledger()` returns. True: in memory. A path: in this file, which is replaced. Each line is there as soon as its call is made.

    Raises
    ------
    InvalidArgument
        For invalid arguments, and if the file cannot be opened or written to.
    """
    def __init__(
        self,
        devices: Sequence[str],
        policy: str = "auto",
        *,
        device_classes: str | Sequence[str] | None = None,
        weights: Sequence[_Float] | None = None,
        granularity: _Int = 1,
        minimum: _Int | None | Sequence[_Int | None] | None = None,
        maximum: _Int | None | Sequence[_Int | None] | None = None,
        may_be_zero: bool | Sequence[bool] | None = None,
        startup_seconds: _Float | Sequence[_Float] | None = None,
        reduction_seconds: Sequence[_Float] | None = None,
        calibrate: bool = True,
        proportional: bool = False,
        unit: str = "items",
        ledger: bool | os.PathLike[str] | str | bytes = False,
    ) -> None: ...
    def __repr__(self) -> str: ...
    def explain(self) -> str:
        """Text: what was measured, what was decided and why, what a move would gain, and what is unknown."""
    def hint(self, models: Sequence[tuple[_Float, _Float] | None]) -> None:
        """Begin with the best split for speeds that an earlier run measured.

        "auto" only: it takes the place of the even split and of the calibration. Timings take its place, so wrong speeds are corrected. After the first timing it does nothing.

        Parameters
        ----------
        models
            Per device (fixed_seconds, per_item_seconds), as in `report`, or None: as fast as the fastest of its class, or else of all.

        Raises
        ------
        InvalidArgument
            For another number of models than devices, and for numbers that are negative or not finite.
        """
    def ledger(self) -> str:
        """The calls so far as JSON lines, for `replay`."""
    def next_plan(self, batch_size: _Int) -> StepPlan:
        """The plan of the next step. Without a `record` in between, a second call returns the same plan."""
    def record(
        self,
        devices: Sequence[Sequence[tuple[_Int, _Float] | tuple[_Int, _Float, bool]]],
        step_seconds: _Float = 0.0,
        *,
        reduction_seconds: _Float = 0.0,
        startup_seconds: Sequence[_Float | None] = [],
        lent_parts: Sequence[_Float] = [],
    ) -> None:
        """Record the timings of the plan that `next_plan` returned last.

        Parameters
        ----------
        devices
            Per device a list of micro-batches (items, seconds) or (items, seconds, excluded). Excluded micro-batches count as work but not as evidence.
        step_seconds
            Time from the first start to the last finish. 0: the largest sum of a device's seconds.
        reduction_seconds
            Time from the last finish to the end of the step. 0: unknown.
        startup_seconds
            Per device, the time from the step's first start to its own start; None without work. For a device that came too late to
            get work, the whole `step_seconds`. Empty: unknown.
        lent_parts
            Per device, the part of its time in the step, from 0 to 1, in which it did other work, such as requests. The seconds in `devices` are without that.
            Empty: none.
        """
    def report(self) -> dict[str, Any]:
        """What `explain` says, as numbers.

        Returns
        -------
        dict
            ``policy``; ``unit`` (what shares count); ``steps`` (recorded steps); ``moves`` (changes of shares, as `move_count`); ``taken_back`` (moves that were undone because they
            measured worse); ``possible_gain`` (the fraction of a step's time that the best split would save, by the estimates and for the usual batch
            size); ``required_gain`` (the gain that a move must promise now; 0 unless "auto"); ``last_reason`` (the reason of the last plan of that size).

            The usual batch size is the one that most of the last 50 plans had, so the small last batch of an epoch is not it. Of equals it is the largest. If no size
            came twice, or in a quarter of them, it is that of the last plan.

            ``devices``: one dictionary per device, in order. ``name``; ``device_class``; ``retired``; ``share`` (items of the last plan of the usual size); ``startup_seconds``
            (how much later than the first device it starts a step); ``lent_part`` (the part of its time in a step that it lends to other work, such as
            requests, which the plans of "auto" count); ``measured`` (whether there is evidence; if not, all of the following are 0); ``speed``
            (relative to the fastest of its class); ``error`` (relative standard error of the speed); ``noise`` (relative standard deviation of one step's time);
            ``fixed_seconds`` and ``per_item_seconds`` (the estimate: n items take fixed + n * per item); ``equals`` (the number of devices of its class that
            measure the same, itself included); ``samples`` (steps of evidence since its speed last changed); ``since_step`` (the step of that change);
            ``change_points`` and ``drifts`` (how often the speed changed suddenly, and slowly); ``slowdown`` (its time divided by its time before the last
            change: 2 is twice as slow, 0 means no change. Of devices that measure the same, the smallest counts, so it is 1 if one of them has not slowed
            down); ``regain`` (the fraction of a step's time that its earlier speed would save; 0 if it is not slower).

            ``recent_moves``: the last 16 changes of shares that promised a gain, oldest first. ``step`` (the number of steps recorded before it);
            ``batch_size``; the shares ``from`` and ``to``; ``promised_gain`` and ``measured_gain`` (fractions of a step's time, expected and measured);
            ``resolution`` (smaller differences are noise); ``outcome``: "pending" until 8 steps have run with the new shares, then "kept" or "taken back"
            (it measured worse); or "overtaken" by another move or a change of speed; or "unjudged" if nothing comparable ran before. The measured gain
            and the resolution are 0 unless the move was judged.
        """
    def restore(self, device: _Int) -> None:
        """Give a retired device work again."""
    def retire(self, device: _Int) -> None:
        """Give the device with this index no further work."""
    def set_least_items(self, items: _Int) -> None:
        """From the next plan on, every nonzero share has at least so many items, unless the batch has fewer. 1: no minimum."""
    def what_if(
        self,
        *,
        speeds: Mapping[str, _Float] | None = None,
        add: Sequence[tuple[str, _Float]] | None = None,
        remove: Sequence[str] | None = None,
        batch_size: _Int | None = None,
    ) -> WhatIfAnswer:
        """Predict the best split and the time of a step for other devices: other speeds, more devices or fewer.

        Uses the present estimates and changes nothing. Seconds are those of the device that ends last, with the reduction. What
        recent steps of several devices took beyond their prediction, in parts of it, counts for each split over several devices.

        Parameters
        ----------
        speeds
            Factors on the present speed, by device name: {"cuda:1": 2.0} is twice as fast.
        add
            Pairs (like, speed): one more device like the named one, at `speed` times its speed.
        remove
            Names of devices that would get no work.
        batch_size
            Default: the usual one (see `report`).

        Returns
        -------
        WhatIfAnswer

        Raises
        ------
        InvalidArgument
            Before the first timing, for arguments of another type, for an unknown name, and for a speed that is not positive.
        """
    @property
    def ledger_failed(self) -> bool:
        """Whether a line of the ledger could not be written. No line is written after it, and the balancer goes on."""
    @property
    def move_count(self) -> int:
        """Changes of shares so far, not counting changes of the batch size."""

def usual_batch_size(batch_sizes: Sequence[_Int]) -> int:
    """The batch size that most of the last plans had (see `Balancer.report`), oldest first."""

LEDGER_VERSION: int = 7
