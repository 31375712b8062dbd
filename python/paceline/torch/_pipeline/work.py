"""One kind of work of a pipeline."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from paceline import DeviceGroup
from paceline.torch._batch.batch import Batch
from paceline.torch._devices.places import Places
from paceline.torch._pipeline.loop import PipelineLoop
from paceline.torch._pipeline.planner import Planner
from paceline.torch._pipeline.plans import PipelinePlan
from paceline.torch._run.launch import LaunchClock
from paceline.torch._run.seen import Seen
from paceline.torch._run.workload import Workload


class PipelineWork(Workload):
    """One kind of work of a pipeline."""

    def __init__(self, group: DeviceGroup, places: Places, planner: Planner) -> None:
        self.step_loop: Any = PipelineLoop(group, planner)
        self.planner = planner
        self.predicts = False
        self.limits = [None] * len(group)
        self.searches = self.fixed = self.corrects = self.normalises = False
        self.seen = Seen(1)
        self.launches = LaunchClock([False])
        self.writes_buffers = False
        self.mode = None
        self.given = None
        self.alone = self.recipe = None
        self.resizes: Callable[[tuple[int, ...]], tuple[int, ...]] | None = None  # micro-batches, for a trial

    def follow(self, whole: Batch, least: int) -> None:
        """Fit what is planned to the batch of the next step. `least`: the fewest items of a micro-batch."""
        self.planner.follow(sum(shape.numel() * dtype.itemsize for shape, dtype in whole.item_shapes), least)

    def plan_for(self, whole: Batch, least: int, must_run_alone: Callable[[PipelinePlan], bool]) -> PipelinePlan:
        """What the next step runs."""
        self.step_loop.settle()
        least = 2 if self.normalises else least
        if self.predicts:
            plan = self.planner.predictions(whole.size, least)
            plan = plan if self.resizes is None else plan.resized(self.resizes)
            return plan.in_one_stage() if must_run_alone(plan) else plan
        self.follow(whole, least)
        plan = self.planner.plan(whole.size)
        if self.resizes is not None:
            plan = plan.resized(self.resizes)
        return plan.alone() if must_run_alone(plan) else plan
