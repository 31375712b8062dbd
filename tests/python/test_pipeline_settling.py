"""Threads that read a pipeline's figures while GPUs are behind. The GPUs' times are stood in for."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.torch._pipeline.loop import Outcome, PipelineLoop

MOMENT = 0.05  # in which a thread that does not wait would have ended


class Times:
    """Times that are there when somebody says so, and how often they were asked for."""

    def __init__(self) -> None:
        self.asked, self.inside, self.there = 0, threading.Event(), threading.Event()

    def __call__(self) -> Any:
        self.asked += 1
        self.inside.set()
        assert self.there.wait(30)
        return [[("F", 0, 0.0, 1.0)]]


@pytest.fixture
def times() -> Times:
    return Times()


def test_a_step_waits_for_the_thread_that_takes_note_of_the_last_one(times: Times) -> None:
    loop: Any = SimpleNamespace(planner=SimpleNamespace(settling=threading.RLock(), unsettled=times))
    with ThreadPoolExecutor(2) as threads:
        reader = threads.submit(PipelineLoop.settle, loop)
        assert times.inside.wait(30)
        step = threads.submit(PipelineLoop.settle, loop)
        with pytest.raises(TimeoutError):
            step.result(MOMENT)
        times.there.set()
        reader.result(30)
        step.result(30)
    assert times.asked == 1


def test_two_threads_ask_for_the_times_of_a_step_once(times: Times) -> None:
    outcome: Any = object.__new__(Outcome)
    outcome._waits, outcome._record, outcome.pending = threading.Lock(), [], times
    with ThreadPoolExecutor(2) as threads:
        reads = [threads.submit(lambda: outcome.record) for _ in range(2)]
        assert times.inside.wait(30)
        times.there.set()
        assert [one.result(30) for one in reads] == [[[("F", 0, 0.0, 1.0)]]] * 2
    assert times.asked == 1
    assert outcome.settled
