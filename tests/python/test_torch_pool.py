"""`Pool`: independent jobs and batched requests on host devices."""

from __future__ import annotations

import asyncio
import concurrent.futures
import subprocess
import sys
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn

from paceline import Cancelled, DeviceGroup, Expired, InvalidArgument, Rejected, Unavailable
from paceline.torch import DataParallel, Pool
from torch_support import classifier, classify, gradients, hosts, plain, worst_difference


def pool_of(count: int = 2, **options: Any) -> Pool:
    return Pool(hosts(count), **options)


class Held:
    """A device that a job holds until the end of the block."""

    def __init__(self, pool: Pool, count: int = 1) -> None:
        self._pool, self._count, self._event = pool, count, threading.Event()

    def __enter__(self) -> Held:
        self.jobs = [self._pool.submit(lambda _: self._event.wait(20), kind="hold") for _ in range(self._count)]
        while self._pool.running < self._count:
            time.sleep(0.001)
        return self

    def __exit__(self, *_: object) -> None:
        self._event.set()


def test_a_job_runs_on_a_worker_and_its_future_says_where() -> None:
    with pool_of() as pool:
        job = pool.submit(lambda device, x, y: (device, x + y, threading.current_thread().name), 1, y=2)
        device, value, thread = job.result()
        assert (device, value) == (torch.device("cpu"), 3)
        assert thread != threading.current_thread().name
        assert job.device in hosts(2)
        assert job.seconds > 0
        assert f"{job.device}: 1 jobs in 1 runs" in pool.explain()
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


def test_state_of_a_job_does_not_reach_the_next_one() -> None:
    with pool_of(1) as pool:
        pool.submit(lambda _: (torch.set_grad_enabled(False), torch.set_num_threads(3))).result()
        assert pool.submit(lambda _: (torch.is_grad_enabled(), torch.get_num_threads())).result() == (True, 1)


def test_jobs_start_by_their_priority_and_deadline() -> None:
    order: list[str] = []
    with pool_of(1) as pool:
        with Held(pool):
            for name, options in {
                "background": {"priority": "background"},
                "batch": {"priority": "batch"},
                "normal": {},
                "soon": {"deadline": 0.9},
                "interactive": {"priority": "interactive"},
            }.items():
                pool.submit(lambda _, name=name: order.append(name), kind="work", **options)
        pool.close()
    assert order == ["interactive", "soon", "normal", "batch", "background"]


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
        first = pool.submit(lambda _: (time.sleep(0.02), order.append(1)))
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
        with Held(pool, 2):
            late = pool.submit(lambda _: None, deadline=0.02)
            time.sleep(0.05)
        with pytest.raises(Expired):
            late.result()


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


def test_a_job_may_submit_and_may_not_wait_for_its_own_pool() -> None:
    with pool_of(1) as pool:
        inner = pool.submit(lambda _: pool.submit(lambda _: 7)).result()
        assert inner.result() == 7
        with pytest.raises(InvalidArgument, match="on a worker"):
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


def test_close_cancels_what_waits_if_asked() -> None:
    pool = pool_of(1)
    with Held(pool):
        jobs = [pool.submit(lambda _: 1) for _ in range(5)]
        closing = threading.Thread(target=lambda: pool.close(cancel=True))
        closing.start()
        for job in jobs:
            with pytest.raises(Cancelled):
                job.result(10)
    closing.join(10)
    assert not closing.is_alive()


# Requests.


def test_requests_are_answered_in_batches_and_a_bad_one_fails_alone() -> None:
    sizes: list[int] = []

    def squares(x: torch.Tensor) -> torch.Tensor:
        sizes.append(len(x))
        if bool((x == 13).any()):
            raise ValueError("thirteen")
        return x**2

    with pool_of() as pool:
        batcher = pool.serve(squares, max_batch=8)
        with Held(pool, 2):
            answers = [batcher(torch.tensor(float(k))) for k in range(40)]
        for k, answer in enumerate(answers):
            if k == 13:
                with pytest.raises(ValueError, match="thirteen"):
                    answer.result()
            else:
                assert answer.result() == k**2
    assert 1 < max(sizes) <= 8


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        assert torch.is_inference_mode_enabled()
        return {"y": self.layer(batch["x"]), "n": batch["n"] + 1}


def test_a_module_answers_nests_and_shapes_do_not_mix() -> None:
    model = TwoHeads().eval()
    with pool_of() as pool:
        batcher = pool.serve(model)
        items = [{"x": torch.randn(*([2] * (k % 2)), 3), "n": torch.tensor(k)} for k in range(20)]
        answers = [batcher(item) for item in items]
        for item, answer in zip(items, answers, strict=True):
            found = answer.result()
            assert torch.allclose(found["y"], model.layer(item["x"]), atol=1e-6)
            assert found["n"] == item["n"] + 1
        with pytest.raises(InvalidArgument, match="training mode"):
            pool.serve(TwoHeads())
        with pytest.raises(InvalidArgument, match="has a str"):
            batcher({"x": "text", "n": torch.tensor(1)})
        with pytest.raises(InvalidArgument, match="dimension 0 is the request"):
            pool.serve(lambda x: x.sum())(torch.ones(3)).result()


def test_map_keeps_the_order_and_reads_few_items_ahead() -> None:
    read: list[int] = []

    def items() -> Any:
        for k in range(500):
            read.append(k)
            yield torch.tensor(k)

    with pool_of() as pool:
        answers = pool.serve(lambda x: 2 * x, max_batch=4).map(items())
        assert next(answers) == 0
        assert len(read) <= 3 * 4 * 2
        assert [int(one) for one in answers] == [2 * k for k in range(1, 500)]
        broken = pool.serve(lambda x: 1 / 0 * x, max_batch=4).map(items())
        with pytest.raises(ZeroDivisionError):
            next(broken)


def test_requests_may_be_awaited_and_cancelled() -> None:
    async def ask(pool: Pool) -> Any:
        batcher = pool.serve(lambda x: x + 1)
        assert [int(one) for one in await asyncio.gather(*(batcher.ask(torch.tensor(k)) for k in range(10)))] == list(
            range(1, 11)
        )
        with Held(pool):
            task = asyncio.create_task(batcher.ask(torch.tensor(1)))
            await asyncio.sleep(0.01)
            assert pool.waiting == 1
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            while pool.waiting:
                await asyncio.sleep(0.001)

    with pool_of(1) as pool:
        asyncio.run(ask(pool))


# With others.


def test_a_trainer_on_the_same_workers_keeps_its_gradients() -> None:
    module, batch = classifier(64)
    wanted = plain(module, classify, batch)[1]
    group = DeviceGroup(hosts(2))
    with Pool(group) as pool, DataParallel(module, group) as trainer:
        jobs = [pool.submit(lambda _: torch.randn(64, 64).mm(torch.randn(64, 64)).sum(), kind="work") for _ in range(8)]
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
    with pytest.raises(InvalidArgument, match="devices is 'gpu'"):
        Pool("gpu")
    with pool_of(1) as pool, pool_of(1) as other:
        for call, text in [
            (lambda: pool.submit(3), "not a function"),
            (lambda: pool.submit(print, priority="high"), "priority is 'high'"),
            (lambda: pool.submit(print, deadline=-1), "deadline"),
            (lambda: pool.submit(print, gang=0), "gang"),
            (lambda: pool.submit(print, after=[other.submit(lambda _: 1)]), "after="),
            (lambda: pool.serve(4), "not a module"),
            (lambda: pool.serve(print, max_batch=0), "max_batch"),
            (lambda: pool.retire("host:9"), "no device 'host:9'"),
        ]:
            with pytest.raises(InvalidArgument, match=text):
                call()  # type: ignore[no-untyped-call]


LEFT = """
import time
from paceline.torch import Pool
pool = Pool(["host:0"])
jobs = [pool.submit(lambda _: time.sleep(0.2)) for _ in range(5)]
print("ends")
"""


def test_a_program_ends_with_jobs_that_wait() -> None:
    done = subprocess.run([sys.executable, "-c", LEFT], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ends\n", "")
