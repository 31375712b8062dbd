"""``batch_norm="synchronised"``: devices wait for each other, but not for one that has failed or never comes."""

from __future__ import annotations

import copy
import threading
import time
from random import Random
from typing import Any

import pytest
import torch
from torch import nn

from norm_cases import Synchronised, case
from paceline import Cancelled, InvalidArgument
from paceline.torch import DataParallel
from torch_support import TWO, assert_same_gradients, classify, gradients, hosts, output_of

pytestmark = pytest.mark.filterwarnings("error:DataParallel. .*each micro-batch is normalised")


class Failing:
    """Fails on the slice with a marked item: before, between or after the norms."""

    def __init__(self, where: str) -> None:
        self.where = where

    def __call__(self, module: Any, part: Any) -> Any:
        fails = bool((part[0] > 1e6).any())
        hidden = part[0]
        for index, layer in enumerate(module):
            if fails and self.where == str(index):
                raise ArithmeticError("on purpose")
            hidden = layer(hidden)
        if fails and self.where == "backward":
            hidden.register_hook(_raise)
        return nn.functional.cross_entropy(hidden, part[1])


def _raise(_: torch.Tensor) -> None:
    raise ArithmeticError("on purpose")


@pytest.mark.parametrize("where", ["0", "2", "5", "backward"])
@pytest.mark.parametrize("device", [0, 2])
def test_a_device_that_fails_leaves_nobody_waiting_and_its_error_is_raised(where: str, device: int) -> None:
    module, (x, y) = case("rows", 12)
    bad = x.clone()
    bad[4 * device] = 1e9
    before = copy.deepcopy(module.state_dict())
    with DataParallel(module, hosts(3), balance="even", **Synchronised) as trainer:
        for _ in range(3):
            with pytest.raises(ArithmeticError, match="on purpose") as raised:
                trainer.step(Failing(where), (bad, y))
            assert f"host:{device}" in str(getattr(raised.value, "__notes__", raised.value.__cause__))
        assert gradients(module) == [None] * len(gradients(module))
        assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
        reference = copy.deepcopy(module)
        classify(reference, (x, y)).backward()
        trainer.step(classify, (x, y))
    assert_same_gradients(module, gradients(reference))


@pytest.mark.alone
def test_shares_follow_speeds_without_the_time_that_a_device_waits() -> None:
    module, batch = case("rows", 16)
    with DataParallel(module, TWO, **Synchronised) as trainer:
        slow: list[Any] = []

        def loss_fn(replica: Any, part: Any) -> Any:
            time.sleep(len(part[0]) * (6e-3 if replica is slow[0] else 2e-3))
            return classify(replica, part)

        trainer.step(classify, batch)
        slow.append(trainer._execution.replicas.list[1].module)
        for _ in range(25):
            trainer.step(loss_fn, batch)
        assert trainer.shares["host:0"] >= 10  # 12 would be ideal


def test_out_of_memory_is_not_answered_with_smaller_pieces() -> None:
    module, (x, y) = case("rows", 12)

    def full(replica: Any, part: Any) -> Any:
        if bool((part[0] > 1e6).any()):
            raise MemoryError
        return classify(replica, part)

    bad = x.clone()
    bad[0] = 1e9
    with DataParallel(module, TWO, **Synchronised) as trainer:
        with pytest.raises(MemoryError):
            trainer.step(full, (bad, y))
        reference = copy.deepcopy(module)
        classify(reference, (x, y)).backward()
        trainer.step(full, (x, y))
    assert_same_gradients(module, gradients(reference))


@pytest.mark.parametrize("kind", ["more", "other", "none"])
def test_slices_that_run_other_norms_are_an_error_that_names_both_devices(kind: str) -> None:
    module: Any
    module, batch = case("rows", 12)

    def loss_fn(replica: Any, part: Any) -> Any:
        first = part[0].data_ptr() == batch[0].data_ptr()
        if kind == "none" and first:
            return replica[0](part[0]).square().mean()
        if kind == "more":
            hidden = replica[:3](part[0])
            return replica[3:](replica[1](hidden) if first else hidden).square().mean()
        return replica[4 if first else 1](replica[0](part[0])).square().mean()

    with DataParallel(module, TWO, balance="even", **Synchronised) as trainer:
        other = "has ended its slice" if kind == "none" else "runs the forward of"
        with pytest.raises(InvalidArgument, match=rf"host:\d runs the forward of \d, and host:\d {other}"):
            trainer.step(loss_fn, batch)
        trainer.step(classify, batch)


def test_a_late_device_is_waited_for() -> None:
    module, batch = case("rows", 12)
    reference = copy.deepcopy(module)
    classify(reference, batch).backward()
    others, late = threading.Event(), threading.Event()

    def loss_fn(replica: Any, part: Any) -> Any:
        if part[0].data_ptr() != batch[0].data_ptr():
            others.set()
        else:
            assert others.wait(10)
            late.wait(0.5)  # nobody sets it
        return classify(replica, part)

    with DataParallel(module, TWO, balance="even", **Synchronised) as trainer:
        trainer.step(loss_fn, batch)
    assert_same_gradients(module, gradients(reference))


SETUP = """
module = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 2)).double()
batch = torch.randn(8, 4).double()
reference = __import__("copy").deepcopy(module)
mean_of_squares(reference, batch).backward()
inside, leave = threading.Event(), threading.Event()
first = batch.data_ptr()

def interrupt_after(seconds):
    threading.Timer(seconds, os.kill, (os.getpid(), signal.SIGINT)).start()

def same_gradients():
    return all(torch.allclose(a.grad, b.grad, rtol=1e-9, atol=1e-14) for a, b in zip(module.parameters(), reference.parameters()))

def interrupted(call, kind=KeyboardInterrupt):
    try:
        call()
    except kind:
        return True
    raise SystemExit("not raised")

def one_is_late(replica, part):
    if part.data_ptr() == first:
        inside.set()
        leave.wait(20)
    return mean_of_squares(replica, part)

trainer = DataParallel(module, ["host:0", "host:1"], balance="even", batch_norm="synchronised")
"""


def said(program: str, **options: Any) -> str:
    return output_of(SETUP + program, **options)


def test_ctrl_c_while_devices_wait_for_each_other_ends_the_step() -> None:
    program = """
def handler(*_):
    threading.Timer(0.5, leave.set).start()
    raise KeyboardInterrupt

signal.signal(signal.SIGINT, handler)
threading.Thread(target=lambda: (inside.wait(), interrupt_after(0.3))).start()
print(interrupted(lambda: trainer.step(one_is_late, batch)), all(p.grad is None for p in module.parameters()))
trainer.step(mean_of_squares, batch)
print(same_gradients())
"""
    assert said(program) == "True True\nTrue"


def test_a_step_that_is_cancelled_at_any_moment_ends() -> None:
    module, batch = case("rows")
    reference = copy.deepcopy(module)
    classify(reference, batch).backward()
    random = Random(0)
    ended = {"done": 0, "cancelled": 0}
    with DataParallel(module, hosts(3), **Synchronised) as trainer:
        before = copy.deepcopy(module.state_dict())
        for _ in range(60):
            timer = threading.Timer(random.uniform(0, 4e-3), trainer._works.steps.step_loop.cancel)
            timer.start()
            try:
                trainer.step(classify, batch)
                ended["done"] += 1
                assert_same_gradients(module, gradients(reference))
            except Cancelled:
                ended["cancelled"] += 1
                assert gradients(module) == [None] * len(gradients(module))
            timer.join()
            module.load_state_dict(before)
            module.zero_grad()
    assert ended["cancelled"] > 0


def test_a_second_ctrl_c_leaves_the_step_and_the_program_ends() -> None:
    program = """
threading.Thread(target=lambda: (inside.wait(), interrupt_after(0.3), interrupt_after(0.8))).start()
print(interrupted(lambda: trainer.step(one_is_late, batch)))
leave.set()
while trainer.group.busy:
    time.sleep(0.01)
trainer.step(mean_of_squares, batch)
print(same_gradients())
"""
    assert said(program) == "True\nTrue"


def test_closing_in_another_thread_ends_the_step() -> None:
    program = """
import paceline
def close():
    inside.wait()
    time.sleep(0.3)
    threading.Timer(0.5, leave.set).start()
    trainer.close()

threading.Thread(target=close).start()
print(interrupted(lambda: trainer.step(one_is_late, batch), paceline.Cancelled))
"""
    assert said(program) == "True"


def test_a_program_that_ends_in_a_daemon_thread_ends_while_devices_wait() -> None:
    program = """
def forever(replica, part):
    if part.data_ptr() == first:
        inside.set()
        while True:
            time.sleep(0.05)
    return mean_of_squares(replica, part)

threading.excepthook = lambda *_: None
threading.Thread(target=trainer.step, args=(forever, batch), daemon=True).start()
inside.wait(10)
time.sleep(0.3)
print("end")
"""
    assert said(program) == "end"
