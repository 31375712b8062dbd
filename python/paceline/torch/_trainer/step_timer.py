"""Measures how long a step takes, without leaving a trace."""

from __future__ import annotations

import statistics
import time

from paceline.torch._devices.run_draws import RandomStates
from paceline.torch._run.call import Asked
from paceline.torch._run.execution import Execution

_WARM_UP = 3  # steps; first runs of a size are slow, and shares have to settle
_LEAST = 5  # steps that count


def median_seconds(execution: Execution, asked: Asked, at_least: float) -> float:
    """The median time of several steps on all devices, which are timed for `at_least` so many seconds.

    They commit nothing. Gradients, buffers and random generators are put back after each.
    """
    step_loop, random = asked.work.step_loop, RandomStates(execution.places)
    times: list[float] = []
    spent = 0.0
    while len(times) < _WARM_UP + _LEAST or spent < at_least:
        began = time.perf_counter()
        step_loop.commit(execution.train(asked, keep=False).outcome)
        step_loop.settle()
        times.append(time.perf_counter() - began)
        spent += times[-1] if len(times) > _WARM_UP else 0.0
        random.restore()
    return statistics.median(times[_WARM_UP:])
