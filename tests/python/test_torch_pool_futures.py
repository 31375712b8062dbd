"""Futures of pools beside those of the standard library: what they share, and what they do not."""

from __future__ import annotations

import concurrent.futures
import os
import threading
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from paceline.torch import PoolFuture
from paceline.torch._pool import future as futures


def test_a_future_ends_while_a_condition_of_another_one_is_held() -> None:
    # `concurrent.futures.wait` holds those of all its futures, in the order of their addresses, and an interrupt may leave them held.
    held, other = PoolFuture[int](), PoolFuture[int]()
    assert concurrent.futures.wait([held, other], 0).not_done == {held, other}
    assert held._condition is held._condition
    with held._condition:
        ends = threading.Thread(target=other._end, args=("completed", "", None, 7), daemon=True)
        ends.start()
        ends.join(20)
        assert not ends.is_alive()
    assert other.result() == 7


def test_a_future_does_not_end_while_somebody_adds_a_waiter() -> None:
    """Otherwise the waiter counts it twice: `as_completed` raises KeyError, and `wait` comes back before the last one has ended."""
    future: PoolFuture[int] = PoolFuture()
    with future._condition:
        thread = threading.Thread(target=future._end, args=("completed", "", None, 7))
        thread.start()
        thread.join(0.1)
        assert not future.done()
    thread.join()
    assert future.result() == 7


def test_calls_that_time_out_leave_nothing() -> None:
    future = PoolFuture[int]()
    for _ in range(5):
        with pytest.raises(TimeoutError):
            future.result(0.001)
    assert not future._sleepers
    future._end("completed", "", None, 7)
    assert future.result(0) == 7


class Finished(list[Any]):
    """What a waiter of the standard library knows to be done. Looking for one in it takes as long as it is."""

    looked = 0

    def __contains__(self, one: object) -> bool:
        self.looked += 1
        return super().__contains__(one)


def test_who_waits_for_many_is_told_without_a_search() -> None:
    finished = Finished()
    waiter: Any = SimpleNamespace(finished_futures=finished, add_result=finished.append)
    many = [PoolFuture[int]() for _ in range(10)]
    for one in many:
        with one._condition:
            one._waiters.append(waiter)
    for one in many:
        one._end("completed", "", None, 0)
    assert finished == many
    assert finished.looked == 0
    many[0]._end("completed", "", None, 0)
    assert len(finished) == 10


@pytest.fixture
def lock_is_held_for_a_while() -> Iterator[None]:
    held = threading.Event()

    def hold() -> None:
        with futures._lock:
            held.set()
            released.wait(0.3)

    released = threading.Event()
    thread = threading.Thread(target=hold)
    thread.start()
    assert held.wait(20)
    yield
    thread.join()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.usefixtures("lock_is_held_for_a_while")
def test_a_forked_process_can_end_futures_of_its_own() -> None:
    child = os.fork()
    if child == 0:
        os._exit(0 if futures._lock.acquire(timeout=5) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
