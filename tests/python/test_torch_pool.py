"""`Pool`: independent jobs on host devices."""

from __future__ import annotations

import concurrent.futures
import functools
import threading
import time
import traceback
import types
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from paceline import (
    Cancelled,
    DeviceGroup,
    DeviceLost,
    Expired,
    InvalidArgument,
    Rejected,
    Unavailable,
    devices,
)
from paceline.torch import DataParallel, Pool, PoolFuture
from pool_support import Held, pool_of
from torch_support import classifier, classify, gradients, hosts, plain, worst_difference


def test_a_job_runs_on_a_worker_and_its_future_says_where() -> None:
    with pool_of() as pool:
        job = pool.submit(lambda device, x, y: (device, x + y, threading.current_thread().name), 1, y=2)
        device, value, thread = job.result()
        assert (device, value) == (torch.device("cpu"), 3)
        assert thread != threading.current_thread().name
        assert job.device in hosts(2)
        assert job.seconds > 0
        assert f"{job.device}: 1 job in 1 run, " in pool.explain()
    with pytest.raises(Unavailable, match="closed"):
        pool.submit(lambda _: None)


def test_a_job_raises_its_own_error_and_others_go_on() -> None:
    def bad(device: torch.device) -> None:
        raise KeyError("no such row")

    with pool_of() as pool:
        failed, good = pool.submit(bad), pool.submit(lambda _: 1)
        with pytest.raises(KeyError, match="no such row") as caught:
            failed.result()
        assert any(entry.name == "bad" for entry in caught.traceback)
        assert good.result() == 1
        assert isinstance(failed.exception(), KeyError)


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), MemoryError("no"), DeviceLost("x")]
)
def test_whatever_a_job_raises_reaches_the_caller_and_the_pool_goes_on(error: BaseException) -> None:
    ran: list[int] = []

    def bad(_: torch.device) -> None:
        ran.append(1)
        raise error

    with pool_of() as pool:
        with pytest.raises(type(error)) as caught:
            pool.submit(bad).result()
        assert caught.value is error
        assert ran == [1]
        assert pool.submit(lambda _: 1, kind="other").result() == 1


def test_the_traceback_of_a_job_names_its_line_and_keeps_neither_arguments_nor_the_pool() -> None:
    class Argument:
        pass

    def bad(_: torch.device, one: Argument) -> None:
        del one
        raise ValueError("here")

    with pool_of(1) as pool:
        argument = Argument()
        gone = weakref.ref(argument)
        job = pool.submit(bad, argument)
        del argument
        error = job.exception()
        assert "in bad" in "".join(traceback.format_exception(error))
        for _ in range(1000):  # the worker lets go of the job right after it has told how it ended
            if gone() is None:
                break
            time.sleep(0.001)
        assert gone() is None


def test_futures_are_those_of_the_standard_library() -> None:
    with pool_of() as pool:
        with Held(pool, 2) as held:
            assert held.jobs[0].running()
            jobs = [pool.submit(lambda _, k=k: k) for k in range(5)]
            assert not any(job.running() or job.done() for job in jobs)
            done, _ = concurrent.futures.wait([*held.jobs, *jobs], timeout=0)
            assert done == set()
            with pytest.raises(concurrent.futures.TimeoutError):
                jobs[0].result(timeout=0.001)
        assert sorted(job.result() for job in concurrent.futures.as_completed(jobs)) == [0, 1, 2, 3, 4]
        assert not jobs[0].running()


def test_a_partial_has_the_kind_of_its_function_and_passes_arguments_with_names_of_options() -> None:
    def job(device: torch.device, *, priority: int) -> int:
        return priority

    with pool_of(1) as pool:
        assert pool.submit(functools.partial(job, priority=7), priority="batch").result() == 7


def test_state_of_a_job_does_not_reach_the_next_one() -> None:
    with pool_of(1) as pool:
        pool.submit(lambda _: torch.set_grad_enabled(False)).result()
        pool.submit(lambda _: torch.set_num_threads(3)).result()
        assert pool.submit(lambda _: (torch.is_grad_enabled(), torch.get_num_threads())).result() == (True, 1)


def test_jobs_start_by_their_priority_and_deadline() -> None:
    order: list[str] = []
    with pool_of(1) as pool:
        with Held(pool):
            given: dict[str, dict[str, Any]] = {
                "background": {"priority": "background"},
                "batch": {"priority": "batch"},
                "soon": {"deadline": 30.0},
                "normal": {},
                "interactive": {"priority": "interactive"},
            }
            for name, options in given.items():
                pool.submit(lambda _, name=name: order.append(name), kind="work", **options)
        pool.close()
    assert order == ["interactive", "normal", "soon", "batch", "background"]


def test_jobs_are_cancelled_until_they_run() -> None:
    with pool_of(1) as pool:
        with Held(pool) as held:
            waits = pool.submit(lambda _: 1)
            follows = pool.submit(lambda _: 1, after=[waits])
            assert not held.jobs[0].cancel()
            assert waits.cancel()
            assert waits.cancelled()
            assert waits.cancel()
            with pytest.raises(concurrent.futures.CancelledError):
                waits.result()
            with pytest.raises(Cancelled, match="comes after"):
                follows.result()
        assert held.jobs[0].result()
        assert not held.jobs[0].cancel()


def test_dependencies_needs_gangs_and_times() -> None:
    with pool_of() as pool:
        order: list[int] = []

        def slowly(_: torch.device) -> None:
            time.sleep(0.02)
            order.append(1)

        first = pool.submit(slowly)
        second = pool.submit(lambda _: order.append(2), after=[first])
        second.result()
        assert order == [1, 2]
        assert pool.submit(lambda devices: len(devices), gang=2).result() == 2
        with pytest.raises(Rejected, match="too few devices"):
            pool.submit(lambda devices: None, gang=3).result()
        for name in hosts(2):
            job = pool.submit(lambda _: None, needs=name)
            job.result()
            assert job.device == name
        with pytest.raises(Rejected, match="too few devices"):
            pool.submit(lambda _: None, needs=["cuda"]).result()
        begin = time.monotonic()
        pool.submit(lambda _: None, not_before=0.05).result()
        assert time.monotonic() - begin >= 0.049
        for _ in range(4):
            pool.submit(lambda _: time.sleep(0.03), kind="slow").result()
        with pytest.raises(Rejected, match="deadline"):
            pool.submit(lambda _: None, kind="slow", deadline=0.001).result()
        with Held(pool, 2) as held:
            with pytest.raises(Expired):
                pool.submit(lambda _: None, deadline=0.02).result(20)
            assert not any(job.done() for job in held.jobs)


def test_a_full_queue_lets_submit_wait_or_rejects() -> None:
    with pool_of(1) as pool:
        with Held(pool):
            jobs = [pool.submit(lambda _: 1, kind="work") for _ in range(8)]
            with pytest.raises(Rejected, match="queue"):
                pool.submit(lambda _: 1, kind="work", wait=False).result()
            thread = threading.Thread(target=lambda: jobs.append(pool.submit(lambda _: 2, kind="work")))
            thread.start()
            time.sleep(0.03)
            assert thread.is_alive()
        thread.join(10)
        assert [job.result() for job in jobs] == [1] * 8 + [2]


def test_try_submit_raises_where_submit_would_wait_or_the_job_is_not_taken() -> None:
    with pool_of(1) as pool:
        with Held(pool):
            jobs = [pool.try_submit(lambda _: 1, kind="work") for _ in range(8)]
            with pytest.raises(Rejected, match="queue"):
                pool.try_submit(lambda _: 1, kind="work")
        assert [job.result() for job in jobs] == [1] * 8
        with pytest.raises(Rejected, match="too few devices"):
            pool.try_submit(lambda _: 1, gang=2)
        with pytest.raises(ZeroDivisionError):
            pool.try_submit(lambda _: 1 / 0).result()


def test_a_job_may_submit_and_may_not_wait_for_its_own_pool() -> None:
    with pool_of(1) as pool:
        inner = pool.submit(lambda _: pool.submit(lambda _: 7)).result()
        assert inner.result() == 7
        with pytest.raises(InvalidArgument, match="waits for a job of a pool"):
            pool.submit(lambda _: pool.submit(lambda _: 7).result()).result()
        told: list[int] = []
        pool.submit(lambda _: 5).add_done_callback(lambda one: told.append(one.result()))
        pool.close()
        assert told == [5]


def test_retired_devices_start_nothing() -> None:
    with pool_of() as pool:
        pool.retire("host:0")
        jobs = [pool.submit(lambda _: None) for _ in range(10)]
        for job in jobs:
            job.result()
        assert {job.device for job in jobs} == {"host:1"}
        pool.restore("host:0")
        pool.retire("host:1")
        job = pool.submit(lambda _: None)
        job.result()
        assert job.device == "host:0"


def test_a_trainer_on_the_same_workers_keeps_its_gradients() -> None:
    module, batch = classifier(64)
    wanted = plain(module, classify, batch)[1]
    group = DeviceGroup(hosts(2))
    with Pool(group) as pool, DataParallel(module, group) as trainer:
        jobs: list[PoolFuture[Any]] = []
        jobs += [pool.submit(lambda _: torch.ones(64, 64).mm(torch.ones(64, 64)).sum(), kind="work") for _ in range(8)]
        for _ in range(10):
            module.zero_grad()
            trainer.step(classify, batch)
            jobs.append(pool.submit(lambda _: time.sleep(0.001), kind="sleep"))
        assert worst_difference(gradients(module), wanted) < 1e-12
        for job in jobs:
            job.result()


def test_arguments_are_checked() -> None:
    with pytest.raises(InvalidArgument, match="round_robin"):
        pool_of(placement="fastest")
    with pytest.raises(InvalidArgument, match="'gpu' is not the name of a device"):
        Pool("gpu")
    with pytest.raises(InvalidArgument, match="budget is 2"):
        pool_of(budget=2.0)
    pool: Any
    with pool_of(1) as pool, pool_of(1) as other:
        for call, text in [
            (lambda: pool.submit(3), "not a function"),
            (lambda: pool.submit(print, priority="high"), "priority is 'high'"),
            (lambda: pool.submit(print, deadline=-1), "deadline"),
            (lambda: pool.submit(print, gang=0), "gang"),
            (lambda: pool.submit(print, after=[other.submit(lambda _: 1)]), "after="),
            (lambda: pool.submit(print, after=[concurrent.futures.Future()]), "after="),
            (lambda: pool.serve(4), "not a module"),
            (lambda: pool.serve(print, max_batch=0), "max_batch"),
            (lambda: pool.retire("host:9"), "no device 'host:9'"),
        ]:
            with pytest.raises(InvalidArgument, match=text):
                call()  # type: ignore[no-untyped-call]


def test_a_pool_of_a_trainer_runs_on_the_workers_of_its_devices() -> None:
    with DataParallel(nn.Linear(6, 3), hosts(2)) as trainer:
        names: set[str] = set()

        def loss_fn(module: nn.Module, batch: torch.Tensor) -> Any:
            names.add(threading.current_thread().name)
            return module(batch).square().mean()

        with Pool(trainer) as pool:
            assert [one.name for one in pool.devices] == hosts(2)
            for _ in range(3):
                trainer.step(loss_fn, torch.randn(8, 6))
            found = {pool.submit(lambda _: threading.current_thread().name, needs=name).result() for name in hosts(2)}
        assert names <= found
        assert len(found) == 2
        trainer.step(loss_fn, torch.randn(8, 6))  # closing the pool leaves the workers to the trainer
        with Pool(trainer) as pool:
            trainer.close()
            assert pool.submit(lambda _: 1).result() == 1
            assert pool.report()["devices"].keys() == set(hosts(2))


@pytest.mark.parametrize("budget", [0.1, 0.0])
def test_an_interactive_job_waits_for_a_micro_batch_of_a_step_and_not_for_the_step(budget: float) -> None:
    order: list[Any] = []

    def loss_fn(module: nn.Module, batch: torch.Tensor) -> Any:
        if order == ["begin"]:
            pool.submit(order.append, priority="interactive", kind="work")
        order.append("micro-batch")
        time.sleep(0.002)
        return module(batch).square().mean()

    with DataParallel(nn.Linear(6, 3), hosts(1), micro_batch=1) as trainer:
        with Pool(trainer, budget=budget) as pool:
            for _ in range(2):
                trainer.step(loss_fn, torch.randn(80, 6))
            order[:] = ["begin"]
            trainer.step(loss_fn, torch.randn(80, 6))
        assert order.count("micro-batch") == 80
        ran = order.index(torch.device("cpu"))
        assert ran < 40 if budget else ran > 70, order
        assert ("beside steps" in pool.explain()) == bool(budget)


def test_figures_count_what_ran_and_how_it_ended() -> None:
    with pool_of() as pool:
        with Held(pool, 2):
            jobs = [pool.submit(lambda _: None, kind="work") for _ in range(3)]
            jobs[0].cancel()
            report = pool.report()
            assert (report["waiting"], report["running"]) == (2, 2)
        with pytest.raises(ZeroDivisionError):
            pool.submit(lambda _: 1 / 0).result()
        with pytest.raises(Rejected):
            pool.submit(lambda _: 1, gang=3).result()
        pool.retire("host:1")
        pool.close()
        report = pool.report()
        assert report["outcomes"] == {"completed": 4, "failed": 1, "rejected": 1, "expired": 0, "cancelled": 1}
        assert report["wait_counts"][-1] == (float("inf"), 5)
        counts = [count for _, count in report["wait_counts"]]
        assert counts == sorted(counts)
        devices = report["devices"]
        assert sum(one["jobs"] for one in devices.values()) == sum(one["runs"] for one in devices.values()) == 4
        assert all(one["busy_seconds"] > 0 for one in devices.values())
        assert [one["retired"] for one in devices.values()] == [False, True]
        assert repr(pool) == "<paceline.torch.Pool [host:0, host:1], closed>"


def test_without_a_gpu_a_pool_has_the_host_devices_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = types.SimpleNamespace(name="cuda:9", kind="cuda")
    found = [one for one in devices() if one.kind == "host"]
    monkeypatch.setattr("paceline.torch._pool.groups.all_devices", lambda: found)
    with pytest.raises(InvalidArgument, match="there is no 'cuda' device here"):
        Pool(["cuda"])
    pools = [Pool(), Pool("host"), Pool(["host"])]
    monkeypatch.setattr("paceline.torch._pool.groups.all_devices", lambda: [gpu, *found])
    pools.append(Pool("host"))
    with pytest.raises(InvalidArgument, match="cuda:9"):
        Pool()
    for pool in pools:
        with pool:
            assert [one.name for one in pool.devices] == [one.name for one in found]
            assert pool.submit(lambda _: 1).result() == 1
