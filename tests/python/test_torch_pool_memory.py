"""`Pool`: what jobs need of a device, memory above all."""

from __future__ import annotations

import contextlib
import threading
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from paceline import InvalidArgument, OutOfMemory, Rejected
from paceline.torch import Pool
from paceline.torch._pool import answerer, served
from paceline.torch._pool.job import DONE
from pool_support import Held, pool_of, served_by
from torch_support import hosts


def test_jobs_run_where_their_memory_fits_and_are_rejected_where_it_does_not() -> None:
    with pool_of(memory={"host:0": 1e9, "host:1": 4e9}) as pool:
        jobs = [pool.submit(lambda _: None, memory=2e9) for _ in range(6)]
        for job in jobs:
            job.result()
        assert {job.device for job in jobs} == {"host:1"}
        with pytest.raises(Rejected, match=r"too few devices.*with 5e\+09 bytes for it.*host:0 \(host, 1e\+09 bytes\)"):
            pool.submit(lambda _: None, memory=5e9).result()
        with pytest.raises(Rejected, match="It needs 2 at once, with 2e"):
            pool.submit(lambda _: None, memory=2e9, gang=2).result()
        assert pool.submit(lambda places: len(places), memory=5e8, gang=2).result() == 2
        assert pool.submit(lambda _: 1).result() == 1


def test_batches_are_no_larger_than_fits() -> None:
    sizes: list[tuple[str, int]] = []

    def answer(x: torch.Tensor) -> torch.Tensor:
        sizes.append((threading.current_thread().name, len(x)))
        time.sleep(0.002)
        return x

    with pool_of(memory={"host:0": 100, "host:1": 399}) as pool:
        small = pool.submit(lambda _: threading.current_thread().name, needs="host:0").result()
        batcher = pool.serve(answer, max_batch=16, memory=50)
        with Held(pool, 2):
            answers = [batcher(torch.tensor(k)) for k in range(40)]
        assert [int(one.result()) for one in answers] == list(range(40))
        with pytest.raises(Rejected, match="have the memory"):
            pool.serve(answer, memory=400)(torch.tensor(1)).result()
    assert max(size for name, size in sizes if name == small) <= 2
    assert 2 < max(size for name, size in sizes if name != small) <= 7


def test_states_are_dropped_when_the_memory_is_needed_and_made_again() -> None:
    made: list[str] = []
    alive: set[str] = set()

    class State:
        def __init__(self, name: str) -> None:
            self.name = name
            made.append(name)
            alive.add(name)
            assert len(alive) <= 2, alive

        def __del__(self) -> None:
            alive.discard(self.name)

    def served(pool: Pool, name: str, **options: Any) -> Any:
        return pool.serve(
            lambda state, x: x + len(state.name), initializer=lambda _: State(name), resident=100, **options
        )

    with pool_of(1, memory={"host:0": 250}) as pool:
        batchers = {name: served(pool, name) for name in ("a", "bb", "ccc")}
        for name in ("a", "bb", "a", "bb", "ccc", "a", "ccc", "bb"):
            assert batchers[name](torch.tensor(1)).result() == 1 + len(name)
        assert made[:3] == ["a", "bb", "ccc"]
        assert 4 <= len(made) < 8  # two of them fit
        assert pool.submit(lambda _: len(alive), memory=160).result() == 0
        assert pool.submit(lambda _: len(alive), memory=50).result() == 0
        assert batchers["a"](torch.tensor(1)).result() == 2
        with pytest.raises(Rejected):
            served(pool, "dddd", memory=151)(torch.tensor(1)).result()


def test_a_run_that_is_taken_back_leaves_its_evictions_to_the_next_one() -> None:
    with pool_of(1, memory={"host:0": 100}) as pool:
        batcher = pool.serve(lambda state, x: x + state[0], initializer=lambda _: [1], resident=80)
        assert batcher(torch.tensor(1)).result() == 2
        kept = served_by(batcher)
        assert list(kept._states) == ["host:0"]
        for _ in range(50):  # some are cancelled after they were started and before the worker has begun
            pool.submit(lambda _: None, memory=90).cancel()
        assert pool.submit(lambda _: len(kept._states), memory=90).result() == 0
        assert batcher(torch.tensor(1)).result() == 2


def test_what_loads_a_state_does_not_count_for_the_speed_of_its_device() -> None:
    def initializer(_: torch.device) -> int:
        time.sleep(1.0)
        return 1

    with pool_of(1) as pool:
        batcher = pool.serve(lambda state, x: x + state, initializer=initializer, resident=1)
        for _ in range(3):
            batcher(torch.tensor(1)).result()
        assert batcher(torch.tensor(1), deadline=0.35).result() == 2


@pytest.mark.parametrize(
    "error",
    [MemoryError("no"), OutOfMemory("no"), torch.OutOfMemoryError("no"), "DefaultCPUAllocator: can't allocate memory"],
)
def test_out_of_memory_in_a_batch_halves_the_device_s_batches_and_all_are_answered(error: Any) -> None:
    sizes: list[int] = []

    class Large(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            sizes.append(len(x))
            if len(x) > 2:
                raise error if isinstance(error, BaseException) else RuntimeError(error)
            return x + 1

    with pool_of(1) as pool:
        batcher = pool.serve(Large().eval(), max_batch=16)
        for _ in range(2):
            with Held(pool):
                answers = [batcher(torch.tensor(k)) for k in range(32)]
            assert [int(one.result()) for one in answers] == list(range(1, 33))
    assert sorted((size for size in sizes if size > 2), reverse=True) == [16, 8, 4]  # never again


def test_a_predicate_says_which_devices_will_do() -> None:
    asked: list[Any] = []

    def last(facts: Any) -> bool:
        asked.append(facts)
        return bool(facts.name == "host:1")

    with pool_of(memory={"host:0": 1e9}) as pool:
        both: list[Any] = [last, ["host", last], [lambda facts: facts.kind == "host", last, "host:1"]]
        for needs in both:
            job = pool.submit(lambda _: None, needs=needs)
            job.result()
            assert job.device == "host:1"
        assert (asked[0].memory, asked[0].cores, asked[0].device_class) == (1e9, 1, "host")
        assert asked[1].memory > 1e8
        roomy = pool.submit(lambda _: None, needs=lambda facts: facts.memory <= 1e9)
        roomy.result()
        assert roomy.device == "host:0"
        with pytest.raises(Rejected, match=r"out of those that .*lambda.* of needs= accepts. The pool has host:0"):
            pool.submit(lambda _: None, needs=lambda facts: facts.memory > 1e18).result()
        with pytest.raises(Rejected, match=r"with the labels (cuda, host|host, cuda). The pool has host:0"):
            pool.try_submit(lambda _: None, needs=["host", "cuda"])
        with pytest.raises(ZeroDivisionError):
            pool.submit(lambda _: None, needs=lambda _: 1 / 0)  # type: ignore[arg-type]
        batcher = pool.serve(lambda x: x, needs=last)
        answers = [batcher(torch.tensor(1)) for _ in range(5)]
        assert {(int(one.result()), one.device) for one in answers} == {(1, "host:1")}


def test_arguments_for_memory_and_needs_are_checked() -> None:
    for memory, text in [
        ({"host:9": 1e9}, "'host:9', and the pool has no such device"),
        ({"host:0": "8 GB"}, r"memory\['host:0'\]='8 GB'"),
        ({"host:0": 0}, "must be positive"),
    ]:
        with pytest.raises(InvalidArgument, match=text):
            Pool(hosts(1), memory=memory)  # type: ignore[arg-type]
    with pool_of(1) as pool:
        anything: Any = pool
        for call, text in [
            (lambda: anything.submit(print, memory=-1), "memory=-1"),
            (lambda: anything.submit(print, memory=float("nan")), "memory=nan"),
            (lambda: anything.submit(print, needs=[3]), "needs= has a int"),
            (lambda: anything.serve(print, memory=True), "memory=True"),
            (lambda: anything.serve(print, resident=1), "initializer="),
            (lambda: anything.serve(nn.Identity().eval(), resident=1), "share its parameters"),
        ]:
            with pytest.raises(InvalidArgument, match=text):
                call()  # type: ignore[no-untyped-call]


def test_a_wait_for_a_capture_is_no_part_of_a_load_nor_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    now, found = [0.0], list[Any]()
    run = answerer.Answerer._run

    @contextlib.contextmanager
    def loading(_: int | None) -> Iterator[float]:
        now[0] += 1000.0  # until the capture is over
        yield 1000.0

    def initializer(_: torch.device) -> float:
        now[0] += 3.0
        return 2.0

    def noted(self: Any, *of: Any) -> Any:
        found.append(run(self, *of))
        return found[-1]

    for one in (answerer, served):
        monkeypatch.setattr(one, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(served, "loading", loading)
    monkeypatch.setattr(answerer.Answerer, "_run", noted)
    with pool_of(1) as pool:
        batcher = pool.serve(lambda state, x: x + state, initializer=initializer, resident=100)
        for _ in range(2):
            assert float(batcher(torch.tensor(1.0)).result()) == 3.0
        batcher = pool.serve(nn.Identity().eval())
        for _ in range(2):
            batcher(torch.tensor(1.0)).result()
            served_by(batcher).drop("host:0")  # as after a run that hangs
    assert found == [(DONE, 1000.0, 3.0), (DONE, 0.0, None), (DONE, 0.0, None), (DONE, 1000.0, None)]
