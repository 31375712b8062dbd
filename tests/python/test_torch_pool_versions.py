"""`Batcher.publish` and what follows from it: which version answers a request, and that none is lost while versions change."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import itertools
import threading
import time
import weakref
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from paceline import InvalidArgument, Rejected, Unavailable
from paceline.torch import Pool, PoolFuture, Version
from paceline.torch._pool import warming
from pool_support import Held, pool_of, soon
from torch_support import hosts


class Adds(nn.Module):
    """Its answers name it."""

    def __init__(self, number: float) -> None:
        super().__init__()
        self.number = nn.Parameter(torch.tensor(float(number)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.number


def adds(number: float) -> nn.Module:
    return Adds(number).eval()


def versions_of(answers: list[PoolFuture[Any]]) -> Counter[int]:
    """How many requests of zero each version was given; each answer is ten times its version."""
    for one in answers:
        assert float(one.result()) == 10.0 * one.version
    return Counter(one.version for one in answers)


def ask(batcher: Any, count: int, **options: Any) -> list[PoolFuture[Any]]:
    return [batcher(torch.tensor(0.0), **options) for _ in range(count)]


def roles(batcher: Any) -> dict[int, tuple[str, float]]:
    return {one["number"]: (one["role"], one["weight"]) for one in batcher.versions}


def test_a_request_is_answered_by_the_version_of_its_submit_and_its_future_says_which() -> None:
    with pool_of() as pool:
        batcher = pool.serve(adds(10), max_batch=4)
        assert versions_of(ask(batcher, 3)) == {1: 3}
        publish = threading.Thread(target=batcher.publish, args=(adds(20),))
        with Held(pool, 2) as held:
            before = ask(batcher, 5)
            publish.start()
            assert soon(lambda: pool.waiting > 5)  # it warms
            before += ask(batcher, 5)
            held.release()
        publish.join()
        after = ask(batcher, 5)
        assert versions_of(before) == {1: 10}
        assert versions_of(after) == {2: 5}
        assert after[0].device in hosts(2)
        assert pool.submit(lambda _: 1).version == 0
        assert batcher.publish(adds(30)) == Version(3, batcher._name)
        assert roles(batcher) == {3: ("live", 1.0), 2: ("previous", 0.0)}
        assert batcher.rollback().number == 2
        assert versions_of(ask(batcher, 5)) == {2: 5}
        with pytest.raises(InvalidArgument, match="no version before"):
            batcher.rollback()


def test_weights_are_exact_and_keys_stay_with_their_version() -> None:
    with pool_of() as pool:
        batcher = pool.serve(adds(10))
        second = batcher.publish(adds(20), weight=0.1)
        assert versions_of(ask(batcher, 1000)) == {1: 900, 2: 100}
        again = [one.version for one in ask(batcher, 50)]
        batcher.publish(adds(30), weight=0.25)
        assert [one.version for one in ask(batcher, 2000)].count(3) == 500
        batcher.retire(3)
        assert [one.version for one in ask(batcher, 50)] == again  # reproducible
        by_key = {key: ask(batcher, 1, key=key)[0].version for key in range(1000)}
        assert {key: ask(batcher, 1, key=key)[0].version for key in range(1000)} == by_key
        assert 60 < sum(version == 2 for version in by_key.values()) < 140
        assert ask(batcher, 1, key="a")[0].version == ask(batcher, 1, key="a")[0].version
        assert batcher.promote(second, weight=0.5).number == 2
        more = {key: ask(batcher, 1, key=key)[0].version for key in range(1000)}
        assert all(more[key] == 2 for key, version in by_key.items() if version == 2)
        assert 430 < sum(version == 2 for version in more.values()) < 570
        assert roles(batcher) == {1: ("live", 0.5), 2: ("candidate", 0.5)}
        with pytest.raises(InvalidArgument, match="must be a string"):
            batcher(torch.tensor(0.0), key=1.5)  # type: ignore[arg-type]
        assert batcher.promote().number == 2
        assert roles(batcher) == {2: ("live", 1.0), 1: ("previous", 0.0)}
        batcher.publish(adds(40), weight=0.5)
        assert batcher.rollback().number == 2  # the candidate goes
        assert versions_of(ask(batcher, 50)) == {2: 50}
        assert batcher.rollback().number == 1


class States:
    """Makes states for `initializer=`, and knows which ones there are on each device."""

    def __init__(self, *, alone: bool = False, seconds: float = 0.0) -> None:
        self.alive: Counter[tuple[str, int]] = Counter()
        self.made: list[tuple[int, str]] = []  # version and thread
        self.alone, self.seconds = alone, seconds
        self.fails: dict[int, BaseException] = {}  # by version: at the last device that is to be loaded
        self.crowded = False
        self._lock = threading.Lock()

    def of(self, version: int) -> Any:
        def initializer(_: torch.device) -> State:
            time.sleep(self.seconds)
            self.made.append((version, threading.current_thread().name))
            if version in self.fails and sum(one == version for one, _ in self.made) == len(hosts(2)):
                raise self.fails[version]
            return State(self, version)

        return initializer

    def count(self, version: int) -> int:
        return sum(count for (_, one), count in self.alive.items() if one == version)


class State:
    def __init__(self, states: States, version: int) -> None:
        self.states, self.version, self.where = states, version, threading.current_thread().name
        with states._lock:
            states.alive[self.where, version] += 1
            there = sum(count for (where, _), count in states.alive.items() if where == self.where)
            states.crowded |= states.alone and there > 1

    def __del__(self) -> None:
        with self.states._lock:
            self.states.alive[self.where, self.version] -= 1


def answer(state: State, x: torch.Tensor) -> torch.Tensor:
    time.sleep(0.001)
    return x + 10 * state.version


class Clients:
    """Ask all the time, on threads of their own."""

    def __init__(self, batcher: Any, count: int = 2) -> None:
        self._batcher, self._over = batcher, threading.Event()
        self.answers: list[list[PoolFuture[Any]]] = [[] for _ in range(count)]
        self._threads = [threading.Thread(target=self._ask, args=(one,)) for one in self.answers]

    def _ask(self, answers: list[PoolFuture[Any]]) -> None:
        while not self._over.is_set():
            answers.append(self._batcher(torch.tensor(0.0)))
            answers[-1].exception()

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        assert soon(lambda: all(len(one) > 5 for one in self.answers))
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        for thread in self._threads:
            thread.join()

    def versions(self) -> Counter[int]:
        """All answers are right, and each client's versions only go one way."""
        for one in self.answers:
            numbers = [answer.version for answer in one]
            assert numbers == sorted(numbers)
        return versions_of([answer for one in self.answers for answer in one])


def test_a_version_is_loaded_and_warmed_beside_the_service_and_the_old_one_is_freed() -> None:
    states, sizes = States(seconds=0.1), set()

    def answer_and_note(state: State, x: torch.Tensor) -> torch.Tensor:
        sizes.add((state.version, threading.current_thread().name, len(x)))
        return answer(state, x)

    with pool_of() as pool:
        batcher = pool.serve(answer_and_note, initializer=states.of(1), max_batch=8)
        with Clients(batcher) as clients:
            workers = {name for version, name in states.made if version == 1}
            batcher.publish(answer_and_note, initializer=states.of(2))
            swapped = [len(one) for one in clients.answers]
            assert soon(lambda: all(len(one) > count + 5 for one, count in zip(clients.answers, swapped, strict=True)))
        assert set(clients.versions()) == {1, 2}
        loaders = [name for version, name in states.made if version == 2]
        assert len(loaders) == 2
        assert not workers & set(loaders)  # no batch has waited for it
        for worker in workers:
            assert {size for version, name, size in sizes if (version, name) == (2, worker)} == set(range(1, 9))
        assert (states.count(1), states.count(2)) == (2, 2)  # kept for a rollback
        batcher.publish(answer_and_note, initializer=states.of(3))
        assert soon(lambda: states.count(1) == 0)
        assert (states.count(2), states.count(3)) == (2, 2)
        with Held(pool, 2):
            waits = ask(batcher, 4)
            batcher.rollback()
            assert states.count(3) == 2  # until its last batch
        assert versions_of(waits) == {3: 4}
        assert soon(lambda: states.count(3) == 0)


@pytest.mark.parametrize("what", ["load", "warm", "answer"])
def test_a_version_that_fails_to_load_or_to_answer_leaves_the_service_as_it_was(what: str) -> None:
    states = States()
    states.fails = {2: OSError("no such file")} if what == "load" else {}

    def wrong(state: State, x: torch.Tensor) -> torch.Tensor:
        if state.version == 2 and what == "warm" and len(x) == 4:
            raise ValueError("four")
        return x.sum() if state.version == 2 and what == "answer" else answer(state, x)

    with pool_of() as pool:
        batcher = pool.serve(wrong, initializer=states.of(1), max_batch=4)
        with Clients(batcher) as clients:
            with pytest.raises(Rejected, match=r"version 2 was not taken, since .* on .* has raised") as error:
                batcher.publish(wrong, initializer=states.of(2))
            assert states.count(2) == 0
            assert roles(batcher) == {1: ("live", 1.0)}
        assert set(clients.versions()) == {1}
        cause, text = {
            "load": (OSError, f"loading on {hosts(2)[1]} .*no such file"),
            "warm": (ValueError, f"a batch of 4 on {hosts(2)[0]} .*four"),
            "answer": (InvalidArgument, "dimension 0 is the request"),
        }[what]
        assert isinstance(error.value.__cause__, cause)
        assert error.match(text)
        assert batcher.publish(wrong, initializer=states.of(3)).number == 3
        assert versions_of(ask(batcher, 4)) == {3: 4}


def test_a_version_that_fails_on_some_inputs_fails_these_alone() -> None:
    def picky(x: torch.Tensor) -> torch.Tensor:
        if bool((x == 13).any()):
            raise ValueError("thirteen")
        return x + 20

    with pool_of() as pool:
        batcher = pool.serve(lambda x: x + 10, max_batch=8, idempotent=True)
        batcher(torch.tensor(13.0)).result()  # an example for the next version
        with pytest.raises(Rejected, match="thirteen"):
            batcher.publish(picky)
    with pool_of() as pool:
        batcher = pool.serve(lambda x: x + 10, max_batch=8, idempotent=True)
        batcher(torch.tensor(0.0)).result()
        batcher.publish(picky, weight=0.5)
        with Held(pool, 2):
            answers = [batcher(torch.tensor(float(number))) for number in [0, 1, 2, 3, 13, 13, 4, 5, 13, 13]]
        failed = [one for one in answers if one.exception() is not None]
        assert [one.version for one in failed] == [2, 2]
        assert [float(one.result()) % 10 for one in answers if one not in failed] == [0, 1, 2, 3, 3, 4, 5, 3]


def test_a_version_in_the_shadow_answers_copies_in_the_background() -> None:
    seen: list[tuple[float, float, float, int]] = []
    raised = threading.Event()

    def compare(item: torch.Tensor, live: PoolFuture[Any], shadow: PoolFuture[Any]) -> None:
        seen.append((float(item), float(live.result()), float(shadow.result()), shadow.version))
        if item == 3:
            raised.set()
            raise RuntimeError("of the user")

    with pool_of(1) as pool:
        batcher = pool.serve(adds(10), max_batch=4)
        ask(batcher, 1)[0].result()
        batcher.publish(adds(20), shadow=True, on_shadow=compare)
        items = [torch.tensor(float(number)) for number in range(20)]
        with Held(pool):
            answers = [batcher(one) for one in items]
            first = pool.submit(lambda _: len(seen), priority="batch")
            for one in items[:10]:
                one.add_(100)  # the caller may once they are answered; here these copies are made already
        assert [float(one.result()) for one in answers[10:]] == [10.0 + number for number in range(10, 20)]
        assert {one.version for one in answers} == {1}
        assert first.result() == 0
        assert soon(lambda: len(seen) == 20)
        assert raised.is_set()
        assert sorted(one[2] for one in seen) == [20.0 + number for number in range(20)]
        assert {one[3] for one in seen} == {2}
        with Held(pool):
            answers = ask(batcher, 32)
            shadows = pool.waiting - 32
            answers[0].cancel()
        assert shadows == 32  # as many as the queue holds
        with Held(pool):
            more = [batcher(torch.tensor(0.0), wait=False) for _ in range(40)]
        assert sum(isinstance(one.exception(), Rejected) for one in more) == 8
        assert roles(batcher) == {1: ("live", 1.0), 2: ("shadow", 0.0)}
        assert batcher.promote().number == 2
        assert roles(batcher) == {2: ("live", 1.0), 1: ("previous", 0.0)}
        assert versions_of(ask(batcher, 3)) == {2: 3}


def limited(count: int = 2) -> Any:
    """Devices whose memory holds one state."""
    return pool_of(count, memory=dict.fromkeys(hosts(count), 150.0))


def test_devices_exchange_versions_one_after_the_other_where_memory_holds_one() -> None:
    states = States(alone=True, seconds=0.05)
    with limited() as pool:
        batcher = pool.serve(answer, initializer=states.of(1), resident=100, max_batch=4)
        with Clients(batcher) as clients:
            batcher.publish(answer, initializer=states.of(2))
            assert soon(lambda: states.count(1) == 0)
            assert states.count(2) == 2
            batcher.publish(answer, initializer=states.of(3))
            assert roles(batcher) == {3: ("live", 1.0), 2: ("previous", 0.0)}
        assert set(clients.versions()) == {1, 2, 3}
        with pytest.raises(Rejected, match="all requests must go to the new one"):
            batcher.publish(answer, initializer=states.of(4), weight=0.5)
        with pytest.raises(Rejected, match="all requests must go to the new one"):
            batcher.publish(answer, initializer=states.of(4), shadow=True)
        with Clients(batcher) as clients:
            assert batcher.rollback().number == 2
            assert ask(batcher, 1)[0].version == 2
        assert (states.count(2), states.count(3)) == (2, 0)
        assert not states.crowded
        assert pool.report()["outcomes"]["failed"] == 0


def test_a_device_that_cannot_exchange_versions_takes_the_old_one_again() -> None:
    states = States(alone=True)
    states.fails = {2: OSError("no such file")}  # on the second device
    with limited() as pool:
        batcher = pool.serve(answer, initializer=states.of(1), resident=100, max_batch=4)
        with Clients(batcher) as clients:
            with pytest.raises(
                Rejected, match=f"loading in the place of version 1 on {hosts(2)[1]} has raised OSError"
            ):
                batcher.publish(answer, initializer=states.of(2))
            assert roles(batcher) == {1: ("live", 1.0)}
            counts = [len(one) for one in clients.answers]
            assert soon(lambda: all(len(one) > more + 20 for one, more in zip(clients.answers, counts, strict=True)))
        found = versions_of([one for client in clients.answers for one in client])
        assert found[1] > 0
        assert states.count(2) == 0
        assert not states.crowded
        assert not any(one["retired"] for one in pool.report()["devices"].values())


def test_a_lone_device_exchanges_versions_only_in_a_gap_that_was_allowed() -> None:
    states = States(alone=True, seconds=0.2)

    async def asks(batcher: Any) -> Any:
        return await batcher.ask(torch.tensor(0.0))

    with limited(1) as pool:
        batcher = pool.serve(answer, initializer=states.of(1), resident=100, max_batch=4)
        with Clients(batcher) as clients:
            with pytest.raises(Rejected, match=f"memory of {hosts(1)[0]} .*With allow_gap=True requests wait"):
                batcher.publish(answer, initializer=states.of(2))
            assert states.count(2) == 0
            publish = threading.Thread(
                target=batcher.publish, args=(answer,), kwargs={"initializer": states.of(3), "allow_gap": True}
            )
            publish.start()
            assert soon(lambda: states.count(1) == 0)
            with pytest.raises(Unavailable, match="exchanged"):
                batcher.promote()
            with pytest.raises(Rejected, match="exchanged for another version"):
                asyncio.run(asks(batcher))
            publish.join()
            assert versions_of(ask(batcher, 2)) == {3: 2}
        assert set(clients.versions()) == {1, 3}
        assert batcher.rollback().number == 1
        assert versions_of(ask(batcher, 2)) == {1: 2}
        assert not states.crowded


def test_memory_that_runs_out_counts_as_memory_that_is_short() -> None:
    states = States(alone=True)

    def initializer(version: int) -> Any:
        make = states.of(version)

        def load(device: torch.device) -> State:
            if version == 2 and threading.current_thread().name.startswith("paceline publish"):
                raise torch.OutOfMemoryError("CUDA out of memory")
            made: State = make(device)
            return made

        return load

    with pool_of() as pool:
        batcher = pool.serve(answer, initializer=initializer(1), max_batch=4)
        with Clients(batcher) as clients:
            batcher.publish(answer, initializer=initializer(2))
        assert set(clients.versions()) <= {1, 2}
        assert (states.count(1), states.count(2)) == (0, 2)
        assert not states.crowded


def test_a_device_that_is_retired_does_not_hold_up_a_publish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(warming, "_AWAY", 4)
    first, second = hosts(2)

    def initializer(_: torch.device) -> int:
        if first in pool._jobs.engine.active:
            pool.retire(first)
        return 20

    with pool_of() as pool:
        batcher = pool.serve(lambda state, x: x + state, initializer=lambda _: 10, max_batch=4)
        ask(batcher, 1)[0].result()
        publish = threading.Thread(
            target=batcher.publish,
            args=(lambda state, x: x + state,),
            kwargs={"initializer": initializer},
            daemon=True,
        )
        publish.start()
        publish.join(20)
        assert not publish.is_alive()
        assert versions_of(ask(batcher, 4)) == {2: 4}
        pool.restore(first)
        pool.retire(second)
        assert versions_of(ask(batcher, 4)) == {2: 4}


def test_a_publish_in_a_job_is_refused_while_another_one_loads() -> None:
    loading, go = threading.Event(), threading.Event()

    def initializer(_: torch.device) -> int:
        loading.set()
        go.wait(20)
        return 20

    with pool_of(1) as pool:
        batcher = pool.serve(lambda state, x: x + state, initializer=lambda _: 10)
        ask(batcher, 1)[0].result()
        publish = functools.partial(batcher.publish, lambda state, x: x + state, initializer=initializer)
        other = threading.Thread(target=publish)
        other.start()
        assert loading.wait(20)
        try:
            with pytest.raises(InvalidArgument, match="would keep a device"):
                pool.submit(lambda _: publish()).result(10)
        finally:
            go.set()
        other.join()
        assert versions_of(ask(batcher, 2)) == {2: 2}


def test_a_publish_in_a_job_or_in_a_callback_is_refused() -> None:
    with pool_of() as pool:
        batcher = pool.serve(adds(10))
        with pytest.raises(InvalidArgument, match="would keep a device"):
            pool.submit(lambda _: batcher.publish(adds(20))).result()
        found: list[BaseException] = []

        def publish(_: object) -> None:
            try:
                batcher.publish(adds(20))
            except InvalidArgument as error:
                found.append(error)

        with Held(pool, 2):
            answer = ask(batcher, 1)[0]
            answer.add_done_callback(publish)
        answer.result()
        assert soon(lambda: found)
        assert roles(batcher) == {1: ("live", 1.0)}


@pytest.mark.parametrize("exchange", [False, True])
def test_an_interrupt_of_publish_leaves_the_service_as_it_was(exchange: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    states, calls = States(alone=exchange), itertools.count(1)
    waits = concurrent.futures.wait

    def interrupted(*of: Any) -> Any:
        if next(calls) == (2 if exchange else 5):
            raise KeyboardInterrupt
        return waits(*of)

    with limited() if exchange else pool_of() as pool:
        resident = 100 if exchange else 0
        batcher = pool.serve(answer, initializer=states.of(1), resident=resident, max_batch=4)
        with Clients(batcher) as clients:
            monkeypatch.setattr(warming, "wait", interrupted)
            with pytest.raises(KeyboardInterrupt):
                batcher.publish(answer, initializer=states.of(2))
            assert roles(batcher) == {1: ("live", 1.0)}
            assert soon(lambda: states.count(2) == 0)
            batcher.publish(answer, initializer=states.of(3))
        versions_of([one for client in clients.answers for one in client])
        assert versions_of(ask(batcher, 4)) == {3: 4}


def test_a_device_that_joins_answers_for_every_version() -> None:
    first, second = hosts(2)
    with Pool([first]) as pool:
        batcher = pool.serve(adds(10))
        batcher.publish(adds(20))
        pool.add(second)
        pool.retire(first)
        assert versions_of(ask(batcher, 3)) == {2: 3}
        batcher.rollback()
        assert versions_of(ask(batcher, 3)) == {1: 3}


def test_a_pool_that_nobody_knows_goes_with_its_versions() -> None:
    pool = pool_of()
    batcher = pool.serve(adds(10))
    ask(batcher, 1)[0].result()
    batcher.publish(adds(20), weight=0.5)
    batcher.publish(adds(30), shadow=True, on_shadow=lambda *_: None)
    versions_of(ask(batcher, 10))
    gone = [weakref.ref(one) for one in (batcher, pool._jobs, batcher._all())]
    del batcher, pool
    assert soon(lambda: all(one() is None for one in gone))


def test_a_pool_that_is_closed_ends_a_publish() -> None:
    pool = pool_of()
    batcher = pool.serve(adds(10), max_batch=4)
    ask(batcher, 1)[0].result()
    found: list[BaseException] = []

    def publish() -> None:
        try:
            batcher.publish(adds(20))
        except (Rejected, Unavailable) as error:
            found.append(error)

    thread = threading.Thread(target=publish)
    with Held(pool, 2) as held:
        thread.start()
        assert soon(lambda: pool.waiting > 0)
        closing = threading.Thread(target=pool.close, kwargs={"cancel": True})
        closing.start()
        thread.join(20)
        held.release()
    closing.join()
    assert len(found) == 1


def test_arguments_of_versions_are_checked() -> None:
    with pool_of(1) as pool:
        batcher: Any = pool.serve(adds(10), memory=5)
        other = pool.serve(adds(10))
        second = other.publish(adds(20))
        for call, text in [
            (lambda: batcher.publish(adds(20), weight=0), "weight=0 must be"),
            (lambda: batcher.publish(adds(20), weight=float("nan")), "weight=nan must be"),
            (lambda: batcher.publish(adds(20), weight=0.5, shadow=True), "answers nobody"),
            (lambda: batcher.publish(adds(20), on_shadow=print), "on_shadow="),
            (lambda: batcher.publish(adds(20), max_batch=3), "max_batch= is no option of a version"),
            (lambda: batcher.publish(adds(20).train()), "training mode"),
            (lambda: batcher.promote(), "no candidate"),
            (lambda: batcher.promote(1, weight=0.5), "version 1 is live"),
            (lambda: batcher.promote(7), "no version"),
            (lambda: batcher.promote(second), "no version"),
            (lambda: batcher.retire(1), "version 1 is live"),
            (lambda: batcher.rollback(), "no version before"),
        ]:
            with pytest.raises(InvalidArgument, match=text):
                call()  # type: ignore[no-untyped-call]
        batcher.publish(adds(20), weight=0.6)
        with pytest.raises(InvalidArgument, match=r"weight=0\.4"):
            batcher.publish(adds(30), weight=0.4)
        assert list(roles(batcher).values()) == [("live", 0.4), ("candidate", 0.6)]
