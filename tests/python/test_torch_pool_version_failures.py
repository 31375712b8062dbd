"""What may come between when versions change: runs that hang, errors that somebody keeps, interrupts, memory of others, devices that are retired."""

from __future__ import annotations

import concurrent.futures
import contextlib
import functools
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from paceline import DeviceLost, InvalidArgument, Rejected, Timeout, Unavailable
from paceline._core.sim import batch_sizes
from paceline.torch._pool import answerer, warming
from paceline.torch._pool.served import WithState
from pool_support import Held, give_up_after, pool_of, soon
from torch_support import hosts
from versions_support import Clients, State, States, adds, answer, ask, limited, roles, versions_of


def publish_in_time(batcher: Any, initializer: Any, **options: Any) -> None:
    publish = threading.Thread(
        target=functools.partial(batcher.publish, answer, initializer=initializer, **options), daemon=True
    )
    publish.start()
    publish.join(20)
    assert not publish.is_alive()


def kinds_of(pool: Any) -> list[tuple[str, str]]:
    """Of each run that warmed a version: its device and kind."""
    return [(one.devices[0], one.kind) for one in pool._jobs.figures.runs._runs if "warming" in one.kind]


def test_a_run_that_was_given_up_does_not_hold_up_an_exchange() -> None:
    states, over = States(), threading.Event()

    def hangs(state: State, x: torch.Tensor) -> torch.Tensor:
        if bool((x == 5).any()):
            over.wait(60)
        return answer(state, x)

    with limited(hang_seconds=60) as pool:
        try:
            batcher = pool.serve(hangs, initializer=states.of(1), resident=100, max_batch=1)
            ask(batcher, 1)[0].result()
            give_up_after(pool, 0.5)
            with pytest.warns(RuntimeWarning, match="given it up"), pytest.raises(Timeout):
                batcher(torch.tensor(5.0)).result(20)
            give_up_after(pool, 60)
            publish_in_time(batcher, states.of(2))
            assert roles(batcher) == {2: ("live", 1.0), 1: ("previous", 0.0)}
            assert versions_of(ask(batcher, 4)) == {2: 4}
        finally:
            over.set()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_a_version_whose_load_hangs_and_ends_late_is_on_no_device() -> None:
    states, hangs, over = States(), threading.Event(), threading.Event()

    def initializer(device: torch.device) -> State:
        if hangs.is_set():
            over.wait(60)
        made: State = states.of(1)(device)
        return made

    with limited(1, hang_seconds=60) as pool:
        try:
            batcher = pool.serve(answer, initializer=initializer, resident=100, max_batch=1)
            ask(batcher, 1)[0].result()
            batcher.publish(answer, initializer=states.of(2), allow_gap=True)
            hangs.set()
            give_up_after(pool, 0.5)
            with pytest.raises(Rejected, match="in the place of version 2"):
                batcher.rollback(allow_gap=True)
            give_up_after(pool, 60)
            assert versions_of(ask(batcher, 2)) == {2: 2}
        finally:
            over.set()
        assert soon(lambda: [one for one, _ in states.made].count(1) == 2)
        assert soon(lambda: not states.count(1))
        assert versions_of(ask(batcher, 2)) == {2: 2}
        assert states.count(2) == 1
        hangs.clear()
        batcher.rollback(allow_gap=True)
        assert versions_of(ask(batcher, 2)) == {1: 2}


def test_an_error_of_a_rollback_that_somebody_keeps_does_not_hold_up_an_exchange() -> None:
    states = States(alone=True)
    with limited() as pool:
        batcher = pool.serve(answer, initializer=states.of(1), resident=100, max_batch=4)
        ask(batcher, 1)[0].result()
        publish_in_time(batcher, states.of(2))
        states.fails, states.made = {1: OSError("gone")}, []
        with pytest.raises(Rejected, match=r"^rollback: .* has raised OSError"):
            batcher.rollback()
        with pytest.raises(Rejected) as kept:
            batcher.promote(1, weight=0.5)
        assert roles(batcher) == {2: ("live", 1.0), 1: ("previous", 0.0)}
        assert (states.count(1), versions_of(ask(batcher, 4))) == (0, {2: 4})
        publish_in_time(batcher, states.of(3))
        assert not states.crowded
        assert kept.value.__traceback__ is not None


def test_a_request_that_comes_too_late_for_its_version_has_the_present_one() -> None:
    states = States(alone=True)
    with limited() as pool:
        batcher = pool.serve(answer, initializer=states.of(1), resident=100, max_batch=4)
        ask(batcher, 1)[0].result()
        late, x = batcher._present.way, torch.tensor(0.0)
        batcher.publish(answer, initializer=states.of(2))
        assert versions_of([late.put(None, x, [x], None, None, "interactive", True)]) == {2: 1}
        assert states.count(1) == 0
        batcher.rollback()
        assert versions_of([late.put(None, x, [x], None, None, "interactive", True)]) == {1: 1}
        assert not states.crowded


def test_what_other_batchers_keep_counts() -> None:
    states, others = States(alone=True), States()
    with limited(bytes_each=250.0) as pool:
        batcher = pool.serve(answer, initializer=states.of(1), resident=100, max_batch=4)
        other = pool.serve(answer, initializer=others.of(1), resident=100, max_batch=4)
        with Held(pool, 2):
            asked = ask(batcher, 8) + ask(other, 8)
        versions_of(asked)
        for name in hosts(2):  # on both devices
            there = [one for one in hosts(2) if one != name]
            pool.retire(there[0])
            versions_of(ask(batcher, 1) + ask(other, 1))
            pool.restore(there[0])
        publish_in_time(batcher, states.of(2))
        assert not states.crowded


def test_a_device_that_is_retired_during_an_exchange_does_not_keep_the_old_version() -> None:
    states = States(alone=True)
    first, second = hosts(2)
    with limited() as pool:
        batcher = pool.serve(answer, initializer=states.of(1), resident=100, max_batch=4)
        for name in (second, first):
            pool.retire(name)
            ask(batcher, 1)[0].result()
            pool.restore(name)
        assert states.count(1) == 2
        pool.retire(first)
        publish_in_time(batcher, states.of(2), allow_gap=True)
        assert (states.count(1), states.count(2)) == (0, 1)
        pool.restore(first)
        pool.retire(second)
        assert versions_of(ask(batcher, 2)) == {2: 2}
        assert not states.crowded


def test_a_publish_that_cannot_fit_is_refused_before_the_previous_version_goes() -> None:
    states = States()
    with limited(bytes_each=250.0) as pool:
        batcher = pool.serve(answer, initializer=states.of(1), resident=100, max_batch=4)
        ask(batcher, 1)[0].result()
        batcher.publish(answer, initializer=states.of(2))
        with pytest.raises(Rejected, match="all requests must go to the new one"):
            batcher.publish(answer, initializer=states.of(3), resident=200, weight=0.5)
        assert roles(batcher) == {2: ("live", 1.0), 1: ("previous", 0.0)}
        batcher.publish(answer, initializer=states.of(4), weight=0.5)  # this one fits without the previous one
        assert roles(batcher) == {2: ("live", 0.5), 4: ("candidate", 0.5)}


@pytest.mark.parametrize("count", [1, 2])
def test_a_second_interrupt_leaves_the_service_whole(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    states, interrupts = States(alone=True), [2]
    waits = concurrent.futures.wait

    def interrupted(*of: Any) -> Any:
        if interrupts[0] > 0:
            interrupts[0] -= 1
            raise KeyboardInterrupt
        return waits(*of)

    with limited(count) as pool:
        batcher = pool.serve(answer, initializer=states.of(1), resident=100, max_batch=4)
        with Clients(batcher) as clients:

            def first(*of: Any) -> Any:  # the next one comes while it cleans up
                monkeypatch.setattr(answerer, "wait_for", interrupted)
                monkeypatch.setattr(warming, "wait", waits)
                return interrupted(*of)

            monkeypatch.setattr(warming, "wait", first)
            with pytest.raises(KeyboardInterrupt):
                batcher.publish(answer, initializer=states.of(2), allow_gap=True)
            assert interrupts == [0]
            assert roles(batcher) == {1: ("live", 1.0)}
            assert soon(lambda: states.count(2) == 0)
            counts = [len(one) for one in clients.answers]
            assert soon(lambda: all(len(one) > more + 20 for one, more in zip(clients.answers, counts, strict=True)))
        versions_of([one for client in clients.answers for one in client])
        batcher.publish(answer, initializer=states.of(3), allow_gap=True)
        assert versions_of(ask(batcher, 4)) == {3: 4}


@pytest.mark.parametrize("exchange", [False, True])
def test_after_an_interrupt_nothing_is_freed_that_still_runs(exchange: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    states, running, go = States(), threading.Event(), threading.Event()
    waits, frees, freed = concurrent.futures.wait, WithState.free, []

    def answers(state: State, x: torch.Tensor) -> torch.Tensor:
        if state.version == 2:
            running.set()
            go.wait(20)
        return answer(state, x)

    def goes_on(*of: Any) -> Any:
        go.set()
        return waits(*of)

    def interrupted(*of: Any) -> Any:
        if running.is_set():
            patch.setattr(answerer, "wait_for", goes_on)
            raise KeyboardInterrupt
        return waits(*of)

    def free(self: WithState, seat: Any) -> None:
        freed.append((2 in {one.version for (one,) in self._states.values()}, go.is_set()))
        frees(self, seat)

    with limited() if exchange else pool_of() as pool:
        batcher = pool.serve(answers, initializer=states.of(1), resident=100 if exchange else 0, max_batch=4)
        ask(batcher, 1)[0].result()
        with monkeypatch.context() as patch:
            patch.setattr(warming, "wait", interrupted)
            patch.setattr(WithState, "free", free)
            with pytest.raises(KeyboardInterrupt):
                batcher.publish(answers, initializer=states.of(2))
        assert [went for of_second, went in freed if of_second]
        assert all(went for of_second, went in freed if of_second)
        assert versions_of(ask(batcher, 4)) == {1: 4}


def test_each_size_is_a_job_of_its_own_of_one_kind() -> None:
    states = States()
    with limited() as pool:
        batcher = pool.serve(answer, initializer=states.of(1), resident=100, max_batch=4)
        ask(batcher, 1)[0].result()
        for version in (2, 3):
            batcher.publish(answer, initializer=states.of(version))
        found = kinds_of(pool)
        assert len({kind for _, kind in found}) == 1
        for name in hosts(2):
            assert sum(device == name for device, _ in found) == 2 * (1 + len(list(batch_sizes(4))))


def test_a_device_that_goes_away_during_a_publish_is_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "_AWAY", 4)
    first, second = hosts(2)
    states = States()
    away: list[Exception] = []

    class Away(Exception):
        def __init__(self) -> None:
            away.append(self)

    monkeypatch.setattr(warming, "_AwayError", Away)

    def initializer(device: torch.device) -> State:
        if first in pool._jobs.engine.active:
            pool.retire(first)
        made: State = states.of(2)(device)
        return made

    with pool_of() as pool:
        batcher = pool.serve(answer, initializer=states.of(1), max_batch=4)
        for shape in ((), *((size,) for size in range(1, 6))):  # kinds
            batcher(torch.zeros(shape)).result()
        before = pool.report()["outcomes"]
        publish_in_time(batcher, initializer)
        assert len(away) == 1  # for the device, whatever the number of kinds
        assert pool.report()["outcomes"] == before
        assert versions_of(ask(batcher, 4)) == {2: 4}
        pool.restore(first)
        pool.retire(second)
        assert versions_of(ask(batcher, 4)) == {2: 4}


def test_without_a_device_there_is_no_publish_and_on_a_closed_pool_no_change() -> None:
    with pool_of(1) as pool:
        batcher = pool.serve(adds(10), max_batch=4)
        pool.retire(hosts(1)[0])
        with pytest.raises(Rejected, match="no device takes work"):
            batcher.publish(adds(20))
        pool.restore(hosts(1)[0])
        assert versions_of(ask(batcher, 1)) == {1: 1}
        batcher.publish(adds(20))
        batcher.publish(adds(30), weight=0.5)
    before = batcher.versions
    for change in (lambda: batcher.publish(adds(40)), batcher.promote, batcher.rollback, lambda: batcher.retire(1)):
        with pytest.raises(Unavailable, match="the pool is closed"):
            change()
    assert batcher.versions == before


def test_copies_for_the_shadow_are_made_where_there_is_room_and_end_with_the_pool() -> None:
    pool = pool_of(1)
    batcher = pool.serve(adds(10), max_batch=4)
    ask(batcher, 1)[0].result()
    batcher.publish(adds(20), shadow=True)
    closing = threading.Thread(target=pool.close)
    before = pool.report()["outcomes"]
    with Held(pool):
        answers = ask(batcher, 32)
        rest = [batcher(torch.tensor(0.0), wait=False) for _ in range(8)]
        assert all(isinstance(one.exception(), Rejected) for one in rest)
        shadows = pool.waiting - 32
        closing.start()
        assert soon(lambda: pool.waiting == 32)  # nobody waits for copies
    closing.join()
    assert shadows == 32
    after = pool.report()["outcomes"]
    assert versions_of(answers) == {1: 32}
    assert after["rejected"] - before["rejected"] == 8  # of the requests alone
    assert after["cancelled"] == before["cancelled"]


def test_an_error_about_a_device_of_another_pool_retires_none() -> None:
    error = DeviceLost("of another pool")
    error.device = "cuda:77"

    def lost(_: object) -> None:
        raise error

    with pool_of() as pool:
        batcher = pool.serve(lost, max_batch=1, idempotent=True)
        for asked in (pool.submit(lost), pool.submit(lost, idempotent=True), batcher(torch.tensor(0.0))):
            with pytest.raises(DeviceLost, match="of another pool"):
                asked.result()
        assert not any(one["retired"] for one in pool.report()["devices"].values())


def test_a_rollback_that_comes_while_the_previous_version_goes_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pool_of(1) as pool:
        batcher = pool.serve(adds(10), max_batch=4)
        batcher.publish(adds(20))
        versions = batcher._versions

        @contextlib.contextmanager
        def retires(*_: object) -> Iterator[None]:
            batcher.retire(1)
            yield

        monkeypatch.setattr(versions, "_warmed_again", retires)
        with pytest.raises(InvalidArgument, match="no version before"):
            batcher.rollback()
        assert versions_of(ask(batcher, 2)) == {2: 2}
