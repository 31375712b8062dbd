"""Measures how long a step takes, without leaving a trace."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

from paceline.torch._batch.batch import Batch
from paceline.torch._batch.objective import Objective
from paceline.torch._devices.places import RandomStates
from paceline.torch._run.call import Asked
from paceline.torch._run.execution import Execution
from paceline.torch._run.train_run import LossFunction, TrainRun
from paceline.torch._run.workload import Workload

_WARM_UP = 3  # steps; first runs of a size are slow, and shares have to settle
_LEAST = 5  # steps that count


class StepTimer:
    """Runs steps that commit nothing. Gradients, buffers and random generators are put back after each."""

    def __init__(self, execution: Execution, loss_fn: LossFunction, workload: Callable[[int | None], Workload]) -> None:
        self._execution = execution
        self._loss_fn = loss_fn
        self._workload = workload
        self._works: dict[int | None, Workload] = {}

    def seconds(self, batch: Batch, objective: Objective, micro_batch: int | None, at_least: float) -> float:
        """The median time of several steps on all devices, which are timed for `at_least` so many seconds."""
        work = self._works.get(micro_batch)
        if work is None:
            work = self._works[micro_batch] = self._workload(micro_batch)
        random = RandomStates(self._execution.places)
        times: list[float] = []
        spent = 0.0
        while len(times) < _WARM_UP + _LEAST or spent < at_least:
            began = time.perf_counter()
            self._step(work, batch, objective)
            work.step_loop.settle()
            times.append(time.perf_counter() - began)
            spent += times[-1] if len(times) > _WARM_UP else 0.0
            random.restore()
        return statistics.median(times[_WARM_UP:])

    def _step(self, work: Workload, batch: Batch, objective: Objective) -> None:
        executor = partial(TrainRun, loss_fn=self._loss_fn, objective=objective)
        done = self._execution.train(Asked(work, batch, self._loss_fn, executor), keep=False)
        work.step_loop.commit(done.outcome)
