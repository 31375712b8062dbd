"""The passage of micro-batches through the stages of one pipeline."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from paceline import DeviceGroup
from paceline._core.engine import Lanes, LaneThreads, run_pipeline
from paceline.torch._batch.batch import Batch
from paceline.torch._devices.caller_state import forget_failed_backward
from paceline.torch._pipeline.blocks import Block
from paceline.torch._pipeline.gates import Journey, OnLanes, Separated, gated, travelling
from paceline.torch._pipeline.loop import Outcome
from paceline.torch._pipeline.measure import BlockClock
from paceline.torch._pipeline.plans import PipelinePlan
from paceline.torch._replicas.replica import Replica
from paceline.torch._run.executor import FAILED, Executor
from paceline.torch._run.train_run import TrainRun


class Passage(OnLanes):
    """How the micro-batches of one run pass through the stages of one pipeline.

    `replica`: the module of one of its lanes. `first_item` and `first_lane`: where its part of the batch and of the run's lanes begins.
    """

    def __init__(
        self, blocks: list[Block], plan: PipelinePlan, replica: Replica, first_item: int = 0, first_lane: int = 0
    ) -> None:
        self.plan, self.blocks, self.first_item, self.first_lane = plan, blocks, first_item, first_lane
        self.bounds = [(begin + first_item, end + first_item) for begin, end in plan.bounds]
        self.separate = Separated(replica.parameters)
        self.stage_of = plan.stage_of(len(blocks))
        self.names: list[str] = []  # of the stages' devices
        self.reorders = False  # whether the blocks may get another order

    def begins(self, begin: int) -> bool:
        return begin == self.first_item

    def run(
        self, planner: Any, run: Executor, group: DeviceGroup, threads: LaneThreads, begun: Callable[[Lanes], None]
    ) -> Outcome:
        """Run all micro-batches. Failures are in the run. `begun` gets what can cancel it."""
        plan, bounds = self.plan, self.bounds
        self.names, self.reorders = [group.devices[device].name for device in plan.order], planner.finds_order
        replicas = run.replicas[self.first_lane : self.first_lane + plan.lanes]
        parameters = replicas[0].parameters  # those of all lanes
        modules = [
            [replica.counterparts.get(id(block.module), block.module) for block in self.blocks]
            for replica in dict.fromkeys(replicas)
        ]
        trains = isinstance(run, TrainRun)
        schedule = plan.schedule if trains else plan.forward_schedule
        measured = planner.measured if trains else None
        self.separate.outside = run.outside if isinstance(run, TrainRun) else None
        codes: list[int] = []
        last_lane = 0
        at: dict[int, Journey] = {}

        def carry(lane: int, micro_batch: int) -> int:
            nonlocal last_lane
            begin, end = bounds[micro_batch]
            if micro_batch == len(bounds) - 1:
                last_lane = lane
            clock = None
            if measured is not None:
                counts = not any(one.ran for one in measured.clocks.values())
                clock = measured.clocks[micro_batch] = self._clock(planner, parameters)
            journey = at[begin] = self._journey(lanes, micro_batch, clock, trains=trains)
            try:
                with contextlib.ExitStack() as stack:
                    stack.enter_context(travelling(journey))
                    if clock is not None and counts:
                        assert isinstance(run.batch, Batch)
                        there = [*parameters, *(tensor for _, tensor in run.batch.tensors())]
                        stack.enter_context(clock.counting_saved(there))
                    self._surround(stack, journey)
                    code = run.body(self.first_lane + lane, begin, end, 0)
                code = code if isinstance(code, int) else code[0]
                codes.append(code)
                if code == FAILED and trains:
                    forget_failed_backward()  # this lane may have nothing to do in the next attempt
                return code
            finally:
                journey.forget()

        lanes = Lanes(threads, schedule, carry)
        begun(lanes)
        self._begin()
        with self._calls(dict.fromkeys(replicas)), gated(modules):  # a gate is passed before anything else
            ran = run_pipeline(group, lanes, schedule, list(plan.order))
        begin = None
        if run.failures:
            failed = ran.failed_action
            begin = bounds[failed[2]][0] if failed is not None else run.failures[0][1]
        journey = None if begin is None else at.get(begin)
        block = -1 if journey is None else journey.block
        outcome = Outcome(self, ran, len(group), begin, block, evidence=not any(codes), trains=trains, lane=last_lane)
        self._end(outcome)
        return outcome

    # What differs where stages have memories of their own

    def _begin(self) -> None:
        """Before a run."""

    def _end(self, outcome: Outcome) -> None:
        """After a run."""

    def _clock(self, planner: Any, parameters: Sequence[torch.Tensor]) -> BlockClock:
        clock: BlockClock = planner.clock(parameters)
        return clock

    def _journey(self, lanes: Lanes, micro_batch: int, clock: BlockClock | None, *, trains: bool) -> Journey:
        return Journey(self, lanes, micro_batch, trains=trains, watcher=clock)

    def _surround(self, stack: contextlib.ExitStack, journey: Journey) -> None:
        """Enter what surrounds a micro-batch on its lane."""

    def _calls(self, replicas: Iterable[Replica]) -> contextlib.AbstractContextManager[None]:
        """While a run calls modules that are no blocks."""
        return contextlib.nullcontext()
