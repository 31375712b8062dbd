"""Interrupts at chosen instructions while versions change, devices that others want to retire meanwhile, and what is freed then."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from paceline import InvalidArgument, Rejected, Unavailable
from paceline.torch._pool import answerer
from paceline.torch._pool.jobs import Jobs
from paceline.torch._pool.served import WithState
from paceline.torch._pool.versions import Versions
from paceline.torch._pool.warming import Warming
from pool_support import Held, pool_of, soon
from torch_support import hosts
from versions_support import State, States, adds, answer, ask, limited, roles, versions_of


@contextlib.contextmanager
def interrupted(when: Callable[[Any, str, Any], Any]) -> Iterator[None]:
    """An interrupt at the first call or return on this thread for which `when` holds."""

    def look(frame: Any, event: str, what: Any) -> None:
        if when(frame, event, what):
            sys.setprofile(None)
            raise KeyboardInterrupt

    sys.setprofile(look)
    try:
        yield
    finally:
        sys.setprofile(None)


def just_taken(frame: Any, event: str, what: Any) -> bool:
    """Whether the engine has been called with a job, and Python's next instruction is yet to come."""
    return (
        event == "c_return" and frame.f_code is Jobs.put.__code__ and getattr(what, "__name__", "") in ("submit", "any")
    )


class InterruptsOnce:
    """A lock, after whose first release an interrupt comes."""

    def __init__(self, lock: Any) -> None:
        self._lock, self._left = lock, 1

    def __enter__(self) -> None:
        self._lock.__enter__()

    def __exit__(self, *_: object) -> None:
        self._lock.__exit__()
        self._left -= 1
        if self._left >= 0:
            raise KeyboardInterrupt


def test_a_request_that_an_interrupt_keeps_from_the_engine_is_not_waited_for() -> None:
    with pool_of(1) as pool:
        batcher = pool.serve(adds(10))
        ask(batcher, 1)[0].result()
        version = batcher._present.way
        version._lock = InterruptsOnce(version._lock)
        with pytest.raises(KeyboardInterrupt):
            ask(batcher, 1)
        assert not version.open


def test_a_request_that_the_engine_has_taken_is_cancelled_after_an_interrupt() -> None:
    with pool_of(1) as pool:
        batcher = pool.serve(adds(10))
        ask(batcher, 1)[0].result()
        version = batcher._present.way
        with Held(pool):
            with pytest.raises(KeyboardInterrupt), interrupted(just_taken):
                ask(batcher, 1)
            assert pool.waiting == 0
            assert soon(lambda: not version.open)
        with pytest.raises(InvalidArgument, match="priority"):
            ask(batcher, 1, priority="now")
        assert not version.open


@pytest.mark.parametrize("exchange", [False, True])
def test_a_batch_that_warms_a_version_is_waited_for_wherever_an_interrupt_comes(
    exchange: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, running, go, ended = States(), threading.Event(), threading.Event(), threading.Event()
    waits, frees, freed = concurrent.futures.wait, WithState.free, []

    def answers(state: State, x: torch.Tensor) -> torch.Tensor:
        if state.version != 2:
            return answer(state, x)
        running.set()
        go.wait(20)
        found = answer(state, x)
        ended.set()
        return found

    def ends() -> None:
        if running.is_set():
            go.set()

    def waits_for(*of: Any) -> Any:  # the batch ends once it is waited for, and not before
        ends()
        return waits(*of)

    def runs(frame: Any, event: str, what: Any) -> bool:
        return (
            just_taken(frame, event, what) and frame.f_back.f_locals.get("what") == "a batch of 1" and running.wait(20)
        )

    def free(self: WithState, seat: Any) -> None:
        freed.append((2 in {one.version for (one,) in self._states.values()}, ended.is_set()))
        ends()  # or it is freed too early
        frees(self, seat)

    with limited() if exchange else pool_of() as pool:
        batcher = pool.serve(answers, initializer=states.of(1), resident=100 if exchange else 0, max_batch=4)
        ask(batcher, 1)[0].result()
        monkeypatch.setattr(WithState, "free", free)
        monkeypatch.setattr(answerer, "wait_for", waits_for)
        with pytest.raises(KeyboardInterrupt), interrupted(runs):
            batcher.publish(answers, initializer=states.of(2))
        assert [was_over for of_second, was_over in freed if of_second]
        assert all(was_over for of_second, was_over in freed if of_second)
        assert versions_of(ask(batcher, 4)) == {1: 4}


def test_an_interrupt_while_the_old_version_is_freed_leaves_the_new_one(monkeypatch: pytest.MonkeyPatch) -> None:
    states, interrupts, frees = States(alone=True), [1], Versions._free

    def free(self: Versions, gone: Any) -> None:
        if interrupts and interrupts.pop():
            raise KeyboardInterrupt
        frees(self, gone)

    with limited() as pool:
        batcher = pool.serve(answer, initializer=states.of(1), resident=100, max_batch=4)
        with Held(pool, 2):
            asked = ask(batcher, 8)
        versions_of(asked)
        monkeypatch.setattr(Versions, "_free", free)
        with pytest.raises(KeyboardInterrupt):
            batcher.publish(answer, initializer=states.of(2))
        assert roles(batcher) == {2: ("live", 1.0), 1: ("previous", 0.0)}
        assert (states.count(1), states.count(2)) == (0, 2)
        assert versions_of(ask(batcher, 4)) == {2: 4}
        assert not states.crowded


def test_the_version_that_is_live_is_the_one_that_answers_after_an_interrupt() -> None:
    def turns(frame: Any, event: str, _: Any) -> bool:
        caller = frame if event == "c_call" else frame.f_back if event == "call" else None
        return caller is not None and caller.f_code is Versions._turn_to.__code__

    with pool_of(1) as pool:
        batcher = pool.serve(adds(10))
        batcher.publish(adds(20))
        with contextlib.suppress(KeyboardInterrupt), interrupted(turns):
            batcher.rollback()
        (live,) = [number for number, (role, _) in roles(batcher).items() if role == "live"]
        assert versions_of(ask(batcher, 4)) == {live: 4}


def test_a_promote_that_fails_frees_what_it_has_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    states = States()
    with limited() as pool:
        batcher = pool.serve(answer, initializer=states.of(1), resident=100, max_batch=4)
        ask(batcher, 1)[0].result()
        batcher.publish(answer, initializer=states.of(2))
        pool._jobs.memory.update(dict.fromkeys(hosts(2), 1000.0))  # others have left
        batcher.publish(answer, initializer=states.of(3), weight=0.6)
        states.made.clear()
        with pytest.raises(InvalidArgument, match=r"weight=0\.4"):
            batcher.promote(1, weight=0.4)
        assert not states.made

        def answers_by(*_: object) -> None:
            assert states.count(1) == 2
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(batcher._versions, "_answer_by", answers_by)
            with pytest.raises(KeyboardInterrupt):
                batcher.promote(1)
        assert states.count(1) == 0
        assert roles(batcher) == {2: ("live", 0.4), 3: ("candidate", 0.6), 1: ("previous", 0.0)}
        batcher.promote(1)
        assert (states.count(1), versions_of(ask(batcher, 4))) == (2, {1: 4})


def test_versions_go_with_their_batcher_without_the_collector_of_cycles() -> None:
    states = States(alone=True)
    with limited() as pool:
        batcher = pool.serve(answer, initializer=states.of(1), resident=100, max_batch=4)
        ask(batcher, 1)[0].result()
        batcher.publish(answer, initializer=states.of(2))
        batcher.rollback()
        gc.collect()
        gc.disable()
        try:
            del batcher
            assert soon(lambda: states.count(1) == 0)
        finally:
            gc.enable()


def test_devices_that_exchange_versions_are_not_retired_meanwhile() -> None:
    states, refused = States(alone=True), list[str]()
    names = hosts(2)

    def initializer(device: torch.device) -> State:
        for name in names:
            assert not pool._jobs.engine.retire(name, True)  # as after an error of initializer=
            with pytest.raises(Unavailable, match=f"exchanged on {name}. Wait until publish"):
                pool.retire(name)
            assert not pool._jobs.scale._out
            refused.append(name)
        state: State = states.of(2)(device)
        return state

    with limited() as pool:
        batcher = pool.serve(answer, initializer=states.of(1), resident=100, max_batch=4)
        ask(batcher, 1)[0].result()
        batcher.publish(answer, initializer=initializer)
        assert refused == names * 2
        for name in names:
            pool.retire(name)
            assert versions_of(ask(batcher, 2)) == {2: 2}
            pool.restore(name)


def test_a_device_that_is_retired_just_before_an_exchange_takes_no_part_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    states, beside = States(alone=True), Warming.beside
    first, second = hosts(2)
    gone = [first]

    def retires(self: Warming, seat: Any) -> bool:
        fits = beside(self, seat)
        if seat.name == second:
            for name in gone:
                pool.retire(name)
        return fits

    monkeypatch.setattr(Warming, "beside", retires)
    with limited() as pool:
        batcher = pool.serve(answer, initializer=states.of(1), resident=100, max_batch=4)
        ask(batcher, 1)[0].result()
        with pytest.raises(Rejected, match="With allow_gap=True"):
            batcher.publish(answer, initializer=states.of(2))
        pool.restore(first)
        batcher.publish(answer, initializer=states.of(3), allow_gap=True)
        assert (states.count(1), states.count(3)) == (0, 1)
        pool.restore(first)
        gone.append(second)
        with pytest.raises(Rejected, match="no device takes work"):
            batcher.publish(answer, initializer=states.of(4), allow_gap=True)
        pool.restore(first)
        pool.restore(second)
        assert versions_of(ask(batcher, 4)) == {3: 4}
        assert not states.crowded


def test_a_rollback_that_has_failed_succeeds_when_it_is_tried_again() -> None:
    states = States(alone=True)
    with limited() as pool:
        batcher = pool.serve(answer, initializer=states.of(1), resident=100, max_batch=4)
        ask(batcher, 1)[0].result()
        batcher.publish(answer, initializer=states.of(2))
        states.fails, states.made = {1: OSError("gone")}, []
        with pytest.raises(Rejected, match="has raised OSError"):
            batcher.rollback()
        states.fails = {}
        assert batcher.rollback().number == 1
        assert (states.count(1), states.count(2), versions_of(ask(batcher, 4))) == (2, 0, {1: 4})
        assert not states.crowded


def test_a_candidate_that_leaves_is_freed_once_its_requests_have_ended() -> None:
    states = States()
    with pool_of(1) as pool:
        batcher = pool.serve(answer, initializer=states.of(1), max_batch=4)
        ask(batcher, 1)[0].result()
        batcher.publish(answer, initializer=states.of(2), weight=0.5)
        with Held(pool):
            asked = ask(batcher, 8)
            batcher.retire(2)
            asked += ask(batcher, 2)
            assert states.count(2) == 1
        assert versions_of(asked) == {1: 6, 2: 4}
        assert soon(lambda: states.count(2) == 0)
