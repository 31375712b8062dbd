"""Threads that read a pipeline's figures while GPUs are behind. The GPUs' times are stood in for."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from paceline import DeviceLost
from paceline.torch._pipeline.loop import Outcome, PipelineLoop

MOMENT = 0.05  # in which a thread that does not wait would have ended
TIMES = [[("F", 0, 0.0, 1.0)]]


class Times:
    """Times that are there when somebody says so, and how often they were asked for."""

    def __init__(self) -> None:
        self.asked, self.inside, self.there = 0, threading.Event(), threading.Event()

    def __call__(self) -> Any:
        self.asked += 1
        self.inside.set()
        assert self.there.wait(30)
        return TIMES


@pytest.fixture
def times() -> Times:
    return Times()


class Loop(PipelineLoop):
    """A loop that keeps which steps it took note of."""

    def __init__(self) -> None:
        self.noted: list[Any] = []
        self.planner: Any = SimpleNamespace(settling=threading.RLock(), unsettled=None, failure=None, stepping=0)
        self.last = None

    def _add(self, outcome: Outcome) -> None:
        self.noted.append(outcome.record)

    def ran(self, times: Callable[[], Any]) -> Outcome:
        """A step whose times come later."""
        passage = SimpleNamespace(plan=SimpleNamespace(order=(0,), sizes=(1,)), bounds=[(0, 1)])
        step = SimpleNamespace(failed=False, take_cause=None, record=[], started=0.0, failed_action=None)
        outcome = Outcome(passage, step, 1, None, 0, evidence=True, trains=True, lane=0)
        outcome.pending = times
        self.commit(outcome)
        return outcome


def test_a_step_waits_for_the_thread_that_takes_note_of_the_last_one(times: Times) -> None:
    loop = Loop()
    loop.ran(times)
    with ThreadPoolExecutor(2) as threads:
        reader = threads.submit(loop.settle)
        assert times.inside.wait(30)
        step = threads.submit(partial(loop.settle, steps=True))
        with pytest.raises(TimeoutError):
            step.result(MOMENT)
        times.there.set()
        reader.result(30)
        step.result(30)
    assert times.asked == 1
    assert loop.noted == [TIMES]


def test_two_threads_ask_for_the_times_of_a_step_once(times: Times) -> None:
    outcome = Loop().ran(times)
    with ThreadPoolExecutor(2) as threads:
        reads = [threads.submit(lambda: outcome.record) for _ in range(2)]
        assert times.inside.wait(30)
        times.there.set()
        assert [one.result(30) for one in reads] == [TIMES] * 2
    assert times.asked == 1
    assert outcome.settled


def test_a_signal_handler_may_read_figures_while_its_thread_waits_for_gpus() -> None:
    loop = Loop()
    asked: list[int] = []

    def interrupted() -> Any:
        asked.append(len(asked))
        if len(asked) == 1:  # here the handler comes in
            loop.settle()
            assert outcome.record == TIMES
        return TIMES

    outcome = loop.ran(interrupted)
    thread = threading.Thread(target=loop.settle, daemon=True)
    thread.start()
    thread.join(30)
    assert not thread.is_alive()
    assert loop.noted == [TIMES]


def test_an_error_that_a_reader_finds_is_also_raised_by_the_next_step_once() -> None:
    def lost() -> Any:
        raise DeviceLost("cuda:1 is lost")

    loop = Loop()
    loop.ran(lost)
    with ThreadPoolExecutor(1) as threads:
        with pytest.raises(DeviceLost):
            threads.submit(loop.settle).result(30)
        threads.submit(loop.settle).result(30)  # readers are told once
    assert loop.last is None, "a report would ask for its times again"
    loop.settle()  # as of retire(), with which the caller answers it
    with pytest.raises(DeviceLost, match="cuda:1"):
        loop.settle(steps=True)
    loop.ran(lambda: TIMES)
    loop.settle(steps=True)
    assert loop.noted == [TIMES]

    loop.ran(lost)
    with pytest.raises(DeviceLost):
        loop.settle()
    loop.settle(steps=True)  # the thread that steps knows it


def test_an_interrupt_leaves_the_step_to_whoever_asks_next() -> None:
    def interrupted() -> Any:
        outcome.pending = lambda: TIMES
        raise KeyboardInterrupt

    loop = Loop()
    outcome = loop.ran(interrupted)
    with pytest.raises(KeyboardInterrupt):
        loop.settle()
    loop.settle()
    assert loop.noted == [TIMES]
