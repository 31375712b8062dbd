"""What one step of a pipeline runs: where the module is cut, on which devices, in which micro-batches and in what order."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import NamedTuple

from paceline._core import engine as core
from paceline.plan import StagePlan

# An action that ran: "F" or "B", micro-batch, start and finish in seconds since the step began.
Action = tuple[str, int, float, float]


class PipelinePlan(NamedTuple):
    """A cut module on devices, with what will run. Stages are in the order of the forward."""

    cuts: tuple[int, ...]  # the first block of each stage
    order: tuple[int, ...]  # the device of each stage
    sizes: tuple[int, ...]  # items of each micro-batch
    schedule: str  # as text, one line per stage
    figures: StagePlan | None = None  # the planner's, if it runs as planned

    @property
    def lanes(self) -> int:
        """How many micro-batches are under way at once."""
        stages, count = len(self.cuts), len(self.sizes)
        return max(self.in_flight(0), min(count, stages + 1))  # the latter for predictions

    @property
    def lanes_of(self) -> dict[int, int]:
        """By pipeline: how many lanes. This is the plan of the only one."""
        return {0: self.lanes}

    @property
    def bounds(self) -> list[tuple[int, int]]:
        """The items [begin, end) of each micro-batch."""
        ends = list(itertools.accumulate(self.sizes))
        return list(zip([0, *ends[:-1]], ends, strict=True))

    @property
    def forward_schedule(self) -> str:
        """The same micro-batches without backward."""
        return core.forward_only(len(self.cuts), len(self.sizes))

    def in_flight(self, stage: int) -> int:
        """The most micro-batches that are in flight at once on a stage."""
        return core.in_flight(self.schedule, stage)

    def actions(self) -> list[list[Action]] | None:
        """When the actions of each stage are planned to run. None if this is not the balancer's plan."""
        return None if self.figures is None else core.pipeline_actions(self.figures)

    def stage_of(self, blocks: int) -> list[int]:
        """The stage of each block."""
        return [sum(cut <= block for cut in self.cuts) - 1 for block in range(blocks)]

    def in_one_stage(self) -> PipelinePlan:
        """The same micro-batches on one device, for predictions: one at a time."""
        return self._replace(cuts=(0,), order=self.order[:1], schedule=core.forward_only(1, len(self.sizes)))

    def resized(self, change: Callable[[tuple[int, ...]], tuple[int, ...]]) -> PipelinePlan:
        """The same items in other micro-batches, which train one at a time."""
        return self._replace(sizes=change(self.sizes)).alone()

    def alone(self) -> PipelinePlan:
        """The same with one micro-batch at a time."""
        line = " ".join(f"F{m} B{m}" for m in range(len(self.sizes)))
        return self._replace(schedule="\n".join([line] * len(self.cuts)), figures=None)


def plan_of(plan: StagePlan) -> PipelinePlan:
    """The planner's plan."""
    return PipelinePlan(tuple(plan.cuts), tuple(plan.order), tuple(plan.sizes), plan.schedule_text, plan)
