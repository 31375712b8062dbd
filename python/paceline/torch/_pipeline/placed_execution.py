"""Runs one call of a pipeline of which some devices are GPUs."""

from __future__ import annotations

from collections.abc import Callable
from itertools import groupby
from typing import Any

from torch import nn

from paceline import DeviceGroup
from paceline.torch._batch.batch import Batch
from paceline.torch._devices.lanes import LanePlaces
from paceline.torch._devices.stages import StageLanePlaces, StagePlaces
from paceline.torch._pipeline.blocks import Block
from paceline.torch._pipeline.execution import PipelineExecution
from paceline.torch._pipeline.placed import PlacedPassage
from paceline.torch._pipeline.placement import Placement
from paceline.torch._pipeline.plans import PipelinePlan
from paceline.torch._pipeline.visited import visited_in
from paceline.torch._pipeline.work import PipelineWork
from paceline.torch._replicas.lane_replicas import LaneReplicas
from paceline.torch._run.executor import Executor
from paceline.torch._run.feature import Feature
from paceline.torch._run.recipe import Retry
from paceline.torch._run.workload import Workload

_ELSEWHERE = "Expected all tensors to be on the same device"  # PyTorch's words, for which it has no type


class Strays(Feature):
    """Looks after tensors that an operator met in another memory, from the first such error on."""

    def __init__(self) -> None:
        self.looks = False

    def mend(self, run: Executor, error: BaseException, outcome: Any) -> Retry | BaseException | None:
        if self.looks or not isinstance(error, RuntimeError) or _ELSEWHERE not in str(error):
            return None
        self.looks = True
        return Retry("a tensor is in another memory")


class PlacedExecution(PipelineExecution):
    """A `PipelineExecution` whose stages have memories of their own."""

    places: StagePlaces

    def __init__(
        self, group: DeviceGroup, module: nn.Module, places: StagePlaces, replicas: LaneReplicas, blocks: list[Block]
    ) -> None:
        self._strays = Strays()
        super().__init__(group, module, places, replicas, blocks, self._strays)
        self._placement = Placement(module, blocks, places)

    def _place(self, plan: PipelinePlan, fn: Callable[..., Any], *, hooks: bool) -> bool:
        moved = self._placement.follow(plan)
        if moved:
            self.replicas.refresh(hooks=hooks)
        return moved

    def _must_run_alone(self, work: Workload, whole: Batch) -> Callable[[PipelinePlan], bool]:
        """Compiled code is compiled again for each device. Predictions need no plan for that: who compiles holds up only those behind it."""
        must = super()._must_run_alone(work, whole)
        assert isinstance(work, PipelineWork)
        if work.predicts:
            return lambda plan: False
        return lambda plan: must(plan) or (work.seen.compiled and self._placement.would_move(plan))

    def _places_of(self, plan: PipelinePlan) -> LanePlaces:
        return StageLanePlaces(self.places, plan.lanes, plan.order[-1])

    def _passage_of(self, plan: PipelinePlan) -> PlacedPassage:
        visited, compiled = visited_in(self.replicas.named_modules, self.blocks)
        replica = self.replicas.list[0]
        return PlacedPassage(
            self.blocks,
            plan,
            replica,
            self.places,
            self._placement,
            visited,
            compiled,
            strays=self._strays.looks or self._comes_back(plan),
        )

    def _comes_back(self, plan: PipelinePlan) -> bool:
        """Whether stages of one memory have another one between them. No operator fails there on a tensor that has a later copy."""
        memories = [memory for memory, _ in groupby(self.places.devices[device] for device in plan.order)]
        return len(set(memories)) < len(memories)

    def gather(self) -> None:
        self._placement.gather()

    def release(self) -> None:
        super().release()
        self._placement.home()
