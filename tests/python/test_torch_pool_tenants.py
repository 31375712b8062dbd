"""Tenants of a `Pool`: turns, quotas, figures; and kinds that are forgotten."""

from __future__ import annotations

import asyncio
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from paceline import InvalidArgument, Rejected
from paceline.sim import replay_pool, what_if_pool
from paceline.torch import Pool, Tenant
from pool_support import Held, pool_of, soon
from torch_support import hosts
from versions_support import adds, ask, versions_of


def test_tenants_take_turns_by_weight_and_cost(tmp_path: Path) -> None:
    order: list[str] = []
    with pool_of(1, tenants={"b": 2}) as pool:
        pool.write_ledger(tmp_path / "pool.jsonl")
        with Held(pool):
            jobs = [pool.submit(lambda _: order.append("a"), tenant="a", kind="a") for _ in range(4)]
            jobs += [pool.submit(lambda _: order.append("b"), tenant="b", kind="b") for _ in range(4)]
            jobs += [pool.submit(lambda _: order.append("c"), tenant="c", cost=3, kind="c") for _ in range(2)]
            assert pool.report()["tenants"]["a"] == {"weight": 1, "served": 0, "waiting": 4, "devices": 0, "memory": 0}
            assert "b 4 wait, 0 served, weight 2; a 4 wait, 0 served, weight 1" in pool.explain()
        for job in jobs:
            job.result()
        assert "".join(order) == "abcbabbaac"
        served = {name: one["served"] for name, one in pool.report()["tenants"].items()}
        assert served == {"": 1, "a": 4, "b": 4, "c": 6}
    assert replay_pool(tmp_path / "pool.jsonl").mismatch is None
    assert what_if_pool(tmp_path / "pool.jsonl", "any").outcomes == {"completed": 11}


def test_without_names_nothing_is_said_of_tenants() -> None:
    with pool_of(1) as pool:
        pool.submit(lambda _: None, cost=5).result()
        assert pool.report()["tenants"] == {}
        assert "Tenants" not in pool.explain()


def test_requests_of_several_tenants_share_a_batch() -> None:
    sizes: list[int] = []

    def double(batch: torch.Tensor) -> torch.Tensor:
        sizes.append(len(batch))
        return 2 * batch

    async def ask(batcher: Any) -> torch.Tensor:
        answer: torch.Tensor = await batcher.ask(torch.tensor(4.0), tenant="b")
        return answer

    with pool_of(1) as pool:
        batcher = pool.serve(double, max_batch=4)
        with Held(pool):
            answers = [batcher(torch.tensor(float(k)), tenant="ab"[k % 2]) for k in range(4)]
        assert [answer.result().item() for answer in answers] == [0, 2, 4, 6]
        assert sizes == [4]
        assert asyncio.run(ask(batcher)).item() == 8
        assert [one.item() for one in batcher.map([torch.tensor(5.0)], tenant="a")] == [10]
        tenants = pool.report()["tenants"]
        assert (tenants["a"]["served"], tenants["b"]["served"]) == (3, 3)


def test_no_user_pays_for_copies_in_the_shadow_and_for_warming(tmp_path: Path) -> None:
    with pool_of(1, tenants={"a": 1}) as pool:
        pool.write_ledger(tmp_path / "pool.jsonl")
        batcher = pool.serve(adds(10), max_batch=4)
        ask(batcher, 1)[0].result()
        batcher.publish(adds(20), shadow=True)
        warmed = pool.report()["tenants"]["paceline"]["served"]
        with Held(pool):
            answers = ask(batcher, 4, tenant="a") + ask(batcher, 2)
        assert versions_of(answers) == {1: 6}
        assert soon(lambda: not pool._jobs.copies)
        served = {name: one["served"] for name, one in pool.report()["tenants"].items()}
        assert served == {"": 4, "a": 4, "paceline": warmed + 6}
        assert warmed > 0
    assert replay_pool(tmp_path / "pool.jsonl").mismatch is None


def test_what_a_quota_holds_does_not_hold_others() -> None:
    event = threading.Event()
    with pool_of(2, tenants={"a": Tenant(devices=1)}) as pool:
        running = pool.submit(lambda _: event.wait(20), tenant="a", kind="hold")
        waits = pool.submit(lambda _: None, tenant="a", kind="short")
        pool.submit(lambda _: None, tenant="b", kind="short").result()
        assert not waits.done()
        figures = pool.report()["tenants"]["a"]
        assert (figures["waiting"], figures["devices"]) == (1, 1)
        event.set()
        assert running.result()
        waits.result()


def test_a_job_beyond_the_quota_of_its_tenant_is_refused() -> None:
    with pool_of(2, tenants={"a": Tenant(devices=1, memory=8e9), "b": 1}) as pool:
        with pytest.raises(Rejected, match=r"quota of tenant .a. is 1, so it could never start\. Let it need less"):
            pool.submit(lambda _: None, tenant="a", gang=2).result()
        with pytest.raises(Rejected, match=r"needs 9e\+09 bytes at once, and the quota of tenant .a. is 8e\+09 bytes"):
            pool.try_submit(lambda _: None, tenant="a", memory=9e9)
        pool.submit(lambda _: None, tenant="b", gang=2, memory=9e9).result()
        pool.submit(lambda _: None, tenant="b", gang=2, cost=5).result()
        assert pool.report()["tenants"]["b"]["served"] == 2 + 5  # by default 1 for each device


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: Tenant(weight=0), "weight=0 must be"),
        (lambda: Tenant(weight=float("nan")), "weight=nan must be"),
        (lambda: Tenant(devices=0), "devices=0 must be"),
        (lambda: Tenant(devices=1.5), "devices=1.5 must be"),  # type: ignore[arg-type]
        (lambda: Tenant(memory=-1), "memory=-1 must be"),
        (lambda: Pool(hosts(1), tenants={"": 1}), "tenant='' must be a name"),
        (lambda: Pool(hosts(1), tenants={"a": "high"}), "weight='high' must be"),  # type: ignore[dict-item]
    ],
)
def test_tenants_that_cannot_be_are_refused(make: Any, text: str) -> None:
    with pytest.raises(InvalidArgument, match=text):
        make()


def test_wrong_arguments_of_jobs_are_refused() -> None:
    with pool_of(1) as pool:
        batcher = pool.serve(lambda batch: batch)
        with pytest.raises(InvalidArgument, match="tenant=3 must be a name"):
            pool.submit(lambda _: None, tenant=3)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match="cost=0 must be a number"):
            pool.submit(lambda _: None, cost=0)
        with pytest.raises(InvalidArgument, match=r"cost=2000000000000\.0 must be a number above 0, at most 1e12"):
            pool.submit(lambda _: None, cost=2e12)
        with pytest.raises(InvalidArgument, match="tenant='' must be a name"):
            batcher(torch.tensor(1.0), tenant="")


def test_a_kind_is_forgotten_once_nothing_of_it_waits(tmp_path: Path) -> None:
    with pool_of(1) as pool:
        pool.write_ledger(tmp_path / "pool.jsonl")
        engine = pool._jobs.engine
        with Held(pool):
            job = pool.submit(lambda _: 1, kind="old")
            assert not engine.forget("old")
        assert job.result() == 1
        assert engine.forget("old")
        assert engine.forget("hold")
        assert pool.submit(lambda _: 2, kind="new").result() == 2
        assert pool.submit(lambda _: 3, kind="old").result() == 3
    assert replay_pool(tmp_path / "pool.jsonl").mismatch is None
    assert what_if_pool(tmp_path / "pool.jsonl", "weighted").outcomes == {"completed": 4}
