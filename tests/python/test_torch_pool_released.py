"""`Pool(autoscale=...)`: what models keep on devices that are released, and what is loaded before these come back."""

from __future__ import annotations

import copy
import threading
import time
import warnings
from collections import Counter
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import nn

from paceline.torch import Autoscale, Pool
from paceline.torch._pool import released
from pool_support import give_up_after, served_by, soon
from released_support import States, add, box, on, serve
from torch_support import hosts


def test_a_released_device_keeps_no_state_and_has_it_again_before_its_first_batch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = States()
    with box(monkeypatch, hosts(2)) as two:
        batcher = serve(two, states)
        assert states.alive == 2
        assert two.scale._models.seconds_of(two.pool._jobs, two.name) > 0, "as the first batches have taken"
        two.release()
        assert states.alive == 1
        assert two.pool.report()["devices"][two.name]["released"]
        two.come_back()
        assert states.alive == 2
        assert states.made[2:] == [f"paceline {two.name}"], "on no worker"
        on(two, batcher, two.name)
        assert len(states.made) == 3
        assert two.scale._models._seconds[two.name] > 0
        assert soon(lambda: not two.scale.arriving)
        two.scale._models._seconds.update(short=1e3, long=2e3)
        assert two.scale._models.seconds_of(two.pool._jobs, hosts(2)[0]) == 2e3, "as the longest of others"
        del batcher
        assert two.scale._models.seconds_of(two.pool._jobs, two.name) == 0.0, "nothing is served"


def test_what_runs_there_ends_before_anything_is_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    states, begun, goes_on = States(), threading.Event(), threading.Event()

    def slow(state: Any, batch: Any) -> Any:
        if threading.current_thread().name == where and not goes_on.is_set():
            begun.set()
            assert goes_on.wait(20)
        return batch + state

    with box(monkeypatch, hosts(2)) as two:
        where = two.pool.submit(lambda _: threading.current_thread().name, needs=two.name).result(20)
        batcher = two.pool.serve(slow, initializer=states, max_batch=1)
        asked = []
        while not begun.is_set():
            asked += [batcher(torch.zeros(1)) for _ in range(10)]  # so many that the other device takes some, too
            time.sleep(0.01)
        two.wanted = False
        two.look(lambda: not two.active)
        for _ in range(5):
            time.sleep(0.25)
            two.scale.look()
        assert two.scale._models._full, "the batch has not ended"
        there = served_by(batcher)._states
        assert two.name in there
        goes_on.set()
        two.look(lambda: two.name not in there)
        assert all(float(one.result(20)) == 1.0 for one in asked)


class Net(nn.Module):
    """Notes on which threads it runs, and batches of which size."""

    seen: ClassVar[Counter[tuple[str, int]]] = Counter()

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Net.seen[threading.current_thread().name, len(x)] += 1
        return self.linear(x)  # type: ignore[no-any-return]


@pytest.mark.parametrize("compiled", [False, True], ids=["plain", "settles"])
def test_every_version_that_answers_is_warmed_on_the_device_but_not_the_one_before(
    monkeypatch: pytest.MonkeyPatch, compiled: bool
) -> None:
    nets = [Net().eval() for _ in range(4)]
    with box(monkeypatch, hosts(2)) as two:
        batcher = two.pool.serve(nets[0], max_batch=4)
        item = torch.randn(3)
        batcher(item).result(20)
        batcher.publish(nets[1])
        batcher.publish(nets[2], weight=0.5)
        batcher.publish(nets[3], shadow=True)
        if compiled:
            for one in batcher._versions.answering():
                one.served.rehearsals = 2  # as where a batch of each size makes something of its own
        two.release()
        state: Any = batcher._versions._state
        assert {role: two.name in one.served._copies for role, one in state.all()} == dict.fromkeys(
            ("live", "candidate", "shadow", "previous"), False
        )
        Net.seen.clear()
        two.come_back()
        assert {role: two.name in one.served._copies for role, one in state.all()} == {
            "live": True,
            "candidate": True,
            "shadow": True,
            "previous": False,
        }
        loaded = {size: count for (name, size), count in Net.seen.items() if name == f"paceline {two.name}"}
        assert loaded == ({1: 6, 2: 6, 3: 6, 4: 6} if compiled else {4: 3})
        two.pool.retire(hosts(2)[0])
        torch.testing.assert_close(
            batcher(item, key=1).result(20), nets[batcher(item, key=1).version - 1](item[None])[0].detach()
        )
        batcher.rollback()
        batcher.rollback()
        torch.testing.assert_close(batcher(item).result(20), nets[0](item[None])[0].detach())


def test_a_load_that_fails_leaves_the_device_away_and_is_not_tried_at_each_look(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = States()
    with box(monkeypatch, hosts(2)) as two:
        batcher = serve(two, states)
        two.release()
        states.fails = torch.OutOfMemoryError("no room")
        models = two.scale._models
        with pytest.warns(
            RuntimeWarning, match=rf"{two.name} stays released, since loading .*add.* has raised .*no room"
        ):
            two.fail()
        tried = len(states.made)
        assert not two.active
        assert states.alive == 1
        assert float(batcher(torch.zeros(1)).result(20)) == 1.0
        assert len(states.made) == tried
        _, wait = models._failed[two.name]
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            models._failed[two.name] = 0.0, wait  # that much later
            two.look(models.failed)
        assert len(states.made) == tried + 1
        assert models._failed[two.name][1] == 2 * wait
        models._failed[two.name] = 0.0, released._LONGEST_RETRY
        two.look(models.failed)
        assert models._failed[two.name][1] == released._LONGEST_RETRY
        states.fails = None
        models._failed[two.name] = 0.0, wait
        two.come_back()
        on(two, batcher, two.name)
        assert len(states.made) == tried + 3
        assert not models._failed


def test_a_load_that_hangs_leaves_the_device_away(monkeypatch: pytest.MonkeyPatch) -> None:
    states = States()
    with box(monkeypatch, hosts(2), hang_seconds=60) as two:
        batcher = serve(two, states)
        two.release()
        states.waits = hangs = threading.Event()
        give_up_after(two.pool, 0.5)
        with pytest.warns(
            RuntimeWarning, match=rf"{two.name} stays released.*hang_seconds=0\.5 s, and is at .* in wait"
        ):
            two.fail()
        assert [one["device"] for one in two.pool.report()["hangs"]] == [two.name]
        give_up_after(two.pool, 60)
        states.waits = None
        two.pool.restore(two.name)  # no longer held by the load that hangs
        on(two, batcher, two.name)
        two.scale._models._failed.clear()
        two.release()
        two.come_back()
        loaded = len(states.made)
        hangs.set()
        on(two, batcher, two.name)
        assert len(states.made) == loaded


@pytest.mark.parametrize("module", [False, True])
def test_a_load_that_hangs_and_ends_late_leaves_nothing_on_the_device(
    monkeypatch: pytest.MonkeyPatch, module: bool
) -> None:
    states, back = States(), list[str]()

    def replicate(net: nn.Module) -> nn.Module:
        made = copy.deepcopy(net)
        vars(made)["state"] = states(torch.device("cpu"))  # lives as long as the copy
        return made

    with box(monkeypatch, hosts(2), hang_seconds=60) as two:
        batcher = two.pool.serve(nn.ReLU().eval(), replicate=replicate, max_batch=4) if module else serve(two, states)
        two.release()
        assert states.alive == 1
        states.waits = hangs = threading.Event()
        give_up_after(two.pool, 0.5)
        with pytest.warns(RuntimeWarning, match=f"{two.name} stays released"):
            two.fail()
        (thread,) = [one for one in threading.enumerate() if one.name == f"paceline {two.name}"]
        monkeypatch.setattr(two.pool._jobs.seats[two.name], "release_memory", lambda: back.append(two.name))
        hangs.set()
        thread.join(20)
        assert not thread.is_alive()
        assert len(states.made) == 3
        assert states.alive == 1
        assert back == [two.name]
        give_up_after(two.pool, 60)
        states.waits = None
        two.scale._models._failed.clear()
        two.come_back()
        assert states.alive == 2
        on_all = [batcher(torch.zeros(1)) for _ in range(8)]
        assert all(one.exception(20) is None for one in on_all)
        assert len(states.made) == 4


def test_a_job_that_only_this_device_can_run_brings_it_back_as_it_is_after_a_load_that_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = States()
    with box(monkeypatch, hosts(2)) as two:
        batcher = serve(two, states)
        two.release()
        two.scale._models._failed[two.name] = float("inf"), 1.0
        del two.scale._decide  # the scaler decides
        job = two.pool.submit(lambda _: 1, needs=two.name)
        two.look(lambda: two.active)
        assert job.result(20) == 1
        assert len(states.made) == 2
        on(two, batcher, two.name)
        assert len(states.made) == 3


@pytest.mark.parametrize("limited", [False, True])
def test_the_engine_forgets_a_state_if_it_counts_its_bytes(monkeypatch: pytest.MonkeyPatch, limited: bool) -> None:
    gone: list[tuple[str, str]] = []
    with box(monkeypatch, hosts(2), memory=dict.fromkeys(hosts(2), 100.0) if limited else None) as two:
        batcher = two.pool.serve(add, initializer=States(), resident=60.0)
        on(two, batcher, two.name)
        monkeypatch.setattr(type(two.engine), "unload", lambda self, *model: gone.append(model), raising=True)
        two.release()
        assert [name for name, _ in gone] == [two.name] * limited


def test_what_keeps_nothing_is_not_run_before_the_device_takes_work(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: set[str] = set()

    def plain(batch: Any) -> Any:
        seen.add(threading.current_thread().name)
        return batch + 1

    with box(monkeypatch, hosts(2)) as two:
        batchers = [serve(two, States()), two.pool.serve(plain)]
        on(two, batchers[1], two.name)
        two.release()
        two.come_back()
        assert seen
        assert f"paceline {two.name}" not in seen


def test_devices_in_one_memory_keep_what_the_others_use(monkeypatch: pytest.MonkeyPatch) -> None:
    states = States()
    with box(monkeypatch, hosts(2), memory=dict.fromkeys(hosts(2), 100.0)) as two:
        batcher = serve(two, states, resident=60.0)
        engine = two.engine
        gone = []
        assert served_by(batcher).load_seconds > 0
        assert two.scale._models.seconds_of(two.pool._jobs, two.name) == 0.0, "the engine adds what it loads"
        monkeypatch.setattr(type(engine), "unload", lambda self, *model: gone.append(model), raising=True)
        two.release()
        assert not gone, "the other device has its state in the same memory"
        two.come_back()
        assert len(states.made) == 2, "the engine decides what is there"
        on(two, batcher, two.name)
        assert len(states.made) == 3


def test_a_pool_that_scales_by_itself_loads_what_it_needs() -> None:
    states = States()
    with Pool(hosts(2), autoscale=Autoscale(keep=0.0)) as pool:
        batcher = pool.serve(add, initializer=states, max_batch=4)
        assert float(batcher(torch.zeros(1)).result(20)) == 1.0
        away = [name for name, one in pool.report()["devices"].items() if one["released"]]
        assert away or soon(lambda: any(one["released"] for one in pool.report()["devices"].values()))
        (name,) = pool._scale.away
        assert soon(lambda: name not in served_by(batcher)._states)
        assert pool.submit(lambda _: threading.current_thread().name, needs=name).result(20)
        assert f"paceline {name}" in states.made


def test_the_scaler_knows_how_long_a_load_takes_and_counts_on_devices_that_load(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    states = States()
    rows: list[Any] = []
    with box(monkeypatch, hosts(2)) as two:
        batcher = serve(two, states)
        two.release()
        two.come_back()
        decide = two.scale._scaler.decide

        def decides(given: Any, **tick: Any) -> Any:
            rows.append(given)
            return decide(given, **tick)

        two.scale._scaler = SimpleNamespace(decide=decides, desired=1, wait_seconds=0.0)
        two.look(lambda: rows)
        seconds = two.scale._models._seconds[two.name]
        assert [row[2] for row in rows[-1]] == [seconds] * 2, "the same for a device that has not loaded yet"
        two.release()
        two.look(lambda: not rows[-1][1][4])
        states.waits = threading.Event()
        two.want()
        two.look(lambda: rows[-1][1][4])
        assert two.name not in two.engine.active
        states.waits.set()
        assert float(batcher(torch.zeros(1)).result(20)) == 1.0
