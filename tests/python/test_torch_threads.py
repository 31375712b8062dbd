"""Threads: how many PyTorch uses and where, and workers that are one thread for their whole life and that several trainers share."""

from __future__ import annotations

import copy
import os
import sys
import threading
from typing import Any

import pytest
import torch

from paceline import DeviceGroup, InvalidArgument, Unavailable
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
    assert len(seen) == 2
    for counts in seen.values():
        assert counts == list(range(1, len(counts) + 1))
        assert len(counts) >= 50  # more if a size of micro-batches is tried


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


BATCH = torch.arange(32.0, dtype=torch.double).reshape(8, 4) / 32


def mean_of_squares(module: Any, batch: Any) -> Any:
    return module(batch).pow(2).mean()


def new_module(seed: int) -> torch.nn.Linear:
    torch.manual_seed(seed)
    return torch.nn.Linear(4, 3).double()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="counts threads in /proc")
def test_trainers_on_the_same_devices_share_one_thread_for_each() -> None:
    program = """
    before = thread_count()
    trainers = [DataParallel(module, ["host:0", "host:1"]) for _ in range(3)]
    for trainer in trainers:
        trainer.step(mean_of_squares, batch)
    print(thread_count(before + 2) - before)
    trainers.pop().close()
    print(thread_count(before + 2) - before)
    del trainer
    trainers.clear()
    print(thread_count(before) - before)
    """
    assert output_of(program).split() == ["2", "2", "0"]


@pytest.mark.parametrize("shared_group", [False, True])
def test_steps_of_two_trainers_in_two_threads_take_turns(shared_group: bool) -> None:
    modules = [new_module(seed) for seed in range(2)]
    plain = [copy.deepcopy(module) for module in modules]
    with DeviceGroup(TWO) as group:
        trainers = [DataParallel(module, group if shared_group else list(reversed(TWO))) for module in modules]
        losses: list[list[float]] = [[], []]

        def train(k: int) -> None:
            for _ in range(20):
                modules[k].zero_grad()
                losses[k].append(float(trainers[k].step(mean_of_squares, BATCH)))

        threads = [threading.Thread(target=train, args=(k,)) for k in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(120)
        for k in range(2):
            loss = mean_of_squares(plain[k], BATCH)
            loss.backward()
            assert losses[k] == pytest.approx([loss.item()] * 20)
            torch.testing.assert_close(modules[k].weight.grad, plain[k].weight.grad)
        for trainer in trainers:
            trainer.close()
        assert not group.closed


def test_a_step_of_another_trainer_inside_of_loss_fn_is_refused_and_both_go_on() -> None:
    with DataParallel(new_module(0), TWO) as outer, DataParallel(new_module(1), ["host:1"]) as inner:
        inner.step(mean_of_squares, BATCH)
        said = []

        def loss_fn(module: Any, batch: Any) -> Any:
            try:
                inner.step(mean_of_squares, BATCH)
            except (InvalidArgument, Unavailable) as error:  # the other worker may be inside of it just now
                said.append(str(error))
            return mean_of_squares(module, batch)

        outer.step(loss_fn, BATCH)
        assert said
        assert all("the loss_fn of another step" in one or "in the middle of another call" in one for one in said)
        inner.step(mean_of_squares, BATCH)
        outer.step(mean_of_squares, BATCH)


def test_an_optimizer_of_another_trainer_may_step_inside_of_loss_fn() -> None:
    with DataParallel(new_module(0), ["host:0"]) as outer, DataParallel(new_module(1), TWO) as inner:
        inner.step(mean_of_squares, BATCH)
        optimizer = inner.optimizer(torch.optim.SGD, lr=0.1)
        before = [parameter.detach().clone() for parameter in inner.module.parameters()]

        def loss_fn(module: Any, batch: Any) -> Any:
            optimizer.step()
            return mean_of_squares(module, batch)

        outer.step(loss_fn, BATCH)
        assert not any(map(torch.equal, before, inner.module.parameters()))


def test_closing_a_group_closes_the_trainers_that_were_given_it() -> None:
    group = DeviceGroup(TWO)
    trainer = DataParallel(new_module(0), group)
    trainer.step(mean_of_squares, BATCH)
    group.close()
    with pytest.raises(Unavailable, match="closed"):
        trainer.step(mean_of_squares, BATCH)
    trainer.close()


def test_a_function_leaves_no_state_of_its_thread_to_the_next_trainer() -> None:
    def leaves(module: Any, batch: Any) -> Any:
        loss = mean_of_squares(module, batch)
        torch.set_grad_enabled(False)
        torch.set_num_threads(3)
        return loss

    seen: list[tuple[bool, int]] = []

    def looks(module: Any, batch: Any) -> Any:
        seen.append((torch.is_grad_enabled(), torch.get_num_threads()))
        return mean_of_squares(module, batch)

    with DataParallel(new_module(0), ["host:0", "host:1"]) as first, DataParallel(new_module(1), TWO) as second:
        second.step(looks, BATCH)
        with pytest.raises(RuntimeError, match="does not require grad"):  # the loss's term is computed after it
            first.step(leaves, BATCH)
        second.step(looks, BATCH)
    assert len(set(seen)) == 1
    assert seen[0][0]
