"""What takes part in a commit: gradients, tensors outside of the module, buffers and attributes, counters, the sampler."""

from __future__ import annotations

from typing import Any

import torch

from paceline import InvalidArgument
from paceline.torch._replicas.buffers import KeptBuffers, SharedBuffers
from paceline.torch._run.gradients import UserGradients
from paceline.torch._run.journal import Done, Participant
from paceline.torch._run.train_run import TrainRun

Execution = Any  # `execution.Execution`, which imports this


def of_step(execution: Execution) -> list[Participant]:
    """What a step changes. Tensors outside come after the module's gradients, because such a tensor may be a part of the module by now."""
    return [
        _Buffers(execution),
        _Gradients(execution),
        _Outside(execution),
        _Pushed(execution),
        _Counters(execution),
    ]


def of_part(execution: Execution, *own: Participant) -> list[Participant]:
    """What a step changes that the devices do not run: on a rank without items, or a proof, which has some of its `own`."""
    return [_Gradients(execution), *own, _Counters(execution)]


def of_forward(execution: Execution) -> list[Participant]:
    """What a forward changes. As in plain PyTorch, running statistics follow in training."""
    return [_Pushed(execution, always=False), _Times()]


class _Gradients(Participant):
    """The user's ``.grad``."""

    def __init__(self, execution: Execution) -> None:
        self._replicas = execution.replicas
        self._user: UserGradients | None = None

    def prepare(self, run: Any) -> None:
        self._user = None
        self._user = UserGradients(self._replicas, adds=run is None or not run.carries)

    @property
    def written(self) -> bool:
        return self._user is not None and self._user.written

    def check(self) -> None:
        assert self._user is not None
        self._user.check()

    def commit(self, done: Done) -> None:
        assert self._user is not None
        self._user.commit([None] * len(done.totals) if done.carries else done.totals)

    def rollback(self) -> None:
        if self._user is not None:
            self._user.restore()

    def release(self) -> None:
        self._user = None


class _Outside(Participant):
    """Gradients of tensors outside of the module."""

    def __init__(self, execution: Execution) -> None:
        self._execution, self._outside, self._replicas = execution, execution.outside, execution.replicas

    def prepare(self, run: TrainRun) -> None:
        run.outside = self._outside
        refused = run.call.keep and self._execution.ranks is not None
        self._outside.begin(run.loss_fn, self._replicas, carries=run.carries, refused=refused)

    def commit(self, done: Done) -> None:
        if done.carries:
            done.run.outside_gradients = self._outside.taken()
        else:
            self._outside.commit()

    def rollback(self) -> None:
        self._outside.restore()


class _Buffers(Participant):
    """The buffers: those that replicas share may not be written, and those of a single device are put back after a failure."""

    def __init__(self, execution: Execution) -> None:
        self._replicas = execution.replicas
        self._kept: tuple[int, KeptBuffers] | None = None  # of a single device, with the replicas' generation
        self._noted = False  # whether these are the buffers before the present step
        self._shared: SharedBuffers | None = None

    def prepare(self, run: Any) -> None:
        replicas = self._replicas
        self._shared = SharedBuffers(replicas.sparse) if replicas.sparse else None
        if replicas.shared:
            self._kept = None
        elif self._kept is None or self._kept[0] != replicas.generation:
            self._kept = replicas.generation, KeptBuffers(replicas.modules)
        elif self._kept[1]:
            self._kept[1].note()
        self._noted = True

    def check(self) -> None:
        if self._shared is not None:
            self._shared.check()

    def rollback(self) -> None:
        if self._kept is not None and self._noted:
            with torch.no_grad():
                self._kept[1].restore()

    def release(self) -> None:
        self._noted, self._shared = False, None

    def end(self) -> None:
        self._kept = None


class _Pushed(Participant):
    """Buffers and attributes that a device's forward has written."""

    def __init__(self, execution: Execution, *, always: bool = True) -> None:
        """`always`: buffers also follow in evaluation mode."""
        self._execution, self._always = execution, always

    written = False

    def prepare(self, run: Any) -> None:
        self.written = False  # a release may have been interrupted

    def commit(self, done: Done) -> None:
        self.written = True
        self._execution.push(done.outcome, buffers=self._always or self._execution.module.training)

    def release(self) -> None:
        self.written = False


class _Counters(Participant):
    """What is counted and measured of committed steps. What must not be done twice is marked before, with no call in between."""

    def __init__(self, execution: Execution) -> None:
        self._execution, self._counted = execution, False

    def prepare(self, run: Any) -> None:
        self._counted = False  # a release may have been interrupted

    def commit(self, done: Done) -> None:
        execution, outcome = self._execution, done.outcome
        if not self._counted:
            self._counted, execution.items, execution.extras = True, done.items, done.extras
            execution.steps += 1
            if outcome is not None:
                execution.committed, work = outcome, done.run.call.work
                work.step_loop.commit(outcome)
                work.trained += 1
                work.launches.add(done.run.launches)
                if work.sends_early is None:
                    work.sends_early = True
        if execution.sampler is not None:
            execution.sampler.trained()

    def release(self) -> None:
        self._counted = False


class _Times(Participant):
    """The times of a forward, which the balancer learns from. What must not be done twice is marked before, with no call in between."""

    def __init__(self) -> None:
        self._told: Any = None  # the outcome that it has

    def commit(self, done: Done) -> None:
        outcome, step_loop = done.outcome, done.run.call.work.step_loop
        if self._told is not outcome:
            self._told = outcome
            step_loop.commit(outcome)

    def release(self) -> None:
        self._told = None


def refuse_outside_of_ranks(shape: torch.Size | None) -> None:
    """Raise for a tensor of this shape that got a gradient, which would be that of this rank's part."""
    if shape is not None:
        raise InvalidArgument(
            f"step: the loss reaches a tensor of shape {tuple(shape)} outside of the module. With group= the gradients of the module are summed "
            "over the ranks, and no others: make it a parameter of the module, or detach it."
        )
