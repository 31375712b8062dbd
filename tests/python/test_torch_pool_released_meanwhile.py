"""`Pool(autoscale=...)`: what comes while devices are released, unloaded, or loaded before they come back."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from paceline.torch._pool import released
from paceline.torch._pool.warming import Warming
from pool_support import served_by, soon
from released_support import States, add, asked, box, on, serve
from torch_support import hosts


def test_a_version_that_is_published_meanwhile_is_loaded_when_the_device_returns(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    first, second, third = States(), States(), States()
    with box(monkeypatch, hosts(2)) as two:
        batcher = serve(two, first)
        two.release()
        batcher.publish(add, initializer=second)
        assert len(second.made) == 1, "not on a released device"
        second.waits = threading.Event()
        two.want()
        two.look(lambda: len(second.made) == 2)
        batcher.publish(add, initializer=third)  # while the device loads the second one
        second.waits.set()
        two.look(lambda: two.active)
        assert third.made[-1] == f"paceline {two.name}"
        assert len(third.made) == 2
        on(two, batcher, two.name)
        assert len(third.made) == 2


def test_a_device_that_returns_during_a_publish_loads_that_version_too(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = States(), States()
    begun, goes_on = threading.Event(), threading.Event()

    def slow(device: torch.device) -> torch.Tensor:
        if threading.current_thread().name.startswith("paceline publish"):
            begun.set()
            assert goes_on.wait(20)
        return second(device)

    with box(monkeypatch, hosts(2)) as two:
        batcher = serve(two, first)
        two.release()
        publish = threading.Thread(target=batcher.publish, args=(add,), kwargs={"initializer": slow})
        publish.start()
        assert begun.wait(20)
        two.come_back()
        goes_on.set()
        publish.join(60)
        on(two, batcher, two.name)
        assert second.made[0] == f"paceline {two.name}"
        assert len(second.made) == 2


def test_a_version_that_is_published_at_the_moment_of_return_is_loaded_too(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = States(), States()
    with box(monkeypatch, hosts(2)) as two:
        batcher = serve(two, first)
        two.release()
        publish = threading.Thread(target=batcher.publish, args=(add,), kwargs={"initializer": second})
        take_back, find, found = two.scale.take_back, Warming.seats, threading.Event()

        def finds(self: Warming) -> Any:
            seats = find(self)
            found.set()
            return seats

        monkeypatch.setattr(Warming, "seats", finds)

        def takes_back(*given: Any) -> None:  # all that answered a moment ago is there
            publish.start()
            assert found.wait(20)
            take_back(*given)

        monkeypatch.setattr(two.scale, "take_back", takes_back)
        two.come_back()
        publish.join(60)
        assert not publish.is_alive()
        assert [name.startswith("paceline publish") for name in second.made] == [True, True]
        on(two, batcher, two.name)
        assert len(second.made) == 2


@pytest.mark.parametrize("what", ["restore", "retire", "unneeded", "useless", "close"])
def test_a_load_ends_early_for_what_comes_meanwhile(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    first, second = States(), States()
    with box(monkeypatch, hosts(2)) as two:
        batchers = [serve(two, first), serve(two, second)]
        served_by(batchers[0]).rehearsals = 1 + (what in ("restore", "close"))  # as where each size is made apart
        two.release()
        first.waits = threading.Event()
        asked.clear()
        two.want()
        assert soon(lambda: len(first.made) == 3)
        assert f"{two.name} is released, of which {two.name} loads what answers" in two.pool.explain()
        assert two.pool.report()["devices"][two.name]["released"]
        assert two.pool.report()["desired_devices"] >= 1
        calls: dict[str, Callable[[], Any]] = {
            "restore": lambda: two.pool.restore(two.name),
            "retire": lambda: two.pool.retire(two.name),
            "unneeded": two.release,
            "useless": lambda: two.scale.retire_useless(hosts(2)[0]),
            "close": two.pool.close,
        }
        call = threading.Thread(target=calls[what])
        call.start()
        assert soon(lambda: two.name not in two.scale._models.coming)
        call.join(0.2)
        assert not two.active, "it is still loading"
        assert what == "retire" or call.is_alive()
        first.waits.set()
        call.join(20)
        assert not call.is_alive()
        assert soon(lambda: two.scale._models._thread is None)
        assert second.made[2:] == []
        assert asked[f"paceline {two.name}"] == 0, "no batch has run there"
        assert two.active == (what in ("restore", "useless"))
        if what in ("restore", "useless"):
            on(two, batchers[1], two.name)
            assert first.alive == second.alive == 2
        elif what != "close":
            two.look(lambda: first.alive == 1)


def test_its_owner_may_restore_the_device_between_a_decision_and_what_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    states = States()
    with box(monkeypatch, hosts(2)) as two:
        batcher = serve(two, states)
        two.release()

        def decides(*_: Any) -> list[tuple[str, bool]]:
            two.pool.restore(two.name)
            return [(two.name, True)]

        assert soon(lambda: two.scale._models._thread is None)
        two.scale._decide = decides
        two.scale.look()
        assert soon(lambda: two.scale._models._thread is None)
        assert len(states.made) == 2, "jobs may be at work there"
        on(two, batcher, two.name)
        assert len(states.made) == 3


def test_its_owner_may_restore_the_device_while_it_is_released(monkeypatch: pytest.MonkeyPatch) -> None:
    states = States()
    retired: list[bool] = []
    with box(monkeypatch, hosts(2)) as two:
        batcher, retire = serve(two, states), two.engine.retire

        def retires(*given: Any) -> bool:
            assert given[:3] == (two.name, True, True)
            assert given[3] == two.scale._models.seconds_of(two.pool._jobs, two.name) > 0
            retired.append(retire(*given))
            two.pool.restore(two.name)
            return retired[-1]

        monkeypatch.setattr(two.engine, "retire", retires)
        two.wanted = False
        two.look(lambda: two.name in two.scale._models._full)
        two.wanted = True
        two.scale.look()
        assert soon(lambda: two.scale._models._thread is None)
        assert states.alive == 2
        assert float(batcher(torch.zeros(1)).result(20)) == 1.0


def test_its_owner_may_restore_the_device_before_it_is_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    states, looked = States(), threading.Event()
    with box(monkeypatch, hosts(2)) as two:
        batcher, jobs = serve(two, states), two.pool._jobs
        versions = jobs.versions

        def looks() -> list[Any]:
            if threading.current_thread().name == "paceline pool released":
                looked.set()
            return versions()

        monkeypatch.setattr(jobs, "versions", looks)
        with jobs.seats[two.name].loading():
            two.wanted = False
            two.look(looked.is_set)
            two.wanted = True
            two.pool.restore(two.name)
        assert soon(lambda: two.scale._models._thread is None)
        assert states.alive == 2
        assert float(batcher(torch.zeros(1)).result(20)) == 1.0


def test_a_device_that_comes_back_without_a_load_waits_until_it_is_unloaded(monkeypatch: pytest.MonkeyPatch) -> None:
    with box(monkeypatch, hosts(2)) as two:
        batcher = serve(two, States())
        two.release()
        two.scale._models._failed[two.name] = float("inf"), 1.0
        look = threading.Thread(target=two.scale.look)
        with two.pool._jobs.seats[two.name].loading():
            two.scale._decide = lambda *_: [(two.name, True)]
            look.start()
            look.join(0.2)
            assert not two.active
        assert soon(lambda: two.active)
        look.join(20)
        on(two, batcher, two.name)


def test_what_begins_while_the_pool_is_closed_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with box(monkeypatch, hosts(2)) as two:
        serve(two, States())
        two.release()
        models = two.scale._models
        two.pool._jobs.ends[0]()  # its thread; the test looks by itself
        assert soon(lambda: all(one.name != "paceline pool autoscale" for one in threading.enumerate()))
        models.want(two.name)
        end = threading.Thread(target=models.end)
        begun: list[str] = []
        ended: list[bool] = []

        def begins(**given: Any) -> threading.Thread:
            begun.append(given["name"])
            if len(begun) == 1:
                end.start()
                end.join(0.2)
                ended.append(not end.is_alive())
            return threading.Thread(**given)

        monkeypatch.setattr(released, "threading", SimpleNamespace(**{**vars(threading), "Thread": begins}))
        models.go_on(two.pool._jobs)
        assert ended == [False]
        end.join(20)
        assert not end.is_alive()
        assert soon(lambda: models._thread is None)
        count = len(begun)
        models.want(two.name)
        assert not models.coming
        models.note(two.name)
        models.go_on(two.pool._jobs)
        assert len(begun) == count


def test_a_pool_may_be_closed_by_what_it_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    states, closed = States(), threading.Event()

    def closes(device: torch.device) -> torch.Tensor:
        if states.loads_now:
            two.pool.close()
            closed.set()
        return states(device)

    with box(monkeypatch, hosts(2)) as two:
        batcher = two.pool.serve(add, initializer=closes)
        on(two, batcher, two.name)
        two.release()
        two.want()
        assert closed.wait(20)


def test_a_device_whose_versions_are_exchanged_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    states = States()
    with box(monkeypatch, hosts(2)) as two:
        batcher = serve(two, states)
        two.release()
        batcher._versions.exchanging = True
        two.want()
        assert soon(lambda: two.scale._models._thread is None)
        assert not two.active
        assert len(states.made) == 2
        batcher._versions.exchanging = False
        two.come_back()
        assert len(states.made) == 3


def test_nothing_is_freed_while_a_version_is_published(monkeypatch: pytest.MonkeyPatch) -> None:
    states = States()
    with box(monkeypatch, hosts(2)) as two:
        batcher = serve(two, states)
        batcher._versions.bringing = batcher._versions._state.live
        two.wanted = False
        two.look(lambda: not two.active)
        assert soon(lambda: two.scale._models._thread is None)
        assert states.alive == 2, "the publish may just load there"
        batcher._versions.bringing = None
        two.release()
        assert states.alive == 1


def test_nothing_is_freed_before_a_worker_can_have_begun_what_it_took(monkeypatch: pytest.MonkeyPatch) -> None:
    states = States()
    with box(monkeypatch, hosts(2)) as two:
        monkeypatch.setattr(released, "_SETTLED", 1e6)
        batcher = serve(two, states)
        two.wanted = False
        two.look(lambda: not two.active)
        assert soon(lambda: two.scale._models._thread is None)
        assert states.alive == 2
        two.scale._models._full[two.name] = 0.0
        two.release()
        assert states.alive == 1
        assert float(batcher(torch.zeros(1)).result(20)) == 1.0
