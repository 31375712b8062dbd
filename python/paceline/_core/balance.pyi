from __future__ import annotations

import collections.abc
import typing

import paceline._core.plan

__all__: list[str] = ["Balancer", "LEDGER_VERSION", "StepPlan", "WhatIfAnswer"]

class WhatIfAnswer:
    """
    The split that would be best then, and how long a step would take.
    """
    def __repr__(self) -> str: ...
    @property
    def best_seconds(self) -> float:
        """
        Of a step with the best shares for the devices as they are.
        """
    @property
    def error(self) -> float:
        """
        Relative standard error of `seconds`.
        """
    @property
    def names(self) -> list[str]:
        """
        The present devices, then those added.
        """
    @property
    def present_seconds(self) -> float:
        """
        Of a step with the shares now in force and the devices as they are.
        """
    @property
    def seconds(self) -> float:
        """
        Of a step with these shares, by the estimates.
        """
    @property
    def shares(self) -> list[int]:
        """
        Items per name; 0 for those removed.
        """
    @property
    def text(self) -> str:
        """
        In a sentence.
        """

class StepPlan:
    """
    What to run next, and the numbers behind it.
    """
    def __repr__(self) -> str: ...
    @property
    def batch_size(self) -> int:
        """
        Items of the whole batch.
        """
    @property
    def models(self) -> list[paceline._core.plan.CostModel]:
        """
        The present estimates, `plan.CostModel` each; empty before the first timing.
        """
    @property
    def moved(self) -> bool:
        """
        Whether the shares differ from the last plan's for the same batch size.
        """
    @property
    def noise(self) -> list[float]:
        """
        Relative standard deviation of a device's time, per device.
        """
    @property
    def predicted_seconds(self) -> float:
        """
        Makespan by the models; 0 before the first timing.
        """
    @property
    def reason(self) -> str:
        """
        Why, in a sentence.
        """
    @property
    def shares(self) -> list[int]:
        """
        Items per device; they sum to the batch.
        """
    @property
    def step(self) -> int:
        """
        Steps recorded before this one.
        """

class Balancer:
    """
    The closed loop: timings in, plans out.

    Every plan is a pure function of the arguments and of the calls made so far. Not thread-safe.

    Parameters
    ----------
    devices
        Their names.
    policy
        "auto", "even" or "weighted".
    device_classes
        For all devices or one per device; devices of one class share the shape of their cost and are equal until measured otherwise. Default: all one class.
    weights
        For "weighted": one per device, zeros allowed.
    granularity
        Shares are multiples of it.
    minimum, maximum
        The smallest share that is not zero, and the largest; for all devices or one per device, None for no limit.
    may_be_zero
        Whether a device may be left without work (the default), for all devices or one per device.
    startup_seconds
        What a device pays once a step if it has work, for all devices or one per device; until `record` is told what it measured.
    reduction_seconds
        Seconds that a step ends later when k devices have work, at index k, from 0 to the number of devices; until `record` is told.
    calibrate
        "auto" only: run the first two steps off the even split, to tell fixed from per-item time.
    proportional
        A device's time is in proportion to its share: no fixed part is looked for.
    ledger
        Keep a ledger of all calls, for `ledger()`.

    Raises
    ------
    InvalidArgument
        For arguments that make no sense.
    """
    def __init__(
        self,
        devices: collections.abc.Sequence[str],
        policy: str = "auto",
        *,
        device_classes: str | collections.abc.Sequence[str] | None = None,
        weights: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex] | None = None,
        granularity: typing.SupportsInt | typing.SupportsIndex = 1,
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
        may_be_zero: bool | collections.abc.Sequence[bool] | None = None,
        startup_seconds: typing.SupportsFloat
        | typing.SupportsIndex
        | collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex]
        | None = None,
        reduction_seconds: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex] | None = None,
        calibrate: bool = True,
        proportional: bool = False,
        ledger: bool = False,
    ) -> None: ...
    def __repr__(self) -> str: ...
    def explain(self) -> str:
        """
        In words: what was seen, what was decided and why, what a move would gain, what is not known.
        """
    def ledger(self) -> str:
        """
        The calls so far as JSON lines, for `replay`.
        """
    def next_plan(self, batch_size: typing.SupportsInt | typing.SupportsIndex) -> StepPlan:
        """
        The plan of the next step. Asked again without a record in between, it is the same plan.
        """
    def record(
        self,
        devices: collections.abc.Sequence[
            collections.abc.Sequence[
                tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsFloat | typing.SupportsIndex]
                | tuple[typing.SupportsInt | typing.SupportsIndex, typing.SupportsFloat | typing.SupportsIndex, bool]
            ]
        ],
        step_seconds: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        *,
        reduction_seconds: typing.SupportsFloat | typing.SupportsIndex = 0.0,
        startup_seconds: collections.abc.Sequence[typing.SupportsFloat | typing.SupportsIndex | None] = [],
    ) -> None:
        """
        The timings of the plan that `next_plan` last returned.

        Parameters
        ----------
        devices
            Per device a list of micro-batches (items, seconds) or (items, seconds, excluded); excluded ones are work but no evidence.
        step_seconds
            From the first start to the last finish; 0: the largest sum of a device's seconds.
        reduction_seconds
            From then to the end of the step; 0: unknown.
        startup_seconds
            Per device from the step's first start to its own, None without work; of a device that came when nothing was left to
            do the whole `step_seconds`. Empty: unknown.
        """
    def report(self) -> dict[str, typing.Any]:
        """
        What `explain` says, as numbers.

        Returns
        -------
        dict
            ``policy``; ``steps`` (recorded); ``moves`` (changes of shares, as `move_count`); ``taken_back`` (moves that measured worse than the
            shares before and were undone); ``possible_gain`` (the part of a step's time that the best split would save by the estimates, for the batch size
            of the last plan) and ``required_gain`` (what a move must promise at present; 0 unless "auto"); ``last_reason`` (of the last plan, in a
            sentence).

            ``devices``: one dictionary each, in order. ``name``, ``device_class``; ``retired``; ``share`` (items of the last plan); ``startup_seconds`` (how much
            later than the first device it starts a step); ``measured`` (False: it never ran anything that counts as evidence, and what follows is 0): ``speed``
            (relative to the fastest of its class), ``error`` (the relative standard error of that), ``noise`` (the relative standard deviation of one step's time);
            ``fixed_seconds`` and ``per_item_seconds`` (the estimate: n items take fixed + n * per item); ``equals`` (devices of its class that it cannot be told
            from, itself included); ``samples`` (steps of evidence since its speed last changed) and ``since_step`` (when that was); ``change_points`` and
            ``drifts`` (how often it changed suddenly, and slowly); ``slowdown`` (its time over that before the last change: 2 is twice as slow, 0 no change;
            no more than that of a device that it cannot be told from, so 1 where it is level with one that has not slowed down) and ``regain`` (the part of a
            step's time that would be saved if it were as fast as before; 0 if it is not slower).

            ``recent_moves``: the last 16 changes of shares that promised a gain, oldest first. ``step`` (how many were recorded before), ``batch_size``, the shares
            ``from`` and ``to``; ``promised_gain`` and ``measured_gain`` (the part of a step's time that was to be saved, and by the clock was);
            ``resolution`` (differences below it are noise); ``outcome``: "kept" or "taken back" (it measured worse) once 8 steps have run by it, before
            "pending", else "overtaken" by another move or a change of speed, or "unjudged" where nothing comparable ran before. The measured gain and
            the resolution are 0 unless it was judged.
        """
    def restore(self, device: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        A device that was retired gets work again.
        """
    def retire(self, device: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        The device with this index gets no further work.
        """
    def set_least_items(self, items: typing.SupportsInt | typing.SupportsIndex) -> None:
        """
        From the next plan on no share has fewer items, unless it is zero or the batch itself has fewer. 1: any share will do.
        """
    def what_if(
        self,
        *,
        speeds: collections.abc.Mapping[str, typing.SupportsFloat | typing.SupportsIndex] | None = None,
        add: collections.abc.Sequence[tuple[str, typing.SupportsFloat | typing.SupportsIndex]] | None = None,
        remove: collections.abc.Sequence[str] | None = None,
        batch_size: typing.SupportsInt | typing.SupportsIndex | None = None,
    ) -> WhatIfAnswer:
        """
        What would the best split be, and how long a step, if devices had other speeds, came or left?

        By the present estimates; changes nothing.

        Parameters
        ----------
        speeds
            Device names and factors on their present speed: {"cuda:1": 2.0} is twice as fast.
        add
            (like, speed) each: one device more like the named one, so many times as fast.
        remove
            Names of devices that would get no work.
        batch_size
            Default: that of the last plan.

        Returns
        -------
        WhatIfAnswer

        Raises
        ------
        InvalidArgument
            Before the first timing, for what is no such argument, a name that is not there, or a speed that is not above zero.
        """
    @property
    def move_count(self) -> int:
        """
        Changes of shares so far, for unchanged batch sizes.
        """

LEDGER_VERSION: int = 6
