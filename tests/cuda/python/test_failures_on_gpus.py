"""Failures, hangs, lost devices, and what is refused: nothing is lost, and the device is named."""

from __future__ import annotations

import os
import signal
import threading
from typing import Any

import pytest
import torch
from torch import nn

from gpu_cases import BOXES, GPUS, expect_step, home_of, module_and_batch, queues_of
from paceline import DeviceLost, InvalidArgument, Timeout, Unavailable
from paceline.torch import DataParallel
from paceline.torch._devices import cuda
from torch_support import classify


@pytest.mark.own_gpus("it tells GPUs apart by their numbers")
def test_a_failed_step_commits_nothing_and_the_next_one_works(fake: Any) -> None:
    module, batch = module_and_batch()

    def fails(one: Any, part: Any) -> Any:
        if fake.streams[-1][0] == 1:
            raise RuntimeError("no")
        return classify(one, part)

    with DataParallel(module, BOXES["two"], balance="even", micro_batch=4) as trainer:
        with pytest.raises(RuntimeError, match="no") as error:
            trainer.step(fails, batch)
        assert "cuda:1" in error.value.__notes__[0]
        assert all(parameter.grad is None for parameter in module.parameters())
        expect_step(trainer, batch)


@pytest.mark.own_gpus("it tells GPUs apart by their numbers")
def test_a_lost_device_is_named(fake: Any) -> None:
    module, batch = module_and_batch()
    with DataParallel(module, BOXES["two"], balance="even") as trainer:
        trainer.step(classify, batch)
        trainer.report()
        fake.poison(1)
        with pytest.raises(DeviceLost, match="cuda:1") as error:
            trainer.step(classify, batch)
        assert error.value.device == "cuda:1"
        assert set(trainer._execution.places.pool_peaks()) == {
            "cuda:0",
            "cuda:1",
        }  # as last known, and close() goes through


def test_closing_on_a_broken_gpu_hides_no_error_and_leaves_nothing_open(fake: Any) -> None:
    assert not fake.broken
    module, batch = module_and_batch()

    def breaks(one: Any, part: Any) -> Any:
        fake.broken = "CUDA error: device-side assert triggered"
        raise ValueError("the user's own")

    with pytest.raises(ValueError, match="the user's own"):
        with DataParallel(module, BOXES["two"]) as trainer:
            trainer.step(breaks, batch)
    assert trainer._execution.places.queues is None
    trainer.close()
    assert (fake.released, fake.leftovers) == (1, 0)


def test_memory_that_a_broken_gpu_does_not_take_back_fails_the_step(fake: Any) -> None:
    assert not fake.broken
    module, batch = module_and_batch()

    def short(one: Any, part: Any) -> Any:
        fake.broken = "CUDA error: device-side assert triggered"
        raise torch.OutOfMemoryError("CUDA out of memory")

    with DataParallel(module, BOXES["two"]) as trainer, pytest.raises(RuntimeError, match="device-side assert"):
        trainer.step(short, batch)


@pytest.mark.own_gpus("a part that hangs cannot be given back")
def test_a_hang_is_an_error_that_names_the_device(fake: Any) -> None:
    module, batch = module_and_batch()
    with DataParallel(module, BOXES["two"], balance="even", micro_batch=2, timeout=1.0) as trainer:
        trainer.step(classify, batch)
        fake.hang(queues_of(trainer).streams[1])
        with pytest.raises(Timeout, match="cuda:1"):
            trainer.step(classify, batch)
        with pytest.raises(DeviceLost):
            trainer.step(classify, batch)


def noting(order: list[str], name: str, call: Any) -> Any:
    """`call`, with its name put down."""

    def noted() -> None:
        order.append(name)
        call()

    return noted


def test_replicas_are_let_go_of_when_nothing_runs_any_more(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, batch = module_and_batch()
    order: list[str] = []
    with DataParallel(module, BOXES["two"]) as trainer:
        trainer.step(classify, batch)
        for owner, call in ((trainer._execution.places, "drain"), (trainer._execution.replicas, "release")):
            monkeypatch.setattr(owner, call, noting(order, call, getattr(owner, call)))
    assert order == ["drain", "release"]


def test_ctrl_c_leaves_every_wait_for_a_gpu_that_hangs(fake: Any) -> None:
    hang = fake.hang
    module, batch = module_and_batch()
    trainer = DataParallel(module, BOXES["two"], balance="even", micro_batch=2, timeout=60.0)
    trainer.step(classify, batch)
    hung = queues_of(trainer).streams[1]
    hang(hung)

    def interrupted(call: Any) -> None:
        """The first Ctrl-C ends the step, which then waits until nothing runs any more; the second ends that."""
        ended = threading.Event()

        def press() -> None:
            while not ended.wait(0.4):
                os.kill(os.getpid(), signal.SIGINT)

        presser = threading.Thread(target=press)
        presser.start()
        try:
            with pytest.raises(KeyboardInterrupt):
                call()
        finally:
            ended.set()
        presser.join()

    def steps() -> None:
        while True:  # some steps ahead nobody waits
            trainer.step(classify, batch)

    interrupted(steps)
    interrupted(trainer.close)
    fake.go_on(hung)
    trainer.close()
    assert fake.leftovers == 0


@pytest.mark.own_gpus("it tells GPUs apart by their numbers")
def test_a_module_elsewhere_is_refused(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:

    monkeypatch.setattr(cuda, "device", lambda index: torch.device("meta"))
    module, _ = module_and_batch()
    with pytest.raises(InvalidArgument, match=r"parameter 0\.weight is on cpu, but the first GPU .* is cuda:1"):
        DataParallel(module, ["host:0", "cuda:1"])


@pytest.mark.parametrize("devices", [BOXES["two"], BOXES["mixed"]], ids=str)
def test_a_batch_on_another_gpu_is_refused_before_anything_runs(fake: Any, devices: list[str]) -> None:
    module, batch = module_and_batch()
    elsewhere = batch[0], batch[1].to("meta")
    with DataParallel(module, devices) as trainer:
        for call in (lambda: trainer.step(classify, elsewhere), lambda: trainer.predict(elsewhere)):
            with pytest.raises(InvalidArgument, match=r"batch\[1\] is on meta, where nothing tells") as caught:
                call()
            assert not hasattr(caught.value, "__notes__"), "a worker has found it"


@pytest.mark.parametrize("devices", [BOXES["one"], BOXES["two"], BOXES["mixed"]], ids=str)
@pytest.mark.parametrize("of_batch", [False, True], ids=["tensor", "callable"])
def test_weights_and_costs_on_another_gpu_are_refused_before_anything_runs(
    fake: Any, devices: list[str], of_batch: bool
) -> None:
    module, batch = module_and_batch()
    elsewhere = torch.ones(len(batch[0]), device="meta")
    values: Any = (lambda _: elsewhere) if of_batch else elsewhere
    ran: list[int] = []

    def loss_fn(one: Any, part: Any) -> Any:
        ran.append(len(part[0]))
        return classify(one, part)

    with DataParallel(module, devices) as trainer:
        with pytest.raises(
            InvalidArgument,
            match=rf"weight: the tensor is on meta, where nothing tells .* module is: {home_of(devices)}",
        ):
            trainer.step(loss_fn, batch, weight=values)
        with pytest.raises(InvalidArgument, match=r"cost: the tensor is on meta, where nothing tells"):
            trainer.step(loss_fn, batch, cost=values)
        with pytest.raises(InvalidArgument, match=r"cost: the tensor is on meta, where nothing tells"):
            trainer.predict(batch[0], cost=values)
        assert not ran
        trainer.step(loss_fn, batch, weight=torch.ones(len(batch[0])))


def test_launches_that_block_are_refused(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_LAUNCH_BLOCKING", "1")
    module, _ = module_and_batch()
    with pytest.raises(Unavailable, match="CUDA_LAUNCH_BLOCKING"):
        DataParallel(module, BOXES["two"])
    DataParallel(module, BOXES["one"]).close()


def test_a_parameter_with_gaps_is_not_sent(fake: Any) -> None:
    module = nn.Linear(4, 4)
    module.weight = nn.Parameter(torch.randn(4, 8)[:, ::2])
    with pytest.raises(InvalidArgument, match=r"weight.*gaps"):
        DataParallel(module, BOXES["two"])


def test_a_step_inside_a_graph_capture_is_refused(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:

    module, batch = module_and_batch()
    with DataParallel(module, BOXES["two"]) as trainer:
        monkeypatch.setattr(cuda, "is_capturing", lambda: True)
        with pytest.raises(InvalidArgument, match="CUDA graph"):
            trainer.step(classify, batch)


def test_a_gpu_that_failed_elsewhere_is_reported_lost(fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    module, batch = module_and_batch()

    def failed() -> bool:
        raise RuntimeError("CUDA error: an illegal memory access was encountered\nCUDA kernel errors might be ...")

    with DataParallel(module, BOXES["two"]) as trainer:
        trainer.step(classify, batch)
        with monkeypatch.context() as patched:
            patched.setattr("paceline.torch._devices.cuda.is_capturing", failed)
            with pytest.raises(
                DeviceLost, match=rf"{GPUS[0]}: .*illegal memory access was encountered.*new process"
            ) as caught:
                trainer.step(classify, batch)
        assert caught.value.device == GPUS[0]
