"""What takes part in a commit: gradients, tensors outside of the module, buffers and attributes, counters, the sampler."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from paceline import InvalidArgument
from paceline.torch._replicas.buffers import SharedBuffers
from paceline.torch._run.executor import Executor
from paceline.torch._run.gradients import UserGradients
from paceline.torch._run.journal import Done, Participant
from paceline.torch._run.train_run import TrainRun

if TYPE_CHECKING:
    from paceline.torch._run.execution import Execution


def of_step(execution: Execution, run: TrainRun, *, keep: bool) -> list[Participant]:
    """What a step changes. Tensors outside come after the module's gradients, because such a tensor may be a part of the module by now."""
    return [
        _Buffers(execution),
        _Gradients(execution, carries=run.carries),
        _Outside(execution, run, keep=keep),
        _Pushed(execution, buffers=True),
        _Counters(execution),
        _Sampler(execution),
    ]


def of_part(execution: Execution, *, carries: bool) -> list[Participant]:
    """What a step changes on a rank without items."""
    return [_Gradients(execution, carries=carries, adds=True), _PartCounters(execution), _Sampler(execution)]


def of_forward(execution: Execution) -> list[Participant]:
    """What a forward changes. As in plain PyTorch, running statistics follow in training."""
    return [_Pushed(execution, buffers=execution.module.training), _Times()]


class _Gradients(Participant):
    """The user's ``.grad``."""

    def __init__(self, execution: Execution, *, carries: bool, adds: bool | None = None) -> None:
        self._replicas, self._carries = execution.replicas, carries  # whether they go to whoever calls backward
        self._adds = not carries if adds is None else adds
        self._user: UserGradients | None = None

    def prepare(self) -> None:
        self._user = UserGradients(self._replicas, adds=self._adds)

    @property
    def written(self) -> bool:
        return self._user is not None and self._user.written

    def check(self, run: Executor, outcome: Any) -> None:
        assert self._user is not None
        self._user.check()

    def commit(self, done: Done) -> None:
        assert self._user is not None
        self._user.commit([None] * len(done.totals) if self._carries else done.totals)

    def rollback(self) -> None:
        if self._user is not None:
            self._user.restore()


class _Outside(Participant):
    """Gradients of tensors outside of the module."""

    def __init__(self, execution: Execution, run: TrainRun, *, keep: bool) -> None:
        self._outside, self._run, self._replicas = execution.outside, run, execution.replicas
        self._refused = keep and execution.ranks is not None

    def prepare(self) -> None:
        run, replicas = self._run, self._replicas
        run.outside = self._outside
        parameters = [replicas.parameters, *(replica.parameters for replica in replicas.list)]
        self._outside.begin(run.loss_fn, parameters, replicas.shared, carries=run.carries, refused=self._refused)

    def commit(self, done: Done) -> None:
        if self._run.carries:
            self._run.outside_gradients = self._outside.taken()
        else:
            self._outside.commit()

    def rollback(self) -> None:
        self._outside.restore()


class _Buffers(Participant):
    """The buffers: those that replicas share may not be written, and those of a single device are put back after a failure."""

    def __init__(self, execution: Execution) -> None:
        self._kept = execution.kept_buffers()
        self._replicas = execution.replicas

    def prepare(self) -> None:
        self._shared = SharedBuffers(self._replicas.sparse)

    def check(self, run: Executor, outcome: Any) -> None:
        self._shared.check()

    def rollback(self) -> None:
        if self._kept is not None:
            with torch.no_grad():
                self._kept.restore()


class _Pushed(Participant):
    """Buffers and attributes that a device's forward has written."""

    def __init__(self, execution: Execution, *, buffers: bool) -> None:
        self._execution, self._buffers = execution, buffers

    def commit(self, done: Done) -> None:
        self._execution.push(done.outcome, buffers=self._buffers)


class _Counters(Participant):
    """What is counted and measured of committed steps. What must not be done twice is marked before, with no call in between."""

    def __init__(self, execution: Execution) -> None:
        self._execution = execution

    def commit(self, done: Done) -> None:
        execution, outcome, work = self._execution, done.outcome, done.run.call.work
        if execution.committed is not outcome:
            items = outcome.items
            execution.committed, execution.items, execution.extras = outcome, items, done.extras
            execution.steps += 1
            work.step_loop.commit(outcome)
            work.launches.add(done.run.launches)


class _PartCounters(Participant):
    def __init__(self, execution: Execution) -> None:
        self._execution = execution

    def commit(self, done: Done) -> None:
        execution = self._execution
        if execution.took_part != execution.calls:
            items = [0] * len(execution.items)
            execution.took_part, execution.items, execution.extras = execution.calls, items, None
            execution.steps += 1


class _Times(Participant):
    """The times of a forward, which the balancer learns from."""

    def commit(self, done: Done) -> None:
        done.run.call.work.step_loop.commit(done.outcome)


class _Sampler(Participant):
    def __init__(self, execution: Execution) -> None:
        self._execution = execution

    def commit(self, done: Done) -> None:
        if self._execution.sampler is not None:
            self._execution.sampler.trained()


def refuse_outside_of_ranks(shape: torch.Size | None) -> None:
    """Raise for a tensor of this shape that got a gradient, which would be that of this rank's part."""
    if shape is not None:
        raise InvalidArgument(
            f"step: the loss reaches a tensor of shape {tuple(shape)} outside of the module. With group= the gradients of the module are summed "
            "over the ranks, and no others: make it a parameter of the module, or detach it."
        )
