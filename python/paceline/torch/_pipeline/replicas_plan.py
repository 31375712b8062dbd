"""Plans of several pipelines that share a batch."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from itertools import accumulate
from typing import Any, NamedTuple

from paceline import DeviceGroup, InvalidArgument
from paceline.plan import BlockCost, split_batch
from paceline.torch._pipeline.planner import Planner
from paceline.torch._pipeline.plans import Action, PipelinePlan

_LEAST_CHANGE = 0.05  # of a device's speed, for shares to follow
_MOST_MODELS = 64  # sizes of batches whose lines are kept


class ReplicasPlan:
    """The plans of all pipelines that have items, one after the other, with the attributes of a `PipelinePlan`."""

    def __init__(self, parts: Sequence[tuple[int, PipelinePlan]], first_devices: Sequence[int]) -> None:
        """`parts`: (number of the pipeline, its plan). `first_devices`: of each pipeline, among all devices."""
        self.parts = parts
        self._first_devices = first_devices
        plans = [plan for _, plan in parts]
        self.cuts = tuple(cut for plan in plans for cut in plan.cuts)
        self.order = tuple(first_devices[number] + device for number, plan in parts for device in plan.order)
        self.sizes = tuple(size for plan in plans for size in plan.sizes)
        self.bounds = PipelinePlan((), (), self.sizes, "").bounds
        self.lanes_of = {number: plan.lanes for number, plan in parts}
        self.lanes = sum(self.lanes_of.values())
        self.first_items = [0, *accumulate(sum(plan.sizes) for plan in plans)][:-1]
        self.first_micro_batches = [0, *accumulate(len(plan.sizes) for plan in plans)][:-1]
        self.first_stages = [0, *accumulate(len(plan.cuts) for plan in plans)][:-1]
        numbered = zip(plans, self.first_micro_batches, strict=True)
        self.schedule = "\n".join(_renumbered(plan.schedule.strip("\n"), first) for plan, first in numbered)
        self.figures = _figures_of(plans)

    def in_flight(self, stage: int) -> int:
        """The most micro-batches that are in flight at once on a stage."""
        number = max(k for k, first in enumerate(self.first_stages) if first <= stage)
        return self.parts[number][1].in_flight(stage - self.first_stages[number])

    def actions(self) -> list[list[Action]] | None:
        """When the actions of each stage are planned to run. None if these are not the balancers' plans."""
        found: list[list[Action]] = []
        for (_, plan), first in zip(self.parts, self.first_micro_batches, strict=True):
            stages = plan.actions()
            if stages is None:
                return None
            found += [[(kind, first + one, *span) for kind, one, *span in stage] for stage in stages]  # type: ignore[misc]
        return found

    def resized(self, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> ReplicasPlan:
        """The same items in other micro-batches, which train one at a time in each pipeline."""
        return ReplicasPlan([(number, plan.resized(change)) for number, plan in self.parts], self._first_devices)

    def alone(self) -> ReplicasPlan:
        """The same with one micro-batch at a time in each pipeline."""
        return ReplicasPlan([(number, plan.alone()) for number, plan in self.parts], self._first_devices)

    def in_one_stage(self) -> ReplicasPlan:
        """The same micro-batches with one device for each pipeline, for predictions."""
        return ReplicasPlan([(number, plan.in_one_stage()) for number, plan in self.parts], self._first_devices)


def _renumbered(schedule: str, first: int) -> str:
    return re.sub(r"(?<=[FB])\d+", lambda number: str(int(number[0]) + first), schedule)


class _Figures(NamedTuple):
    seconds: float
    ideal_seconds: float
    bytes: list[int]


def _figures_of(plans: Sequence[PipelinePlan]) -> _Figures | None:
    own = [plan.figures for plan in plans if plan.figures is not None]
    if len(own) < len(plans):
        return None
    return _Figures(
        max(one.seconds for one in own), max(one.ideal_seconds for one in own), [n for one in own for n in one.bytes]
    )


class ReplicasPlanner:
    """Plans the steps of all pipelines: their shares of the batch, and by their own planners all else."""

    measures, measured = False, None  # all is known from the start
    finds_order = False
    plans_micro_batches = True
    unsettled, failure, settling = None, None, nullcontext()  # on the host times are known when a step is over

    def __init__(self, groups: Sequence[DeviceGroup], planners: Sequence[Planner]) -> None:
        self.planners = planners
        self.blocks = planners[0].blocks
        self.retired: set[int] = set()
        self.least_items = 1
        self._sizes = [len(group) for group in groups]
        self._first_devices = [0, *accumulate(self._sizes)][:-1]
        self._speeds: list[float] = []  # of all devices, when the lines were made
        # By items: seconds of each pipeline, fixed and per item.
        self._models: dict[int, list[tuple[float, float]]] = {}

    def follow(self, item_bytes: int, least: int) -> None:
        """Note the fewest items of a micro-batch. Nothing is measured again: `layout` has measured all."""
        self.least_items = least
        for planner in self.planners:
            planner.set_least_items(least)

    def renewed(self, parameters: Sequence[Any]) -> None:
        """Others have taken the place of the module's parameters, or not."""
        for planner in self.planners:
            planner.renewed(parameters)

    def plan_step(self, items: int) -> ReplicasPlan:
        """What the next step runs."""
        return self._plans(items, lambda planner, share: planner.plan_step(share))

    def plan_prediction(self, items: int, least: int) -> ReplicasPlan:
        """What a prediction runs."""
        return self._plans(items, lambda planner, share: planner.plan_prediction(share, least))

    def _plans(self, items: int, plan: Callable[[Planner, int], PipelinePlan]) -> ReplicasPlan:
        shares = self.shares(items)
        parts = [(number, plan(self.planners[number], share)) for number, share in enumerate(shares) if share]
        return ReplicasPlan(parts, self._first_devices)

    def shares(self, items: int) -> list[int]:
        """How many items each pipeline gets, so that the last one finishes as early as possible."""
        models = self._model(items)
        works = [number for number in range(len(models)) if not self._is_retired(number)]
        found = split_batch(
            items, [models[number] for number in works], minimum=min(items, self.least_items), may_be_zero=True
        )
        shares = [0] * len(models)
        for number, share in zip(works, found.shares, strict=True):
            shares[number] = share
        return shares

    def _model(self, items: int) -> list[tuple[float, float]]:
        """A line through the predicted seconds for half of the items and for all of them."""
        speeds = self.speeds
        changes = [abs(math.log(speed / before)) for speed, before in zip(speeds, self._speeds, strict=False)]
        if not changes or max(changes) > _LEAST_CHANGE or len(self._models) > _MOST_MODELS:
            self._models.clear()
            self._speeds = speeds
        if items not in self._models:
            half = max(1, items // 2)
            self._models[items] = [line_of(planner.pipeline_seconds, half, items) for planner in self.planners]
        return self._models[items]

    def note(self, plan: ReplicasPlan, record: Sequence[Sequence[Action]], *, evidence: bool) -> None:
        """Take note of a step that was committed."""
        for (number, part), stage in zip(plan.parts, plan.first_stages, strict=True):
            self.planners[number].note(part, record[stage : stage + len(part.cuts)], evidence=evidence)

    def out_of_memory(self, stage: int) -> bool:
        """Whether there is a plan that takes less. `stage`: counted over all pipelines of the last plan."""
        number, own = self._last_stages[stage]
        return self.planners[number].out_of_memory(own)

    def smaller_predictions(self, plan: ReplicasPlan) -> bool:
        """After a prediction ran out of memory: whether the next ones have smaller micro-batches."""
        smaller = [self.planners[number].smaller_predictions(part) for number, part in plan.parts]
        return any(smaller)

    def note_stages(self, plan: ReplicasPlan) -> None:
        """Note which pipeline each stage of a plan belongs to."""
        self._last_stages = [(number, stage) for number, part in plan.parts for stage in range(len(part.cuts))]

    def retire(self, device: int) -> None:
        if len(self.retired | {device}) == sum(self._sizes):
            raise InvalidArgument("retire: no other device works.")
        self.retired.add(device)
        number, own = self._place(device)
        if not self._is_retired(number):  # a pipeline without devices gets no items instead
            self.planners[number].retire(own)

    def restore(self, device: int) -> None:
        self.retired.discard(device)
        number, own = self._place(device)
        self.planners[number].restore(own)
        for other in range(self._sizes[number]):  # the last one that was retired is not known to its planner
            if self._first_devices[number] + other in self.retired:
                self.planners[number].retire(other)

    def optimized_by(self, cls: type, options: dict[str, Any]) -> None:
        """Note what the optimizer will keep for each parameter."""
        for planner in self.planners:
            planner.optimized_by(cls, options)

    def _place(self, device: int) -> tuple[int, int]:
        number = max(k for k, first in enumerate(self._first_devices) if first <= device)
        return number, device - self._first_devices[number]

    def _is_retired(self, number: int) -> bool:
        first = self._first_devices[number]
        return self.retired.issuperset(range(first, first + self._sizes[number]))

    # What reports say

    @property
    def costs(self) -> list[BlockCost]:
        return self.planners[0].costs

    @property
    def known(self) -> tuple[list[BlockCost], list[float]]:
        return self.costs, self.speeds

    @property
    def moves(self) -> int:
        return sum(planner.moves for planner in self.planners)

    @property
    def recent_moves(self) -> list[dict[str, Any]]:
        return [move for planner in self.planners for move in planner.recent_moves]

    @property
    def speeds(self) -> list[float]:
        return [speed for planner in self.planners for speed in planner.speeds]

    def memory(self, last: ReplicasPlan | None) -> dict[str, dict[str, float]]:
        """For each device with a limit: the limit, and the bytes of its stage in the `last` plan."""
        plans = {} if last is None else dict(last.parts)
        figures: dict[str, dict[str, float]] = {}
        for number, planner in enumerate(self.planners):
            figures |= planner.memory(plans.get(number))
        return figures

    def explain(self) -> str:
        return "".join(
            f"Pipeline {number}: {planner.explain().rstrip()}\n" for number, planner in enumerate(self.planners)
        )


def line_of(seconds_of: Callable[[int], float], half: int, items: int) -> tuple[float, float]:
    """Through the seconds of two numbers of items: a fixed part, and seconds per item."""
    seconds = [seconds_of(count) for count in (half, items)]
    if items == half:
        return 0.0, seconds[1] / items
    slope = max(0.0, (seconds[1] - seconds[0]) / (items - half))
    slope = min(slope, seconds[1] / items)  # so that the fixed part is not negative
    return max(0.0, seconds[1] - slope * items), slope
