"""Runs one call on several pipelines at the same time. It commits everything, or nothing."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from paceline import Cancelled, DeviceGroup, Unavailable
from paceline._core.engine import Lanes, LaneThreads
from paceline.torch._devices.failures import Failure, note_others
from paceline.torch._devices.places import Places
from paceline.torch._pipeline.blocks import Block
from paceline.torch._pipeline.execution import PipelineExecution
from paceline.torch._pipeline.loop import Outcome
from paceline.torch._pipeline.passage import Passage
from paceline.torch._pipeline.replicas_plan import ReplicasPlan, ReplicasPlanner
from paceline.torch._replicas.lane_replicas import LaneReplicas
from paceline.torch._replicas.replica import Replica
from paceline.torch._run.executor import Executor
from paceline.torch._run.pushing import Pushing


class ReplicasOutcome(Outcome):
    """A step in which all pipelines have succeeded."""

    def __init__(self, plan: ReplicasPlan, parts: Sequence[Outcome], devices: int) -> None:
        self.plan: Any = plan
        self.bounds = plan.bounds
        self.evidence = all(part.evidence for part in parts)
        self.trains = parts[0].trains
        number = max(range(len(parts)), key=lambda k: sum(parts[k].plan.sizes))
        self.largest = plan.parts[number][0], parts[number].last_lane  # the pipeline that ran most items
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


class Together:
    """What cancels all pipelines of a step."""

    def __init__(self) -> None:
        self._all: list[Lanes] = []
        self._lock = threading.Lock()

    def add(self, lanes: Lanes) -> None:
        """A pipeline begins."""
        with self._lock:
            self._all.append(lanes)

    def cancel(self) -> None:
        """Let no further action start."""
        with self._lock:
            for lanes in self._all:
                lanes.cancel()


class _Passages:
    """How the micro-batches of one run pass through all pipelines."""

    def __init__(self, passages: Sequence[Passage], plan: ReplicasPlan, groups: Sequence[DeviceGroup], threads: Sequence[LaneThreads], devices: int) -> None:  # fmt: skip
        self._passages, self.plan, self._groups, self._threads = passages, plan, groups, threads
        self._devices = devices

    def begins(self, begin: int) -> bool:
        return any(passage.begins(begin) for passage in self._passages)

    def turn_back(self) -> list[torch.Tensor]:
        return self._passages[0].turn_back()  # it looks for the journey of the calling thread

    def end(self) -> None:
        self._passages[0].end()

    def surrounded(
        self, around: Callable[[str], contextlib.AbstractContextManager[Any]]
    ) -> contextlib.AbstractContextManager[Any]:
        return self._passages[0].surrounded(around)

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
        together = Together()
        begun(together)
        count = len(self._passages)
        outcomes: list[Outcome | None] = [None] * count
        errors: list[BaseException | None] = [None] * count

        def one(index: int) -> None:
            number = self.plan.parts[index][0]
            try:
                outcome = outcomes[index] = self._passages[index].run(
                    planner.planners[number], run, self._groups[number], self._threads[number], together.add
                )
                if outcome.failed:
                    together.cancel()
            except BaseException as error:
                errors[index] = error
                together.cancel()

        others = [threading.Thread(target=one, args=(index,), daemon=True) for index in range(1, count)]
        for thread in others:
            thread.start()
        one(0)
        try:
            for thread in others:
                thread.join()
        except BaseException:  # Ctrl-C
            if errors[0] is None:  # the first one: what runs comes to its end
                together.cancel()
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


class PushingOfPipelines(Pushing):
    """What the pipeline that ran most items has written."""

    _replicas: LaneReplicas

    def most(self, outcome: Any) -> int:
        number, lane = outcome.largest
        own = self._replicas.of(number)
        return self._replicas.list.index(own[lane if lane < len(own) else 0])

    def buffers(self, outcome: Any) -> None:
        buffers = self._replicas.of(outcome.largest[0])[0].buffers  # those of all its lanes
        if buffers is not None:
            buffers.push()


class ReplicasExecution(PipelineExecution):
    """An `Execution` whose devices are the stages of several copies of the module."""

    def __init__(
        self, group: DeviceGroup, module: nn.Module, places: Places, replicas: LaneReplicas, blocks: list[Block],
        groups: Sequence[DeviceGroup],
    ) -> None:  # fmt: skip
        super().__init__(group, module, places, replicas, blocks)
        self.pushing = PushingOfPipelines(replicas, places)
        self._groups = groups
        self._all_threads = [LaneThreads() for _ in groups]

    def _passage_of(self, plan: ReplicasPlan) -> Any:
        if any(group.busy for group in self._groups):
            raise Unavailable(
                "step: an earlier step has not ended: its workers are still inside user code. Wait for it, or close the trainer."
            )
        self.drop_gradients()  # after a second Ctrl-C, workers that were left behind may have made some
        passages, lane = [], 0
        for (number, part), item in zip(plan.parts, plan.first_items, strict=True):
            passages.append(Passage(self.blocks, part, self._lane_replicas.of(number)[0], item, lane))
            lane += part.lanes
        return _Passages(passages, plan, self._groups, self._all_threads, len(self._names))

    def end(self) -> None:
        super().end()
        for threads in self._all_threads:
            threads.close()
        for group in self._groups:
            group.close()
