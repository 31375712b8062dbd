"""What an `Execution` has the devices of a pipeline run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline import DeviceGroup, InvalidArgument, OutOfMemory
from paceline._core.engine import LaneThreads
from paceline.torch._batch.batch import Batch
from paceline.torch._devices.caller_state import CallerState
from paceline.torch._devices.lanes import LanePlaces
from paceline.torch._devices.places import Places
from paceline.torch._devices.run_draws import RandomStates
from paceline.torch._features.every import every_feature
from paceline.torch._pipeline.blocks import Block, OtherOrderError
from paceline.torch._pipeline.carried import Carried
from paceline.torch._pipeline.chain import Chain
from paceline.torch._pipeline.gates import without_transforms
from paceline.torch._pipeline.loop import Outcome, PipelineWork
from paceline.torch._pipeline.materialise import Unfilled
from paceline.torch._pipeline.measure import BlockClock
from paceline.torch._pipeline.order import OtherOrder
from paceline.torch._pipeline.passage import Passage
from paceline.torch._pipeline.plans import PipelinePlan
from paceline.torch._replicas.buffers import KeptAttributes, KeptBuffers
from paceline.torch._replicas.lane_replicas import LaneReplicas
from paceline.torch._run.call import Asked, Call
from paceline.torch._run.executor import Executor
from paceline.torch._run.failing import Failing
from paceline.torch._run.feature import Feature
from paceline.torch._run.memory import is_out_of_memory
from paceline.torch._run.pushing import Pushing
from paceline.torch._run.source import Source

CURE_OF_NORMS = (
    "Their number is planned from measured times. Fix it with micro_batches=, so that runs repeat, and as small as memory allows; 1 gives the "
    "statistics of the batch. Or use GroupNorm or LayerNorm, or evaluation mode for these modules."
)


class PushingOfLanes(Pushing):
    """What the pipeline that ran most items has written. All its lanes have the same buffers. Attributes come from the lane that ran last."""

    _replicas: LaneReplicas

    def most(self, outcome: Any) -> int:
        number, lane = outcome.largest
        own = self._replicas.of(number)
        return self._replicas.list.index(own[lane if lane < len(own) else 0])

    def buffers(self, outcome: Any) -> None:
        buffers = self._replicas.of(outcome.largest[0])[0].buffers
        if buffers is not None:
            buffers.push()


class FailingOnStages(Failing):
    """The number of a failure is that of a lane, which has been on several devices."""

    def first(self, run: Executor, outcome: Outcome) -> tuple[int | None, int, int, BaseException]:
        failed = outcome.failed_begin
        device, begin, end, error = next((one for one in run.failures if one[1] == failed), run.failures[0])
        return device, begin, end, without_transforms(error)

    def where(self, device: int, outcome: Outcome) -> str:
        return outcome.failed_where

    def where_too(self, device: int | None) -> str:
        return "the pipeline"


class Stages(Source):
    """The devices are the stages of one copy of the module. Each micro-batch passes through all of them, on a lane."""

    without_costs = "a pipeline runs the items in their order, in micro-batches of equal size, so costs have nothing to balance. Leave it out."

    def __init__(
        self,
        group: DeviceGroup,
        module: nn.Module,
        places: Places,
        replicas: LaneReplicas,
        blocks: list[Block],
        *mends: Feature,
    ) -> None:
        mends = OtherOrder(), Carried(blocks), *mends
        features = every_feature(replicas, cure_of_norms=CURE_OF_NORMS, mends=mends)
        super().__init__(features, PushingOfLanes(replicas, places), FailingOnStages(places.names), CURE_OF_NORMS)
        self._group, self._module, self._places, self._replicas, self._blocks = group, module, places, replicas, blocks
        self._generation = replicas.generation
        self._count = len(replicas.parameters)
        self.unfilled: Unfilled | None = None  # if the module has no memory yet
        self.at_end: list[Callable[[], None]] = []  # what takes away what was registered for the trainer
        self._threads = LaneThreads()

    def begin(self, asked: Asked) -> None:
        work = asked.work
        assert isinstance(work, PipelineWork)
        if self.unfilled is not None and not work.predicts:
            self.measure(work, asked.batch, asked.fn)
            work.planner.plan_step(asked.batch.size)  # which tells whether it fits, before it has any memory
        self.fill()

    def plan(self, call: Call) -> None:
        work, replicas = call.work, self._replicas
        assert isinstance(work, PipelineWork)
        if replicas.generation != self._generation:
            self._check_module()
            work.planner.renewed(replicas.parameters)
        plan = work.plan_for(call.whole, call.recipe.constraints.least)
        if self._must_run_alone(work, call.whole, plan):
            plan = plan.in_one_stage() if work.predicts else plan.alone()
        if self._place(plan, hooks=call.asked.hooks):
            work.seen.follow(replicas, self._module, call.fn, call.state)
        lanes = plan.lanes
        work.seen.sizes = [work.seen.sizes[0]] * lanes
        work.seen.ever = [work.seen.ever[0]] * lanes
        replicas.need(plan.lanes_of)
        call.replicas = [one for pipeline, count in plan.lanes_of.items() for one in replicas.of(pipeline)[:count]]
        call.places, call.limits = self._places_of(plan), [None] * lanes
        call.state = CallerState(self._places.types, lanes, caches_casts=False)
        call.passage = self._passage_of(plan)

    def run(self, run: Executor) -> Any:
        passage: Any = run.passage
        work = run.call.work
        assert isinstance(work, PipelineWork)
        try:
            with run.surrounded():
                outcome = passage.run(work.planner, run, self._group, self._threads, work.step_loop.begin)
            if work.planner.plans_micro_batches:
                outcome.micro_batches = len(outcome.bounds)
            return outcome
        finally:
            work.step_loop.lanes = None

    def measure(self, work: PipelineWork, whole: Batch, fn: Callable[..., Any]) -> None:
        """Measure the blocks of a module without memory one after the other."""
        planner = work.planner
        if self.unfilled is None or not planner.measures:
            return
        work.follow(whole, self.features.constraints(self._replicas, work).least)
        chain = Chain(self._module, self._blocks, self.unfilled.outside, planner.glue, reorders=planner.finds_order)
        parts = list(self._module.modules())
        random, attributes, buffers = RandomStates(self._places), KeptAttributes(parts), KeptBuffers(parts)

        def run(size: int, counts: bool) -> BlockClock:
            return chain.run(fn, whole.slice(0, size, torch.clone), counts=counts)

        try:
            while planner.measures:
                try:
                    planner.measure(whole.size, run)
                except OtherOrderError as error:
                    planner.reorder(error.calls)
                except Exception as error:  # if memory ran out, smaller micro-batches may do
                    refused = without_transforms(error)
                    if refused is not error:
                        raise refused from error
                    if isinstance(error, OutOfMemory) or not is_out_of_memory(error) or not planner.out_of_memory(0):
                        raise
        finally:
            attributes.restore()
            buffers.restore()
            random.restore()

    def fill(self) -> None:
        if self.unfilled is not None:
            self.at_end.append(self.unfilled.fill())
            self.unfilled = None
            self._replicas.renew()

    def _check_module(self) -> None:
        """Raise if the module has other blocks or parameters than when it was cut."""
        parts = dict(self._replicas.named_modules)
        if len(self._replicas.parameters) != self._count or any(
            parts.get(name) is not part for name, part in self._blocks
        ):
            raise InvalidArgument(
                "Pipeline: the module has other blocks or parameters than when the Pipeline was made, so it is cut in the wrong places: parts were "
                "replaced, added or tied since. Close this one and make a new Pipeline."
            )
        self._generation = self._replicas.generation

    def _place(self, plan: PipelinePlan, *, hooks: bool) -> bool:
        """Bring the module to where the plan's stages are. Returns whether anything has moved."""
        return False

    def _places_of(self, plan: PipelinePlan) -> LanePlaces:
        return LanePlaces(self._places, plan.lanes)

    def _passage_of(self, plan: Any) -> Any:
        return Passage(self._blocks, plan, self._replicas.list[0])

    def _must_run_alone(self, work: PipelineWork, whole: Batch, plan: PipelinePlan) -> bool:
        """Whether some block may compile for the sizes of a plan. Dynamo is not thread-safe, so micro-batches then run one after the other."""
        sizes = work.seen.sizes[0]
        return work.seen.compiled and any(work.seen.size_of(whole, *bounds) not in sizes for bounds in plan.bounds)

    def end(self) -> None:
        super().end()
        while self.at_end:
            self.at_end.pop()()
        self._threads.close()
