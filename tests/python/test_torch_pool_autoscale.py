"""`Pool`: how many devices it needs, and devices that come and go by themselves."""

from __future__ import annotations

import gc
import math
import threading
import time
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from paceline import InvalidArgument, Rejected  # noqa: E402
from paceline.sim import replay_pool  # noqa: E402
from paceline.torch import Autoscale, Pool  # noqa: E402
from paceline.torch._pool import autoscale  # noqa: E402
from paceline.torch._pool.autoscale import Scale  # noqa: E402
from pool_support import pool_of, soon  # noqa: E402
from scale_support import Known, Scripted, looked, scripted  # noqa: E402
from torch_support import hosts  # noqa: E402


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


def test_what_few_devices_can_run_keeps_as_many_of_them() -> None:
    engine, scale = scripted(4, keep=0.0)
    looked(scale, 3)
    assert engine.active == ["host:0"]
    engine.covers = [([False, False, True, True], 1)]
    looked(scale, 2)
    assert engine.active == ["host:0", "host:2"]
    looked(scale, 5)
    assert "host:2" in engine.active
    scale.owned("host:2", out=True)
    engine.retire("host:2")
    looked(scale)
    assert "host:3" in engine.active, "the other one, since its owner has retired the first"
    engine.covers = [([True] * 4, 3)]  # a gang of three
    looked(scale, 3)
    assert sorted(engine.active) == ["host:0", "host:1", "host:3"]
    engine.covers, engine.known = [], False
    looked(scale)
    assert sorted(engine.active) == ["host:0", "host:1", "host:3"], "nobody knows how long it takes"
    engine.known = True
    looked(scale, 3)
    assert len(engine.active) == 1


def test_what_its_owner_retires_stays_retired() -> None:
    engine, scale = scripted(3, keep=0.0)
    looked(scale, 3)
    (left,) = engine.active
    out = next(name for name in engine.names if name != left)
    scale.owned(out, out=True)  # as Pool.retire says
    engine.work, engine.jobs, engine.waiting = 0.6, 600.0, 9.0
    looked(scale, 3)
    assert sorted(engine.active) == sorted({*engine.names} - {out})
    scale.owned(out, out=False)
    engine.restore(out)
    looked(scale)
    assert sorted(engine.active) == engine.names


def test_what_has_to_stay_counts_as_desired_and_costs_little() -> None:
    engine, scale = scripted(3, keep=0.0, prices={"host:1": 5.0})
    looked(scale, 3)
    engine.covers = [([False, True, True], 1)]
    looked(scale, 2)
    assert engine.active == ["host:0", "host:2"]
    assert scale.desired() == 2
    with pool_of(1, autoscale=True) as pool:
        with pytest.raises(InvalidArgument, match="host:9"):
            pool.retire("host:9")
        assert not pool._scale._out
    with pool_of(2, autoscale=Autoscale(keep=600.0)) as pool:
        pool.retire("host:1")
        assert not pool._jobs.engine.retire("host:1", True, True, 1.0)
        assert not pool.report()["devices"]["host:1"]["released"]


def test_its_owner_may_come_between_a_decision_and_what_follows() -> None:
    engine, scale = scripted(2, keep=0.0)

    def retires() -> None:  # the device that is just released, or taken back
        engine.acting = lambda: None
        scale.owned("host:1", out=True)
        if "host:1" in engine.active:
            engine.retire("host:1")

    looked(scale, 3)
    assert engine.active == ["host:0"]
    engine.work, engine.jobs, engine.waiting = 0.9, 900.0, 9.0
    engine.acting = retires
    looked(scale)
    assert engine.active == ["host:0"], "its owner has the last word"
    looked(scale, 3)
    assert engine.active == ["host:0"]


def test_its_owner_may_retire_a_device_that_is_just_released() -> None:
    engine, scale = scripted(2, keep=0.0)

    def retires() -> None:
        engine.acting = lambda: None
        scale.owned("host:1", out=True)

    engine.acting = retires
    looked(scale)
    engine.retire("host:1")
    assert engine.active == ["host:0"]
    assert "no device is released" in scale.explain()
    engine.work, engine.jobs, engine.waiting = 0.9, 900.0, 9.0
    looked(scale, 3)
    assert engine.restored == []


def test_a_device_that_its_owner_retires_before_it_comes_back_starts_nothing() -> None:
    engine, scale = scripted(2, keep=0.0)
    looked(scale, 3)
    assert engine.active == ["host:0"]

    def decides(*_: Any) -> list[tuple[str, bool]]:
        scale.owned("host:1", out=True)
        engine.retire("host:1")
        return [("host:1", True)]

    vars(scale)["_decide"] = decides
    looked(scale)
    assert engine.restored == []


def test_nothing_is_released_while_a_useless_device_is_retired() -> None:
    engine, scale = scripted(2, keep=0.0)
    looked(scale, 3)
    assert engine.active == ["host:0"]

    def looks() -> None:  # the other one is back, and not needed
        if engine.active == engine.names:
            engine.acting = lambda: None
            looked(scale)

    engine.acting = looks
    assert scale.retire_useless("host:0")
    assert engine.active == ["host:1"]


def test_a_load_ends_when_its_device_is_not_needed_any_more() -> None:
    engine, scale = scripted(2, keep=0.0)
    looked(scale, 3)
    assert engine.active == ["host:0"]
    scale._models.coming.add("host:1")
    looked(scale)
    assert scale._models.coming == set()


def test_a_device_that_could_not_be_loaded_comes_back_after_the_others() -> None:
    engine, scale = scripted(3, keep=0.0)
    looked(scale, 3)
    assert engine.active == ["host:0"]
    scale._models._failed["host:1"] = math.inf, 1.0
    engine.covers = [([False, True, True], 1)]
    looked(scale)
    assert engine.active == ["host:0", "host:2"]
    engine.covers = [([False, True, True], 2)]
    looked(scale)
    assert sorted(engine.active) == engine.names, "no other one is left"


def test_a_lost_device_does_not_come_back() -> None:
    engine, scale = scripted(2, keep=0.0)
    looked(scale, 3)
    engine.speeds, engine.lost = [1.0, 0.0], [False, True]
    engine.known = False
    looked(scale, 2)
    assert engine.active == ["host:0"]
    engine.known = True
    engine.work, engine.jobs, engine.waiting = 2.0, 900.0, 9.0
    looked(scale, 3)
    assert engine.active == ["host:0"]


def test_locks_of_users_are_not_met_while_it_holds_its_own() -> None:
    engine, scale = scripted(2, keep=0.0)
    told = []
    asks = threading.Thread(target=lambda: told.append(scale.desired()))

    def call() -> None:  # as a callback of a future that another thread's report() waits for
        engine.acting = lambda: None
        asks.start()
        asks.join(20)
        assert told

    engine.acting = call
    looked(scale, 3)
    assert engine.active == ["host:0"]


def test_batches_that_run_take_more_devices_and_batches_that_fill_do_not() -> None:
    engine, scale = scripted(8, keep=0.0, wait=0.1)
    engine.work, engine.jobs = 0.05, 100.0  # a twentieth of the box
    looked(scale, 50)
    few = scale.desired()
    engine.filling = 3.0
    looked(scale, 50)
    assert scale.desired() == few
    assert scale.wait_of((), ())["wait_seconds"] == 3.0
    assert "3 s predicted" in scale.explain()
    engine.filling, engine.runs = 0.0, (1.0, 0.05, 0.05**2)  # in batches of a hundred
    looked(scale, 100)
    assert scale.desired() > few
    assert scale.wait_of((), ())["wait_seconds"] < 0.1


def test_without_autoscale_it_is_a_hint() -> None:
    engine = Scripted(3)
    devices = [SimpleNamespace(name=name) for name in engine.names]
    jobs: Any = Known(engine=engine, devices=devices, ends=[], seats={}, keeps_models=False)
    scale = Scale(jobs, False)
    for _ in range(20):
        assert 1 <= scale.desired() <= 3
    assert scale.desired() == 1
    assert engine.active == engine.names
    engine.work, engine.jobs = 5.0, 500.0
    for _ in range(100):
        scale.desired()
    assert scale.desired() > 10
    assert scale.explain() == ""
    with pool_of(2) as pool:
        families = {one.name: one for one in pool.prometheus().collect()}
        assert 1 <= families["paceline_pool_desired_devices"].samples[0].value <= 2
        assert pool.report()["desired_devices"] >= 1
        assert "autoscale" not in pool.explain()


def test_a_device_that_cannot_be_prepared_brings_back_the_others() -> None:
    with Pool(hosts(2), autoscale=Autoscale(keep=0.0)) as pool:
        assert soon(lambda: sum(one["retired"] for one in pool.report()["devices"].values()) == 1)
        (left,) = [name for name, one in pool.report()["devices"].items() if not one["retired"]]
        (released,) = [name for name, one in pool.report()["devices"].items() if one["released"]]
        assert released != left
        assert "; released" in next(line for line in pool.explain().splitlines() if line.startswith(f"{released}: "))
        assert "; retired" not in pool.explain()

        def state(_: Any) -> Any:
            if threading.current_thread() is first[0]:
                raise RuntimeError("not here")
            return torch.ones(1)

        first = [pool.submit(lambda _: threading.current_thread(), needs=left).result(20)]
        served = pool.serve(lambda one, batch: batch + one, initializer=state, max_batch=1)
        with pytest.warns(RuntimeWarning, match="is lost to the pool"):
            assert float(served(torch.zeros(1)).result(20)) == 1.0


def test_a_pool_releases_devices_and_jobs_that_need_them_run_all_the_same() -> None:
    def retired() -> list[str]:
        return [name for name, one in pool.report()["devices"].items() if one["retired"]]

    with Pool(hosts(3), autoscale=Autoscale(keep=0.0)) as pool:
        assert soon(lambda: len(retired()) == 2)
        assert "autoscale: " in pool.explain()
        assert str(pool.submit(lambda device: device, needs=retired()[0]).result(20)) == "cpu"
        assert pool.submit(len, gang=3).result(20) == 3
        assert soon(lambda: len(retired()) == 2)
        pool.retire(retired()[0])
        assert pool.submit(len, gang=2).result(20) == 2
        jobs = [pool.submit(lambda _: None, needs=name) for name in hosts(3) if name not in pool._scale._out]
    assert all(job.done() and job.exception() is None for job in jobs)  # close() has waited for them


@contextmanager
def only_woken(monkeypatch: pytest.MonkeyPatch, activation: float, ledger: Path) -> Iterator[Pool]:
    """One of two devices is released, and a job holds the other one. Nothing but the engine wakes the scaler."""
    monkeypatch.setattr(autoscale, "_TICK", 600.0)
    with Pool(hosts(2), autoscale=Autoscale(keep=600.0)) as pool:
        pool.write_ledger(ledger)
        for name in hosts(2) * 4:
            pool.submit(lambda _: time.sleep(0.05), kind="short", needs=name).result(20)
        assert pool._jobs.engine.retire("host:1", True, True, activation)
        pool._scale.released.add("host:1")
        begun, over = threading.Event(), threading.Event()

        def holds(_: object) -> None:
            begun.set()
            over.wait(60)

        held = pool.submit(holds, kind="long")
        assert begun.wait(20)
        try:
            yield pool
            assert held.running()
        finally:
            over.set()
    assert replay_pool(ledger).mismatch is None


def test_a_job_whose_deadline_only_a_released_device_keeps_brings_it_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with only_woken(monkeypatch, 1.0, tmp_path / "ledger.jsonl") as pool:
        with pytest.raises(Rejected, match="no released device is back in time"):
            pool.submit(lambda _: None, kind="short", deadline=0.5, needs="host:1").result(20)
        assert pool.report()["devices"]["host:1"]["released"]
        assert str(pool.submit(lambda device: device, kind="short", deadline=40.0, needs="host:1").result(30)) == "cpu"
        assert not pool.report()["devices"]["host:1"]["released"]
    assert any('"activation_seconds": 1' in line for line in (tmp_path / "ledger.jsonl").read_text().splitlines())


def test_a_burst_brings_a_released_device_back_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with only_woken(monkeypatch, 0.0, tmp_path / "ledger.jsonl") as pool:
        burst = [pool.submit(lambda _: None, kind="short") for _ in range(8)]  # of 0.05 s each, by what is known
        assert all(job.result(20) is None for job in burst)


def test_the_thread_ends_with_the_pool() -> None:
    def threads() -> int:
        return sum(one.name == "paceline pool autoscale" for one in threading.enumerate())

    assert soon(lambda: threads() == 0)
    before = 0
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


def test_wrong_arguments_are_refused() -> None:
    for wrong in ({"wait": 0.0}, {"keep": -1.0}, {"prices": {"host:0": 0.0}}, {"wait": "soon"}):
        with pytest.raises(InvalidArgument, match="Autoscale"):
            Autoscale(**wrong)
    with pytest.raises(InvalidArgument, match="must be a dictionary by name"):
        Autoscale(prices=[1.0])  # type: ignore[arg-type]
    with pytest.raises(InvalidArgument, match="prices of"):
        pool_of(1, autoscale=Autoscale(prices={"host:9": 1.0}))
    with pool_of(1, autoscale=Autoscale(prices=None)) as pool:  # type: ignore[arg-type]
        assert pool.report()["desired_devices"] == 1
    with pytest.raises(InvalidArgument, match="autoscale=3"):
        pool_of(1, autoscale=3)
