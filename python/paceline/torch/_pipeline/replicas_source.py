"""`PipelineReplicas`, whose steps run on several pipelines at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn

from paceline import Cancelled, Device, DeviceGroup, Unavailable
from paceline._core.engine import Lanes, LaneThreads
from paceline.plan import BlockCost
from paceline.torch._batch.objective import Reduction
from paceline.torch._devices.failures import Failure, note_others
from paceline.torch._devices.places import Places, places_of
from paceline.torch._pipeline.blocks import Block, Blocks, blocks_of
from paceline.torch._pipeline.gates import OnLanes
from paceline.torch._pipeline.loop import Outcome
from paceline.torch._pipeline.passage import Passage
from paceline.torch._pipeline.pipeline import PipelineWorks, StagesTrainer, check_on_host
from paceline.torch._pipeline.planner import Planner
from paceline.torch._pipeline.replicas_plan import ReplicasPlan, ReplicasPlanner
from paceline.torch._pipeline.source import Stages
from paceline.torch._replicas.copies import Replicate
from paceline.torch._replicas.lane_replicas import LaneReplicas
from paceline.torch._replicas.replica import Replica
from paceline.torch._run.execution import Execution
from paceline.torch._run.executor import Executor
from paceline.torch._trainer.arguments import Memory, memory_limits
from paceline.torch._trainer.proofs import prove_of


class ReplicasOutcome(Outcome):
    """A step in which all pipelines have succeeded."""

    def __init__(self, plan: ReplicasPlan, parts: Sequence[Outcome], devices: int) -> None:
        self.plan: Any = plan
        self.bounds = plan.bounds
        self.evidence = all(part.evidence for part in parts)
        self.trains = parts[0].trains
        number = max(range(len(parts)), key=lambda k: sum(parts[k].plan.sizes))
        self.largest = plan.parts[number][0], parts[number].largest[1]  # the pipeline that ran most items
        self.failed = False
        self.failed_begin = self.failed_stage = None
        self.started = min(part.started for part in parts)
        self.items = [0] * devices
        self._record = []
        for part, stage, number in zip(parts, plan.first_stages, plan.first_micro_batches, strict=True):
            late = part.started - self.started
            for own, actions in enumerate(part.record):
                self.items[plan.order[stage + own]] = sum(part.plan.sizes)
                self._record.append(
                    [(kind, number + one, start + late, finish + late) for kind, one, start, finish in actions]
                )


class _Passages(OnLanes):
    """How the micro-batches of one run pass through all pipelines."""

    def __init__(self, passages: Sequence[Passage], plan: ReplicasPlan, groups: Sequence[DeviceGroup], threads: Sequence[LaneThreads], devices: int) -> None:  # fmt: skip
        self._passages, self.plan, self._groups, self._threads = passages, plan, groups, threads
        self._devices = devices

    def begins(self, begin: int) -> bool:
        return any(passage.begins(begin) for passage in self._passages)

    def run(
        self,
        planner: ReplicasPlanner,
        run: Executor,
        group: DeviceGroup,
        threads: LaneThreads,
        begun: Callable[[Any], None],
    ) -> Outcome:
        """Run all pipelines at the same time: the first one on the calling thread, which signals reach."""
        planner.note_stages(self.plan)
        lanes: list[Lanes] = []  # of all that have begun

        def cancel() -> None:
            for pipeline in list(lanes):
                pipeline.cancel()

        begun(SimpleNamespace(cancel=cancel))
        count = len(self._passages)
        outcomes: list[Outcome | None] = [None] * count
        errors: list[BaseException | None] = [None] * count

        def one(index: int) -> None:
            number = self.plan.parts[index][0]
            try:
                outcome = outcomes[index] = self._passages[index].run(
                    planner.planners[number], run, self._groups[number], self._threads[number], lanes.append
                )
                if outcome.failed:
                    cancel()
            except BaseException as error:
                errors[index] = error
                cancel()

        others = [threading.Thread(target=one, args=(index,), daemon=True) for index in range(1, count)]
        for thread in others:
            thread.start()
        one(0)
        try:
            for thread in others:
                thread.join()
        except BaseException:  # Ctrl-C
            if errors[0] is None:  # the first one: what runs comes to its end
                cancel()
                for thread in others:
                    thread.join()
            raise
        finished = [outcome for outcome in outcomes if outcome is not None]
        failed = next((outcome for outcome in finished if outcome.failed), None)
        raised = [error for error in errors if error is not None]
        graver = [error for error in raised if not isinstance(error, Cancelled)]
        if graver or (raised and failed is None):
            first, *less = graver or raised
            note_others(first, [Failure("another pipeline", "", error) for error in less])
            raise first
        if failed is not None:  # the others may have been cancelled for it
            return self._of_failure(failed)
        with torch.no_grad():
            add_up(run.replicas[passage.first_lane] for passage in self._passages)
        return ReplicasOutcome(self.plan, finished, self._devices)

    def _of_failure(self, failed: Outcome) -> Outcome:
        index = next(k for k, (_, part) in enumerate(self.plan.parts) if part is failed.plan)
        if failed.failed_stage is not None:
            failed.failed_stage += self.plan.first_stages[index]
        failed.failed_where = f"pipeline {self.plan.parts[index][0]}, {failed.failed_where}"
        return failed


def add_up(pipelines: Iterable[Replica]) -> None:
    """Add the gradients of all pipelines to those of the first one that has them. Takes one replica of each, in their order."""
    for parameters in zip(*(one.parameters for one in pipelines), strict=True):
        gradients = [one.grad for one in parameters if one.grad is not None]
        for gradient in gradients[1:]:
            gradients[0].add_(gradient)


class ReplicatedStages(Stages):
    """The devices are the stages of several copies of the module."""

    def __init__(
        self, group: DeviceGroup, module: nn.Module, places: Places, replicas: LaneReplicas, blocks: list[Block],
        groups: Sequence[DeviceGroup],
    ) -> None:  # fmt: skip
        super().__init__(group, module, places, replicas, blocks)
        self._groups = groups
        self._all_threads = [LaneThreads() for _ in groups]

    def _passage_of(self, plan: ReplicasPlan) -> Any:
        if any(group.busy for group in self._groups):
            raise Unavailable(
                "step: an earlier step has not ended: its workers are still inside user code. Wait for it, or close the trainer."
            )
        self._replicas.clear_gradients()  # after a second Ctrl-C, workers that were left behind may have made some
        passages, lane = [], 0
        for (number, part), item in zip(plan.parts, plan.first_items, strict=True):
            passages.append(Passage(self._blocks, part, self._replicas.of(number)[0], item, lane))
            lane += part.lanes
        return _Passages(passages, plan, self._groups, self._all_threads, len(self._places))

    def end(self) -> None:
        super().end()
        for threads in self._all_threads:
            threads.close()
        for group in self._groups:
            group.close()


class PipelineReplicas(StagesTrainer):
    """Trains `module` on several pipelines at once, each with a part of every batch. `Layout.trainer` makes these.

    Each pipeline has a copy of the module, which shares the parameters, on devices of its own. The parts are as large as makes all pipelines
    finish at the same time. At the end of a step the gradients are added up, and committed if all pipelines have succeeded. So a gradient
    equals that of one device up to the order of floating-point sums.

    It has the calls of `Pipeline`. ``report()["pipeline"]["stages"]`` lists the stages of all pipelines, one after the other. Batch
    normalisation updates the running statistics with those of the pipeline that ran most items.

    Parameters
    ----------
    module, blocks, memory, reduction, replicate
        As for `Pipeline`.
    pipelines
        The devices of each pipeline. No device is in two of them.
    costs, speeds
        What `layout` has measured: of the blocks, and of all devices in order.
    """

    _planner: ReplicasPlanner

    def __init__(
        self,
        module: nn.Module,
        pipelines: Sequence[Sequence[Device]],
        *,
        costs: Sequence[BlockCost],
        speeds: Sequence[Sequence[float]],
        blocks: Blocks | None = None,
        memory: Memory | None = None,
        reduction: Reduction = "mean",
        replicate: Replicate | None = None,
    ) -> None:
        proves = prove_of(None)
        found = blocks_of(module, blocks)
        local = DeviceGroup([device for devices in pipelines for device in devices])
        groups: list[DeviceGroup] = []
        try:
            check_on_host("replicas of pipelines", local)
            groups += [DeviceGroup(list(devices)) for devices in pipelines]
            limits = iter(memory_limits("PipelineReplicas", memory, local))
            planners = []
            for group, own_speeds in zip(groups, speeds, strict=True):
                own_limits = [next(limits) for _ in group.devices]
                planner = Planner(
                    group, found, list(module.parameters()), own_limits, cuts=None, schedule="auto", micro_batches=None
                )
                planner.begin_with(costs, own_speeds)
                planners.append(planner)
            self._planner = ReplicasPlanner(groups, planners)
            places = places_of(local, module)
            works = PipelineWorks(local, places, self._planner)
            replicas = LaneReplicas(module, places, replicate, len(groups))
            source = ReplicatedStages(local, module, places, replicas, found, groups)
        except BaseException:
            for group in (local, *groups):
                group.close()
            raise
        options: dict[str, Any] = {"reduction": reduction, "prove": proves}
        self._assemble(module, local, works=works, execution=Execution(module, places, replicas, source), **options)
