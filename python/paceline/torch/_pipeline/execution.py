"""Runs one call of a pipeline on its devices. It commits everything, or nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from paceline import DeviceGroup, InvalidArgument
from paceline._core.engine import Lanes, LaneThreads
from paceline.torch._batch.batch import Batch
from paceline.torch._devices.caller_state import CallerState
from paceline.torch._devices.lanes import LanePlaces
from paceline.torch._devices.places import Places
from paceline.torch._pipeline.blocks import Block
from paceline.torch._pipeline.loop import Outcome, PipelineWork
from paceline.torch._pipeline.passage import Passage
from paceline.torch._pipeline.plans import PipelinePlan
from paceline.torch._replicas.replicas import LaneReplicas, Replica
from paceline.torch._run.execution import Execution
from paceline.torch._run.run import Frame, Run
from paceline.torch._run.workload import Workload


class PipelineExecution(Execution):
    """An `Execution` whose devices are the stages of one copy of the module."""

    cure_of_norms = (
        "Their number is planned from measured times. Fix it with micro_batches=, so that runs repeat, and as small as memory allows; 1 gives the "
        "statistics of the batch. Or use GroupNorm or LayerNorm, or evaluation mode for these modules."
    )

    def __init__(
        self,
        group: DeviceGroup,
        module: nn.Module,
        places: Places,
        replicas: LaneReplicas,
        blocks: list[Block],
    ) -> None:
        super().__init__(group, module, places, replicas)
        self.blocks = blocks
        self._lane_replicas = replicas
        self._generation = replicas.generation
        self._count = len(replicas.parameters)
        self.threads = LaneThreads()
        self._group = group

    def frame(
        self,
        work: Workload,
        whole: Batch,
        fn: Callable[..., Any],
        costs: list[float] | None = None,
        order: list[int] | None = None,
        *,
        hooks: bool = False,
    ) -> Frame:
        if costs is not None:
            raise InvalidArgument(
                "cost=: a pipeline runs the items in their order, in micro-batches of equal size, so costs have nothing to balance. Leave it out."
            )
        assert isinstance(work, PipelineWork)
        frame = super().frame(work, whole, fn, hooks=hooks)
        if self.replicas.generation != self._generation:
            self._check_module()
        plan = work.plan_for(whole, frame.least, self._must_run_alone(work, whole))
        if self._place(plan, fn, hooks=hooks):
            work.seen.follow(self.replicas, self.module, fn, frame.state)
        lanes = plan.lanes
        work.seen.sizes = [work.seen.sizes[0]] * lanes
        work.seen.ever = [work.seen.ever[0]] * lanes
        places = self._places_of(plan)
        return frame._replace(
            replicas=self._replicas_of_lanes(plan),
            state=CallerState(self.places.types, lanes, caches_casts=False),
            places=places,
            limits=[None] * lanes,
            searches=False,
            divides=False,
            passage=self._passage_of(plan),
        )

    def _check_module(self) -> None:
        """Raise if the module has other blocks or parameters than when it was cut."""
        parts = dict(self.replicas.named_modules)
        if len(self.replicas.parameters) != self._count or any(
            parts.get(name) is not part for name, part in self.blocks
        ):
            raise InvalidArgument(
                "Pipeline: the module has other blocks or parameters than when the Pipeline was made, so it is cut in the wrong places: parts were "
                "replaced, added or tied since. Close this one and make a new Pipeline."
            )
        self._generation = self.replicas.generation

    def _place(self, plan: PipelinePlan, fn: Callable[..., Any], *, hooks: bool) -> bool:
        """Bring the module to where the plan's stages are. Returns whether anything has moved."""
        return False

    def _places_of(self, plan: PipelinePlan) -> LanePlaces:
        return LanePlaces(self.places, plan.lanes)

    def _replicas_of_lanes(self, plan: Any) -> list[Replica]:
        self._lane_replicas.need(plan.lanes_of)
        return [one for pipeline, count in plan.lanes_of.items() for one in self._lane_replicas.of(pipeline)[:count]]

    def _passage_of(self, plan: Any) -> Any:
        return Passage(self.blocks, plan, self.replicas.list[0])

    def _must_run_alone(self, work: Workload, whole: Batch) -> Callable[[PipelinePlan], bool]:
        """Whether some block may compile for the sizes of a plan. Dynamo is not thread-safe, so micro-batches then run one after the other."""

        def must(plan: PipelinePlan) -> bool:
            if not work.seen.compiled:
                return False
            return any(work.seen.size_of(whole, *bounds) not in work.seen.sizes[0] for bounds in plan.bounds)

        return must

    def _run_devices(self, work: Workload, run: Run) -> Any:
        passage: Any = run.passage
        assert isinstance(work, PipelineWork)
        loop = work.step_loop

        def begun(lanes: Lanes) -> None:
            loop.lanes = lanes

        try:
            outcome = passage.run(work.planner, run, self._group, self.threads, begun)
            if work.planner.plans_micro_batches:
                outcome.micro_batches = len(outcome.bounds)
            return outcome
        finally:
            loop.lanes = None

    def _first_failure(self, run: Run, outcome: Outcome) -> tuple[int | None, int, int, BaseException]:
        failed = outcome.failed_begin
        return next((one for one in run.failures if one[1] == failed), run.failures[0])

    def _where(self, device: int, outcome: Outcome) -> str:
        return outcome.failed_where

    def _most(self, outcome: Any) -> int:
        lane: int = outcome.last_lane
        return lane if lane < len(self.replicas.list) else 0

    def _commit_buffers(self, outcome: Any) -> None:
        buffers = self.replicas.list[0].buffers  # those of all lanes
        if buffers is not None:
            buffers.push()

    def end(self) -> None:
        self.threads.close()
