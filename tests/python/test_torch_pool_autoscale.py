"""`Pool`: how many devices it needs, what-if, and devices that come and go by themselves."""

from __future__ import annotations

import gc
import math
import threading
import time
import weakref
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

from paceline import InvalidArgument
from paceline.torch import Autoscale, Pool
from paceline.torch._pool.autoscale import Scale
from pool_support import pool_of, soon
from torch_support import hosts


class Scripted:
    """An engine to which comes what a test says. All of its devices together do one unit of work a second."""

    def __init__(self, count: int) -> None:
        self.jobs_of: Any = None
        self.names = hosts(count)
        self.active = list(self.names)
        self.work, self.jobs, self.waiting, self.known, self.awaited = 0.0, 0.0, 0.0, True, [False] * count

    def scale_tick(self, _: float) -> tuple[Any, ...]:
        speeds = [1 / len(self.names)] * len(self.names)
        return 1.0, self.work, self.jobs, self.waiting, self.known, speeds, self.awaited

    def retire(self, name: str, unless_last: bool) -> bool:
        assert unless_last
        if self.active == [name]:
            return False
        self.active.remove(name)
        return True

    def restore(self, name: str) -> None:
        self.active.append(name)


class Known(SimpleNamespace):
    """Can be referred to weakly."""


def scripted(count: int, **options: Any) -> tuple[Scripted, Scale]:
    engine = Scripted(count)
    devices = [SimpleNamespace(name=name) for name in engine.names]
    jobs: Any = Known(engine=engine, devices=devices, ends=[])
    engine.jobs_of = jobs  # keeps it
    scale = Scale(jobs, Autoscale(**options))
    jobs.ends[0]()  # its thread; the test looks by itself
    return engine, scale


def looked(scale: Scale, times: int = 1) -> None:
    for _ in range(times):
        scale.look()


def test_devices_that_are_not_needed_are_released_and_come_back_at_once() -> None:
    engine, scale = scripted(4, keep=3.0)
    looked(scale, 2)
    assert len(engine.active) == 4, "none was idle for as long as its return costs"
    looked(scale, 8)
    assert len(engine.active) == 1
    assert scale.desired() == 1
    assert "3 devices" not in scale.explain()
    assert "are released; 1 device for a mean wait of 0.1 s" in scale.explain()
    engine.work, engine.jobs, engine.waiting = 0.9, 900.0, 5.0
    looked(scale)
    assert len(engine.active) == 4
    engine.work, engine.waiting = 2.0, 50.0  # twice what all do
    looked(scale, 100)
    assert 8 <= scale.desired() <= 12
    assert math.isinf(scale.wait_of((), ())["wait_seconds"])


def test_dear_devices_go_first() -> None:
    engine, scale = scripted(3, keep=0.0, prices={"host:0": 3.0, "host:1": 2.0})
    looked(scale, 3)
    assert engine.active == ["host:2"]


def test_what_only_released_devices_can_run_takes_them_back() -> None:
    engine, scale = scripted(4, keep=0.0)
    looked(scale, 3)
    engine.awaited[3] = True
    looked(scale)
    assert set(engine.active) == {"host:0", "host:3"} or set(engine.active) >= {"host:3"}
    engine.awaited[3] = False
    looked(scale, 2)
    assert len(engine.active) == 1
    engine.known = False
    looked(scale)
    assert len(engine.active) == 4, "nobody knows how long it takes"


def test_what_its_owner_retires_stays_retired() -> None:
    engine, scale = scripted(3, keep=0.0)
    looked(scale, 3)
    (left,) = engine.active
    out = next(name for name in engine.names if name != left)
    scale.owned(out)  # as Pool.retire says
    engine.work, engine.jobs, engine.waiting = 0.6, 600.0, 9.0
    looked(scale, 3)
    assert sorted(engine.active) == sorted({*engine.names} - {out})
    engine.restore(out)
    scale.owned(out)
    looked(scale)
    assert sorted(engine.active) == engine.names


def test_without_autoscale_it_is_a_hint() -> None:
    with pool_of(3) as pool:
        for job in [pool.submit(lambda _: 1) for _ in range(30)]:
            job.result(10)
        assert pool.report()["desired_devices"] == 1
        families = {one.name: one for one in pool.prometheus().collect()}
        assert families["paceline_pool_desired_devices"].samples[0].value == 1
        assert families["paceline_pool_active_devices"].samples[0].value == 3
        assert "autoscale" not in pool.explain()


def test_a_pool_releases_devices_and_jobs_that_need_them_run_all_the_same() -> None:
    with Pool(hosts(3), autoscale=Autoscale(keep=0.0)) as pool:
        assert soon(lambda: sum(one["retired"] for one in pool.report()["devices"].values()) == 2)
        assert "autoscale: " in pool.explain()
        names = [name for name, one in pool.report()["devices"].items() if one["retired"]]
        assert str(pool.submit(lambda device: device, needs=names[0]).result(20)) == "cpu"
        assert pool.submit(len, gang=3).result(20) == 3
        assert soon(lambda: sum(one["retired"] for one in pool.report()["devices"].values()) == 2)
        jobs = [pool.submit(lambda _: None, needs=name) for name in hosts(3)]
    assert all(job.done() and job.exception() is None for job in jobs)  # close() has waited for them


def test_the_thread_ends_with_the_pool() -> None:
    def threads() -> int:
        return sum(one.name == "paceline pool autoscale" for one in threading.enumerate())

    before = threads()
    pool = pool_of(1, autoscale=True)
    assert threads() == before + 1
    pool.close()
    assert soon(lambda: threads() == before)
    forgotten = pool_of(1, autoscale=True)
    known = weakref.ref(forgotten._scale)
    del forgotten
    gc.collect()
    assert soon(lambda: known() is None)
    assert soon(lambda: threads() == before)


def test_what_if_predicts_the_wait_of_other_devices() -> None:
    engine, scale = scripted(2)
    engine.work, engine.jobs = 0.6, 6.0
    looked(scale, 5)
    now, less = scale.wait_of((), ()), scale.wait_of(["host:1"], ())
    assert (now["devices"], less["devices"]) == (2, 1)
    assert now["busy"] == pytest.approx(0.6)
    assert less["busy"] == pytest.approx(1.2)
    assert math.isinf(less["wait_seconds"])
    assert 0 < now["wait_seconds"] < 1
    more = scale.wait_of((), ["host:0", 0.5])
    assert more["devices"] == 4
    assert more["busy"] == pytest.approx(0.6 / 1.75)
    assert more["wait_seconds"] < now["wait_seconds"]
    assert scale.wait_of(["host:0", "host:1"], ())["devices"] == 0
    with pytest.raises(InvalidArgument, match="remove has 'host:7'"):
        scale.wait_of(["host:7"], ())
    for wrong in ("host:7", 0.0, -1.0, math.inf):
        with pytest.raises(InvalidArgument, match="add has"):
            scale.wait_of((), [wrong])
    with pool_of(2) as pool:
        pool.submit(lambda _: time.sleep(0.01)).result(10)
        assert pool.what_if(remove=["host:1"], add=[1.0])["devices"] == 2


def test_wrong_arguments_are_refused() -> None:
    for wrong in ({"wait": 0.0}, {"keep": -1.0}, {"prices": {"host:0": 0.0}}, {"wait": "soon"}):
        with pytest.raises(InvalidArgument, match="Autoscale"):
            Autoscale(**wrong)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="prices of"):
        pool_of(1, autoscale=Autoscale(prices={"host:9": 1.0}))
    with pytest.raises(InvalidArgument, match="autoscale=3"):
        pool_of(1, autoscale=3)
