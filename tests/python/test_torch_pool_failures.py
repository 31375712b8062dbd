"""`Pool`: what becomes of requests and jobs that fail, of their errors, and of figures and futures that are interrupted."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from paceline import Cancelled, DeviceLost, InvalidArgument
from paceline.torch import PoolFuture
from pool_support import Held, pool_of, served_by, soon
from torch_support import hosts


class States(nn.Module):
    """Returns the last states of two layers, whose dimension 0 is the layer."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 4, num_layers=2, batch_first=True)

    def forward(self, x: torch.Tensor) -> Any:
        values, (states, _) = self.lstm(x)
        _sizes.append(len(x))
        return values, states


_sizes: list[int] = []


def test_an_answer_of_another_shape_fails_the_whole_batch() -> None:
    _sizes.clear()
    with pool_of(1) as pool:
        batcher = pool.serve(States().eval(), max_batch=4)
        with Held(pool):
            answers = [batcher(torch.randn(5, 3)) for _ in range(4)]
        for answer in answers:
            with pytest.raises(InvalidArgument, match=r"shape \(2, 4, 4\) for 4 requests.*dimension 0 is the request"):
                answer.result()
    assert _sizes == [4]


class Broken(nn.Module):
    """Fails when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Any:
        time.sleep(0.02)
        raise ValueError("thirteen")


@pytest.mark.parametrize("idempotent", [False, True])
def test_a_pool_that_is_closed_keeps_the_error_of_a_batch_that_does_not_run_again(idempotent: bool) -> None:
    running, go = threading.Event(), threading.Event()

    def bad(x: torch.Tensor) -> torch.Tensor:
        running.set()
        go.wait(20)
        raise ValueError("thirteen")

    pool = pool_of(1)
    batcher = pool.serve(bad, max_batch=4, idempotent=idempotent)
    with Held(pool):
        answers = [batcher(torch.tensor(k)) for k in range(4)]
    assert running.wait(20)
    waits = pool.submit(lambda _: None)
    closing = threading.Thread(target=lambda: pool.close(cancel=True))
    closing.start()
    assert isinstance(waits.exception(20), Cancelled)
    go.set()
    for answer in answers:
        with pytest.raises(Cancelled if idempotent else ValueError):
            answer.result(20)
    closing.join(20)
    outcomes = pool.report()["outcomes"]
    assert (outcomes["failed"], outcomes["cancelled"]) == ((0, 5) if idempotent else (4, 1))


def test_a_batch_that_fails_after_its_deadline_has_its_error_its_device_and_its_seconds() -> None:
    def bad(x: torch.Tensor) -> torch.Tensor:
        time.sleep(0.7)
        raise ValueError("thirteen")

    with pool_of(1) as pool:
        batcher = pool.serve(bad, max_batch=4)
        with Held(pool):
            answers = [batcher(torch.tensor(k), deadline=0.5) for k in range(4)]
        for answer in answers:
            assert isinstance(answer.exception(), ValueError)
            assert answer.device == "host:0"
            assert answer.seconds >= 0.7


def test_the_seconds_of_a_job_that_fails_are_those_that_it_took() -> None:
    def bad(_: torch.device) -> None:
        time.sleep(0.05)
        raise ValueError

    with pool_of(1) as pool:
        job = pool.submit(bad)
        assert isinstance(job.exception(), ValueError)
        assert job.seconds >= 0.05


def test_an_error_of_a_request_keeps_neither_the_pool_nor_the_other_requests() -> None:
    pool = pool_of(1)
    batcher = pool.serve(Broken().eval(), max_batch=4, idempotent=False)
    with Held(pool):
        answers = [batcher(torch.ones(2)) for _ in range(4)]
    error = answers[0].exception()
    gone: list[weakref.ref[Any]] = [
        weakref.ref(pool._jobs),
        weakref.ref(batcher),
        weakref.ref(served_by(batcher)),
        weakref.ref(answers[3]),
    ]
    assert "in forward" in "".join(traceback.format_exception(error))
    names = [frame.f_globals["__name__"] for frame, _ in traceback.walk_tb(error.__traceback__)] if error else []
    assert not any(name.startswith("paceline.torch._pool") for name in names)
    del pool, batcher, answers
    assert soon(lambda: all(one() is None for one in gone))
    assert isinstance(error, ValueError)


def test_a_device_that_a_job_has_lost_is_retired_in_the_figures() -> None:
    def lose(_: torch.device) -> None:
        raise DeviceLost("gone")

    with pool_of() as pool:
        job = pool.submit(lose, needs="host:0")
        with pytest.raises(DeviceLost):
            job.result()
        assert {name: one["retired"] for name, one in pool.report()["devices"].items()} == {
            "host:0": True,
            "host:1": False,
        }

        def initializer(_: torch.device) -> int:
            raise OSError("no such file")

        with pytest.raises(OSError, match="no such file"):  # and the other device is the last one
            pool.serve(lambda state, x: x, initializer=initializer)(torch.ones(1)).result()
        assert pool.submit(lambda _: 1).result() == 1
        pool.restore("host:0")
        assert not any(one["retired"] for one in pool.report()["devices"].values())


def test_a_job_may_not_wait_for_an_answer_by_asyncio() -> None:
    with pool_of(1) as pool:
        batcher = pool.serve(lambda x: x + 1)
        job = pool.submit(lambda _: asyncio.run(batcher.ask(torch.ones(1))))
        with pytest.raises(InvalidArgument, match="waits for a job of a pool"):
            job.result()
        assert pool.waiting == 0


def test_an_interrupt_of_map_cancels_the_request_that_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    with pool_of(1) as pool, Held(pool):
        answers = pool.serve(lambda x: x, max_batch=1).map(torch.arange(100))
        monkeypatch.setattr(PoolFuture, "result", interrupted)
        with pytest.raises(KeyboardInterrupt):
            next(answers)
        monkeypatch.undo()
        assert pool.waiting == 0


def test_an_idempotent_job_runs_elsewhere_when_its_device_is_lost() -> None:
    ran: list[str] = []

    def lost(device: torch.device, times: int) -> int:
        ran.append(threading.current_thread().name)
        if len(ran) <= times:
            raise DeviceLost("gone")
        return 7

    with pool_of(3, memory=dict(zip(hosts(3), (100, 100, 50), strict=True))) as pool:
        job = pool.submit(lost, 1, idempotent=True, memory=80, kind="fit")
        after = pool.submit(lambda _: 8, after=[job])
        assert (job.result(), after.result()) == (7, 8)
        assert len(ran) == len(set(ran)) == 2
        assert job.device in pool._jobs.engine.active
        assert pool.report()["outcomes"]["failed"] == 0
        with pytest.raises(ZeroDivisionError):  # an error of its own is none of the device
            pool.submit(lambda _: 1 / 0, idempotent=True, kind="fit").result()
        ran.clear()
        with pytest.raises(DeviceLost, match="gone"):  # the last one with the memory
            pool.submit(lost, 9, idempotent=True, memory=80, kind="fit").result()
        assert len(ran) == 1
        assert pool.submit(lambda _: 1, kind="fit").result() == 1  # one that may not run again is another kind


def test_an_idempotent_job_that_waits_for_another_device_is_cancelled_with_its_pool() -> None:
    begun, go = threading.Event(), threading.Event()

    def lost(_: torch.device) -> None:
        begun.set()
        go.wait(20)
        raise DeviceLost("gone")

    pool = pool_of(2)
    with Held(pool):
        job = pool.submit(lost, idempotent=True)
        assert begun.wait(20)
        go.set()
        assert soon(lambda: pool.waiting == 1)
        closing = threading.Thread(target=pool.close, kwargs={"cancel": True})
        closing.start()
        with pytest.raises(Cancelled):
            job.result(20)
    closing.join()


class Interrupts:
    """Of the futures' waiters the first, which is interrupted when it is told, once."""

    def __init__(self) -> None:
        self._left = iter([KeyboardInterrupt])
        self.finished_futures: list[Any] = []

    def __getattr__(self, name: str) -> Callable[[Any], None]:
        assert name in ("add_result", "add_exception", "add_cancelled")
        for error in self._left:
            raise error
        return self.finished_futures.append


def waiting_for(future: PoolFuture[int]) -> Iterator[threading.Thread]:
    """Threads that wait for it in different ways."""
    calls: list[Callable[[], object]] = [
        future.result,
        lambda: concurrent.futures.wait([future]),
        lambda: [*concurrent.futures.as_completed([future])],
    ]
    for call in calls:
        thread = threading.Thread(target=call, daemon=True)
        thread.start()
        yield thread


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("outcome", ["completed", "failed", "cancelled"])
def test_a_future_whose_end_is_interrupted_tells_all_who_wait_when_it_is_ended_again(outcome: str) -> None:
    future: PoolFuture[int] = PoolFuture()
    future._asked = True
    future._waiters.append(Interrupts())  # type: ignore[arg-type]
    told: list[Any] = []
    future.add_done_callback(told.append)
    threads = list(waiting_for(future))
    assert soon(lambda: len(future._waiters) == 3 and len(future._sleepers or ()) == 1)
    end = outcome, "why", ValueError() if outcome == "failed" else None, 7
    with pytest.raises(KeyboardInterrupt):
        future._end(*end)
    for _ in range(2):
        future._end(*end)
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()
    assert told == [future]
    assert future.cancelled() == (outcome == "cancelled")


def test_a_finalizer_may_count_while_the_figures_are_read() -> None:
    with pool_of(1) as pool:
        figures = pool._jobs.figures

        def read() -> None:
            with figures._lock:  # as when the garbage collector comes in between
                figures.count("cancelled", "normal", None, "", leads=False)

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        thread.join(20)
        assert not thread.is_alive()
        assert pool.report()["outcomes"]["cancelled"] == 1
