"""Runs one call of a pipeline on its devices. It commits everything, or nothing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline import DeviceGroup, InvalidArgument
from paceline._core.engine import Lanes, LaneThreads, run_pipeline
from paceline.torch._batch.batch import Batch
from paceline.torch._devices.caller_state import CallerState
from paceline.torch._devices.lanes import LanePlaces, SharedPlaces
from paceline.torch._devices.places import Places
from paceline.torch._pipeline.blocks import Block, any_compiled
from paceline.torch._pipeline.gates import Journey, Separated, gated, journey_here, travelling
from paceline.torch._pipeline.loop import Outcome, PipelineWork
from paceline.torch._pipeline.plans import PipelinePlan
from paceline.torch._replicas.replicas import LaneReplicas
from paceline.torch._run.execution import Execution
from paceline.torch._run.run import Frame, Run, TrainRun
from paceline.torch._run.workload import Workload


class PipelineExecution(Execution):
    """An `Execution` whose devices are the stages of one copy of the module."""

    def __init__(
        self,
        group: DeviceGroup,
        module: nn.Module,
        places: Places,
        replicas: LaneReplicas,
        shared: SharedPlaces,
        blocks: list[Block],
    ) -> None:
        super().__init__(group, module, places, replicas)
        self.blocks = blocks
        self._lane_replicas = replicas
        self._shared = shared
        self._one_module = any_compiled(blocks)  # for all lanes, since each module compiles by itself
        self.threads = LaneThreads()
        self._group = group
        self._warned_of_norms = (
            True  # the promise is about these micro-batches, over which norms do what they do on one device
        )

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
        plan = work.plan_for(whole, frame.least, self._must_run_alone(work, whole))
        lanes = plan.lanes
        work.seen.sizes = [work.seen.sizes[0]] * lanes
        work.seen.ever = [work.seen.ever[0]] * lanes
        places = LanePlaces(self.places, lanes)
        if not self._one_module and lanes > self._shared.lanes:
            self._shared.lanes = lanes
            self._lane_replicas.grow()
        replicas = self.replicas.list * lanes if self._one_module else self.replicas.list[:lanes]
        return frame._replace(
            replicas=replicas,
            state=CallerState(self.places.types, lanes),
            places=places,
            limits=[None] * lanes,
            searches=False,
            divides=False,
            passage=_Passage(self, plan),
        )

    def _must_run_alone(self, work: Workload, whole: Batch) -> Callable[[PipelinePlan], bool]:
        """Whether some block may compile for the sizes of a plan. Dynamo is not thread-safe, so micro-batches then run one after the other."""

        def must(plan: PipelinePlan) -> bool:
            if not work.seen.compiled:
                return False
            known = {size[0] for size in work.seen.sizes[0]}
            return not known.issuperset(plan.sizes)

        return must

    def _run_devices(self, work: Workload, run: Run) -> Any:
        passage = run.passage
        assert isinstance(passage, _Passage)
        assert isinstance(work, PipelineWork)
        return passage.run(work, run, self._group, self.threads)

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

    def explain(self) -> str:
        return ""

    def end(self) -> None:
        self.threads.close()


class _Passage:
    """How the micro-batches of one run pass through the stages."""

    def __init__(self, execution: PipelineExecution, plan: PipelinePlan) -> None:
        self.plan = plan
        self._execution = execution
        self._blocks = execution.blocks
        self._separate = Separated(execution.replicas.list[0].parameters)
        self._stage_of = plan.stage_of(len(execution.blocks))

    def begins(self, begin: int) -> bool:
        return begin == 0

    def turn_back(self) -> list[torch.Tensor]:
        journey = journey_here()
        assert journey is not None
        return journey.turn_back()

    def end(self) -> None:
        journey = journey_here()
        assert journey is not None
        journey.end()

    def run(self, work: PipelineWork, run: Run, group: DeviceGroup, threads: LaneThreads) -> Outcome:
        """Run all micro-batches. Failures are in the run."""
        plan, bounds = self.plan, self.plan.bounds
        parameters = run.replicas[0].parameters  # those of all lanes
        modules = [
            [replica.counterparts.get(id(block.module), block.module) for block in self._blocks]
            for replica in dict.fromkeys(run.replicas)
        ]
        trains = isinstance(run, TrainRun)
        schedule = plan.schedule if trains else plan.forward_schedule
        measured = work.planner.measures if trains else None
        codes: list[int] = []
        last_lane = 0
        at: dict[int, Journey] = {}
        lock = threading.Lock()

        def carry(lane: int, micro_batch: int) -> int:
            nonlocal last_lane
            begin, end = bounds[micro_batch]
            if micro_batch == len(bounds) - 1:
                last_lane = lane
            clock = None
            if measured is not None:
                clock = measured.clocks[micro_batch] = work.planner.clock(parameters)
            journey = Journey(
                lanes,
                micro_batch,
                self._blocks,
                self._stage_of,
                self._separate,
                lambda stage: None,
                trains=trains,
                watcher=clock,
            )
            with lock:
                at[begin] = journey
            try:
                with contextlib.ExitStack() as stack:
                    stack.enter_context(travelling(journey))
                    if clock is not None and micro_batch == 0:
                        stack.enter_context(clock.counting_saved(parameters))
                    code = run.body(lane, begin, end, 0)
                codes.append(code if isinstance(code, int) else code[0])
                return codes[-1]
            finally:
                journey.forget()

        lanes = Lanes(threads, schedule, carry)
        work.step_loop.lanes = lanes
        try:
            with gated(modules):
                outcome = run_pipeline(group, lanes, schedule, list(plan.order))
        finally:
            work.step_loop.lanes = None
        begin = None
        if run.failures:
            failed = outcome.failed_action
            begin = bounds[failed[2]][0] if failed is not None else run.failures[0][1]
        journey = None if begin is None else at.get(begin)
        return Outcome(
            plan,
            outcome,
            self._blocks,
            [device.name for device in group.devices],
            begin,
            journey,
            evidence=not any(codes),
            trains=trains,
            last_lane=last_lane,
        )
