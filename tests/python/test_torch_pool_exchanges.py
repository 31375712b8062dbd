"""`Batcher.publish` where memory holds one version, where something fails or is interrupted, and at the end of a pool."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import itertools
import json
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import InvalidArgument, Rejected, Unavailable
from paceline.sim import replay_pool
from paceline.torch import Pool
from paceline.torch._pool import warming
from pool_support import Held, pool_of, soon
from torch_support import hosts
from versions_support import Clients, State, States, adds, answer, ask, limited, roles, versions_of


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


def test_an_error_of_a_request_that_somebody_keeps_does_not_hold_up_an_exchange() -> None:
    states = States(alone=True)
    with limited() as pool:
        batcher = pool.serve(answer, initializer=states.of(1), resident=100, max_batch=4)
        assert ask(batcher, 1)[0].result() == 10.0
        with pytest.raises(InvalidArgument, match="priority") as kept:
            ask(batcher, 1, priority="now")
        publish = threading.Thread(
            target=batcher.publish, args=(answer,), kwargs={"initializer": states.of(2)}, daemon=True
        )
        publish.start()
        publish.join(20)
        assert not publish.is_alive()
        assert roles(batcher) == {2: ("live", 1.0), 1: ("previous", 0.0)}
        assert kept.value.__traceback__ is not None


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


def test_a_version_that_was_freed_takes_no_room_of_others(tmp_path: Path) -> None:
    states, others = States(seconds=0.02), States()  # so the other model would go, which is soon there again
    with limited(1, bytes_each=250.0) as pool:
        pool.write_ledger(tmp_path / "pool.jsonl")
        batcher = pool.serve(answer, initializer=states.of(1), resident=100, max_batch=4)
        other = pool.serve(answer, initializer=others.of(1), resident=100, max_batch=4)
        for _ in range(2):
            versions_of(ask(batcher, 1) + ask(other, 1))
        batcher.publish(answer, initializer=states.of(2), allow_gap=True)
        assert (states.count(1), states.count(2), others.count(1)) == (0, 1, 1)
        versions_of(ask(batcher, 1) + ask(other, 1))
        batcher.rollback(allow_gap=True)
        versions_of(ask(batcher, 1) + ask(other, 1))
        assert len(others.made) == 1  # it was never evicted
        assert not pool._jobs.engine.unload("no such device", "no such model")
    lines = [json.loads(line) for line in (tmp_path / "pool.jsonl").read_text().splitlines()]
    freed = [line["unload"]["model"] for line in lines if "unload" in line]
    assert [name.rpartition(", ")[2] for name in freed[1:]] == ["version 2"]
    assert not any(start.get("evict") for line in lines for start in line.get("decided", {}).get("starts", ()))
    assert replay_pool(tmp_path / "pool.jsonl").mismatch is None


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
        with pytest.raises(Rejected, match=r"^rollback: .*With allow_gap=True requests wait"):
            batcher.rollback()
        with pytest.raises(Rejected, match=r"^promote: .*With allow_gap=True requests wait"):
            batcher.promote(1)
        assert batcher.promote(1, allow_gap=True).number == 1
        assert versions_of(ask(batcher, 2)) == {1: 2}
        assert batcher.rollback(allow_gap=True).number == 3
        assert versions_of(ask(batcher, 2)) == {3: 2}
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
    gone = [weakref.ref(one) for one in (batcher, pool._jobs, batcher._versions)]
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
            (lambda: batcher.publish(adds(20), shadow=True, on_shadow=1), "on_shadow= is a int, not a function"),
            (lambda: batcher.publish(adds(20), max_batch=3), "max_batch= is no option of a version"),
            (lambda: batcher.publish(adds(20).train()), "training mode"),
            (lambda: batcher.promote(), "no candidate"),
            (lambda: batcher.promote(1, weight=0.5), "version 1 is live"),
            (lambda: batcher.promote(7), "no version"),
            (lambda: batcher.promote(second), "no version"),
            (lambda: batcher.promote("2"), "^promote: the version is '2'; it must be a number"),
            (lambda: batcher.retire(None), "^retire: the version is None"),
            (lambda: batcher.retire(1), "version 1 is live"),
            (lambda: batcher.rollback(), "no version before"),
        ]:
            with pytest.raises(InvalidArgument, match=text):
                call()  # type: ignore[no-untyped-call]
        batcher.publish(adds(20), weight=0.6)
        with pytest.raises(InvalidArgument, match=r"weight=0\.4"):
            batcher.publish(adds(30), weight=0.4)
        assert list(roles(batcher).values()) == [("live", 0.4), ("candidate", 0.6)]
