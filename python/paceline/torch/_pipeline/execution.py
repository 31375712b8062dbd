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
from paceline.torch._devices.lanes import LanePlaces
from paceline.torch._devices.places import Places
from paceline.torch._pipeline.blocks import Block
from paceline.torch._pipeline.gates import Journey, Separated, gated, journey_here, travelling
from paceline.torch._pipeline.loop import Outcome, PipelineWork
from paceline.torch._pipeline.plans import PipelinePlan
from paceline.torch._replicas.replicas import LaneReplicas, Replica
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
        blocks: list[Block],
    ) -> None:
        super().__init__(group, module, places, replicas)
        self.blocks = blocks
        self._lane_replicas = replicas
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
        plan = work.plan_for(whole, frame.least, self._must_run_alone(work, whole))
        lanes = plan.lanes
        work.seen.sizes = [work.seen.sizes[0]] * lanes
        work.seen.ever = [work.seen.ever[0]] * lanes
        places = LanePlaces(self.places, lanes)
        return frame._replace(
            replicas=self._replicas_of_lanes(plan),
            state=CallerState(self.places.types, lanes, caches_casts=False),
            places=places,
            limits=[None] * lanes,
            searches=False,
            divides=False,
            passage=self._passage_of(plan),
        )

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
            return passage.run(work.planner, run, self._group, self.threads, begun)
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

    def explain(self) -> str:
        return ""

    def end(self) -> None:
        self.threads.close()


class Passage:
    """How the micro-batches of one run pass through the stages of one pipeline.

    `replica`: the module of one of its lanes. `first_item` and `first_lane`: where its part of the batch and of the run's lanes begins.
    """

    def __init__(
        self, blocks: list[Block], plan: PipelinePlan, replica: Replica, first_item: int = 0, first_lane: int = 0
    ) -> None:
        self.plan = plan
        self.first_item = first_item
        self.first_lane = first_lane
        self._blocks = blocks
        self._separate = Separated(replica.parameters)
        self._stage_of = plan.stage_of(len(blocks))

    def begins(self, begin: int) -> bool:
        return begin == self.first_item

    def turn_back(self) -> list[torch.Tensor]:
        journey = journey_here()
        assert journey is not None
        return journey.turn_back()

    def end(self) -> None:
        journey = journey_here()
        assert journey is not None
        journey.end()

    def run(
        self, planner: Any, run: Run, group: DeviceGroup, threads: LaneThreads, begun: Callable[[Lanes], None]
    ) -> Outcome:
        """Run all micro-batches. Failures are in the run. `begun` gets what can cancel it."""
        plan = self.plan
        bounds = [(begin + self.first_item, end + self.first_item) for begin, end in plan.bounds]
        replicas = run.replicas[self.first_lane : self.first_lane + plan.lanes]
        parameters = replicas[0].parameters  # those of all lanes
        modules = [
            [replica.counterparts.get(id(block.module), block.module) for block in self._blocks]
            for replica in dict.fromkeys(replicas)
        ]
        trains = isinstance(run, TrainRun)
        schedule = plan.schedule if trains else plan.forward_schedule
        measured = planner.measures if trains else None
        self._separate.outside = run.outside if isinstance(run, TrainRun) else None
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
                counts = not any(one.ran for one in measured.clocks.values())
                clock = measured.clocks[micro_batch] = planner.clock(parameters)
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
                    if clock is not None and counts:
                        assert isinstance(run.batch, Batch)
                        there = [*parameters, *(tensor for _, tensor in run.batch.tensors())]
                        stack.enter_context(clock.counting_saved(there))
                    code = run.body(self.first_lane + lane, begin, end, 0)
                codes.append(code if isinstance(code, int) else code[0])
                return codes[-1]
            finally:
                journey.forget()

        lanes = Lanes(threads, schedule, carry)
        begun(lanes)
        with gated(modules):
            outcome = run_pipeline(group, lanes, schedule, list(plan.order))
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
            first_item=self.first_item,
        )
