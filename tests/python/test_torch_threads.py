"""Threads: how many PyTorch uses and where, and that each worker is one thread for its whole life."""

from __future__ import annotations

import os
import threading
from typing import Any

import pytest
import torch

from paceline import DeviceGroup, Unavailable
from paceline.torch import DataParallel
from paceline.torch._devices.caller_state import set_own_threads
from torch_support import TWO, classifier, classify, hosts, noting, output_of


@pytest.fixture(autouse=True)
def _caller_with_two_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_the_last_of_several_trainers_gives_the_callers_threads_back_when_it_is_closed_or_dropped() -> None:
    module, _ = classifier()
    first = DataParallel(module, hosts(6))  # more devices than there are cores
    with DataParallel(module, ["host:0"]) as second:
        first.close()
        first.close()
        assert torch.get_num_threads() == 1
        second.close()
        assert torch.get_num_threads() == 2
    assert torch.get_num_threads() == 2
    trainer = DataParallel(module, TWO)
    assert torch.get_num_threads() == 1
    del trainer
    assert torch.get_num_threads() == 2


def worker_threads(trainer: DataParallel, batch: Any) -> list[int]:
    seen: list[int] = []
    trainer.step(noting(lambda m, b: seen.append(torch.get_num_threads())), batch)
    return seen


def test_a_workers_thread_count_is_that_of_its_cores_whatever_the_caller_sets_later() -> None:
    """PyTorch reads the process-wide count lazily in every new thread, which would overrule the worker's own."""
    module, batch = classifier()
    with DataParallel(module, TWO, balance="even") as trainer:
        wanted = [max(1, len(device.cores)) for device in trainer.group.devices]
        assert worker_threads(trainer, batch) == wanted
        torch.set_num_threads(2)
        assert worker_threads(trainer, batch) == wanted
    with DataParallel(module, ["host:0"]) as trainer:  # a second worker would set the process-wide count in its turn
        with pytest.raises(ZeroDivisionError):
            trainer.step(noting(lambda m, b: 1 / 0), batch)  # no operator has run on the worker yet
        torch.set_num_threads(wanted[0] + 1)
        assert worker_threads(trainer, batch) == wanted[:1]


def test_every_device_has_one_thread_for_its_whole_life() -> None:
    module, batch = classifier()
    local = threading.local()
    seen: dict[int, list[int]] = {}

    def loss_fn(replica: Any, part: Any) -> Any:
        local.count = getattr(local, "count", 0) + 1
        seen.setdefault(threading.get_native_id(), []).append(local.count)
        return classify(replica, part)

    with DataParallel(module, TWO, balance="even") as trainer:
        for _ in range(50):
            trainer.step(loss_fn, batch)
    assert threading.get_native_id() not in seen
    assert sorted(seen.values()) == [list(range(1, 51))] * 2


def test_workers_are_pinned_to_their_cores_and_the_caller_is_not() -> None:
    module, batch = classifier()
    before = os.sched_getaffinity(0)
    seen: set[frozenset[int]] = set()
    with DataParallel(module, TWO, balance="even") as trainer:
        trainer.step(noting(lambda m, b: seen.add(frozenset(os.sched_getaffinity(0)))), batch)
        assert seen == {frozenset(device.cores) for device in trainer.group.devices}
        assert os.sched_getaffinity(0) == before


def test_a_group_that_was_passed_in_stays_open_and_serves_several_trainers() -> None:
    with DeviceGroup(TWO) as group:
        for seed in range(2):
            module, batch = classifier(seed=seed)
            with DataParallel(module, group) as trainer:
                trainer.step(classify, batch)
            assert not group.closed
    assert group.closed


def test_closing_ends_the_workers() -> None:
    program = """
    torch.set_num_threads(1)
    before = thread_count()
    for count in (1, 2, 3):
        with DataParallel(module, [f"host:{i}" for i in range(count)]) as trainer:
            trainer.step(mean_of_squares, batch)
            assert thread_count(before + count) == before + count
        assert thread_count(before) == before
    print("ok")
    """
    assert output_of(program) == "ok"


def elsewhere(call: Any, threads: int = 3) -> list[int]:
    """PyTorch's number of threads after `call`, in a thread of its own that had so many."""
    counts: list[int] = []

    def run() -> None:
        torch.get_num_threads()
        torch.set_num_threads(threads)
        call()
        counts.append(torch.get_num_threads())

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return counts


def test_a_thread_that_only_calls_is_limited_during_its_calls() -> None:
    module, batch = classifier()
    inside: list[int] = []

    def weight(whole: Any) -> torch.Tensor:
        inside.append(torch.get_num_threads())
        return torch.ones(len(whole[0]))

    with DataParallel(module, TWO) as trainer:
        assert elsewhere(lambda: trainer.step(classify, batch, weight=weight)) == [3]
        assert inside == [1]
        trainer.step(classify, batch)
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2


def test_a_thread_whose_trainer_another_thread_has_closed_gets_its_number_back_at_its_next_call() -> None:
    module, batch = classifier()
    for call in ("step", "close", "new"):
        trainer = DataParallel(module, TWO)
        assert elsewhere(trainer.close) == [3]
        assert torch.get_num_threads() == 1, "PyTorch cannot set the number of another thread"
        if call == "step":
            with pytest.raises(Unavailable):
                trainer.step(classify, batch)
        elif call == "close":
            trainer.close()
        else:
            with DataParallel(module, TWO):
                assert torch.get_num_threads() == 1
        assert torch.get_num_threads() == 2


def test_a_thread_that_begins_meanwhile_has_the_number_of_the_process() -> None:
    module, batch = classifier()
    counts: list[int] = []
    with DataParallel(module, TWO) as trainer:
        trainer.step(classify, batch)
        thread = threading.Thread(target=lambda: counts.append(torch.get_num_threads()))
        thread.start()
        thread.join()
    assert counts == [2]


def test_threads_that_set_their_own_number_at_once_leave_that_of_the_process() -> None:
    for _ in range(20):
        barrier = threading.Barrier(4)

        def set_here(barrier: threading.Barrier = barrier) -> None:
            barrier.wait()
            set_own_threads(1)
            assert torch.get_num_threads() == 1

        threads = [threading.Thread(target=set_here) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        counts: list[int] = []
        later = threading.Thread(target=lambda counts=counts: counts.append(torch.get_num_threads()))
        later.start()
        later.join()
        assert counts == [2]
