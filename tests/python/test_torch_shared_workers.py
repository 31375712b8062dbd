"""Several trainers on the same devices: they share the workers and wait for each other's steps."""

from __future__ import annotations

import copy
import sys
import threading
from typing import Any

import pytest
import torch

from paceline import DeviceGroup, InvalidArgument, Unavailable
from paceline.torch import DataParallel
from torch_support import output_of

TWO = ["host:0", "host:1"]
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
