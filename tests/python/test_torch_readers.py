"""Any thread may read figures, write pages and look while others train, serve, or add devices."""

from __future__ import annotations

import itertools
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch
from torch import nn

from paceline._files import write_whole
from paceline._page.pool import Run
from paceline.torch import Pipeline
from paceline.torch._batch.global_sampler import GlobalBatchSampler
from paceline.torch._pipeline.loop import PipelineLoop
from paceline.torch._trainer.recent_steps import RecentSteps
from paceline.torch._trainer.shard_pieces import Owner
from paceline.torch._trainer.shards import Shards
from pool_support import pool_of
from torch_support import TWO


def read_beside(work: Callable[[], object], read: Callable[[], object], count: int = 1000) -> None:
    """Read so many times while another thread does its work again and again. Threads switch as often as they can."""
    over, interval = threading.Event(), sys.getswitchinterval()

    def go_on() -> None:
        while not over.is_set():
            work()

    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(1) as threads:
            working = threads.submit(go_on)
            try:
                for _ in range(count):
                    read()
            finally:
                over.set()
        working.result()
    finally:
        sys.setswitchinterval(interval)


def test_an_error_beside_a_reader_is_raised() -> None:
    begun = threading.Event()

    def fail() -> None:
        begun.set()
        raise ArithmeticError

    with pytest.raises(ArithmeticError):
        read_beside(fail, begun.wait, 1)


def test_two_threads_may_write_one_file(tmp_path: Path) -> None:
    def write() -> None:
        write_whole(tmp_path / "page.html", "page" * 1000)

    read_beside(write, write, 300)
    assert (tmp_path / "page.html").read_text() == "page" * 1000
    assert len(list(tmp_path.iterdir())) == 1


class _Outcome:
    """Of a step whose times are known. GPUs have done it."""

    settled = True
    started, claims, reduce_seconds, move = 1.0, [(0, 0, 4, 0.0, 1.0, False, False)], 0.0, None


class _Execution:
    steps, failed_on = 0, None


def test_a_thread_that_reads_times_does_not_disturb_steps_on_gpus() -> None:
    recent = RecentSteps(on_gpu=True)
    execution: Any = _Execution()
    outcome: Any = _Outcome()

    def step() -> None:
        with recent.step("step", execution) as one:
            one.outcome = outcome

    read_beside(recent.settle, step, 3000)
    assert len(recent.steps) == 8
    recent.settle()
    assert all(step.outcome is None and step.known is step.times is not None for step in recent.steps)


def test_times_that_are_read_are_known_all_the_time() -> None:
    recent = RecentSteps(on_gpu=True)
    seen: list[Any] = []

    class Slow(_Outcome):
        @property
        def started(self) -> float:  # type: ignore[override]
            """Others look while it is read."""
            seen.append(recent.steps[0].known)
            return 1.0

    execution: Any = _Execution()
    with recent.step("step", execution) as one:
        slow: Any = Slow()
        one.outcome = slow
    recent.settle()
    assert seen == [slow]
    assert recent.steps[0].times is not None


def test_states_of_sharded_optimizers_may_grow_while_another_thread_reads() -> None:
    owner = Owner(0, 0, at_home=True, groups=[])

    class Grows(torch.Tensor):
        def element_size(self) -> int:
            """Another thread steps meanwhile, for the first time."""
            owner.state[torch.zeros(1)]["step"] = torch.zeros(1)
            values["exp_avg"] = torch.zeros(1)
            return 4

    values: dict[str, Any] = {"step": torch.zeros(2).as_subclass(Grows)}
    owner.state[torch.zeros(2)] = values
    shards: Any = object.__new__(Shards)
    shards._owners = [owner]
    assert shards._held() == {0: 8}


def test_shares_of_ranks_are_there_while_they_change() -> None:
    sampler = GlobalBatchSampler(100, 10, ranks=2)

    def shares() -> Iterator[int]:
        """Another thread reads meanwhile."""
        assert sampler.shares == (5, 5)
        yield from (4, 6)

    given: Any = shares()
    sampler.follow(0, 1, given)
    assert sampler.shares == (4, 6)


def test_a_pipeline_may_lose_its_last_step_while_another_thread_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    x = torch.randn(8, 4)
    with Pipeline(module, TWO, memory=1e9) as trainer:
        trainer.step(lambda module, batch: module(batch).square().mean(), x)
        loop: Any = trainer._works.steps.step_loop
        # As after a step whose times a lost GPU does not give.
        lasts = itertools.cycle([loop.last, None])
        monkeypatch.setattr(PipelineLoop, "last", property(lambda _: next(lasts), lambda *_: None), raising=False)
        for _ in range(2):
            report = trainer.report()
            assert report["memory"].keys() == {*TWO}
            next(lasts)


def test_models_may_be_served_while_another_thread_reads() -> None:
    with pool_of() as pool:
        kept: deque[Any] = deque(maxlen=100)

        def serve() -> None:
            kept.append(pool.serve(torch.neg))

        serve()
        read_beside(serve, lambda: pool._jobs.keeps_models and pytest.fail("a function keeps nothing"), 20000)


def test_a_device_that_is_just_added_can_be_looked_at(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pool_of(1) as pool:
        figures, looks = pool._jobs.figures, []
        add = figures.add

        def added(device: str) -> None:
            add(device)
            looks.append(pool._jobs.look())
            figures.runs.add(Run(["host:1"], "job", 1.0, 2.0, 1, 0.0, "completed"))
            pool.trace(tmp_path / "trace.json")
            pool.page(tmp_path / "page.html")

        monkeypatch.setattr(figures, "add", added)
        pool.add("host:1")
        assert looks[0]["devices"].keys() == {"host:0", "host:1"}
    assert "host:1" in (tmp_path / "trace.json").read_text()
    assert "host:1" in (tmp_path / "page.html").read_text()


def test_a_new_kind_of_request_may_come_while_its_version_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    with pool_of(1) as pool:
        batcher = pool.serve(torch.neg)
        for size in (1, 2):
            batcher(torch.zeros(size)).result()
        first = batcher._versions._state.live
        forget = pool._jobs.engine.forget

        def forgets(kind: str) -> bool:
            first._kinds[object()] = "of a request that has just found its version"
            return forget(kind)

        monkeypatch.setattr(pool._jobs.engine, "forget", forgets)
        batcher.publish(torch.abs)
        batcher.publish(torch.neg)  # the first one goes
