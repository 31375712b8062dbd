"""Remembers the last steps of a trainer, for a trace that somebody may ask for later."""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from paceline import Error
from paceline._core.engine import StepOutcome
from paceline.torch._run.execution import Execution

_KEPT = 8  # steps; more would be more than anybody looks at
_MARKS = 64  # other things, of which there may be several in a step

Claim = tuple[int, int, int, float, float, bool, bool]


class Times(NamedTuple):
    """What the devices did in a step. `claims` as `StepOutcome` has them, in seconds since `started`."""

    started: float
    claims: list[Claim]
    reduce_seconds: float
    move: str | None


@dataclass
class Step:
    """One call that trains: a step, or a run of `batch`. Seconds are those of ``time.perf_counter``."""

    kind: str
    number: int  # how many had been committed before
    began: float
    ended: float = 0.0
    attempts: int = 0
    outcome: StepOutcome | None = None  # None: it failed, or `times` are known
    times: Times | None = None
    error: str = ""
    failed_on: str | None = None  # the device to blame
    context: Any = None  # in which it began, if `RecentSteps.context` reads that

    @property
    def known(self) -> Times | StepOutcome | None:
        """What knows what the devices did. Another thread may `settle` meanwhile."""
        outcome = self.outcome  # first, since `settle` lets it go last
        return self.times or outcome

    def settle(self) -> None:
        """Read the times of the devices, and let the outcome go. Waits for GPUs. Threads: any."""
        outcome = self.outcome
        if outcome is not None:
            with contextlib.suppress(Error):  # a lost device, which a call of the trainer has reported, or will
                self.times = Times(outcome.started, outcome.claims, outcome.reduce_seconds, outcome.move)
            self.outcome = None


class _Noting:
    """Around a step, whose end and error it notes."""

    def __init__(self, steps: deque[Step], step: Step, execution: Execution) -> None:
        self._steps, self._step, self._execution = steps, step, execution

    def __enter__(self) -> Step:
        return self._step

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        step = self._step
        if error is not None:
            step.error = type(error).__name__
            step.failed_on = self._execution.failed_on or getattr(error, "device", None)
        step.ended = time.perf_counter()
        self._steps.append(step)


class RecentSteps:
    """The last steps and what happened between them. Noting a step costs a few microseconds; it reads no times.

    An outcome of GPUs holds their events. So it is kept only until they are done, and then its times are read.
    """

    def __init__(self, *, on_gpu: bool) -> None:
        self.steps: deque[Step] = deque(maxlen=_KEPT)
        # When steps of optimizers began and ended.
        self.optimizer_times: deque[tuple[float, float]] = deque(maxlen=_MARKS)
        self.ended = False  # whether the trainer is closed
        self.context: Callable[[], Any] | None = None  # reads OpenTelemetry's present context
        self._on_gpu = on_gpu

    def step(self, kind: str, execution: Execution) -> contextlib.AbstractContextManager[Step]:
        """Around a step. Its outcome is noted in what this yields."""
        if self._on_gpu:
            for earlier in self.steps:
                outcome = earlier.outcome  # another thread may settle it
                with contextlib.suppress(Error):
                    if outcome is not None and outcome.settled:
                        earlier.settle()
        step = Step(kind, execution.steps, time.perf_counter())
        if self.context is not None:
            step.context = self.context()
        return _Noting(self.steps, step, execution)

    def settle(self) -> None:
        """Read the times of all steps, and let their outcomes go. Waits for GPUs."""
        for step in list(self.steps):
            step.settle()
