"""The training step of PyTorch modules on GPUs gives what one device gives."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from gpu_cases import BOXES, expect_same, expect_step, gpu_type, module_and_batch, plain
from paceline.torch import DataParallel
from torch_support import classify

RATIOS = [[1.0, 1.0, 1.0, 1.0], [3.0, 0.0, 1.0, 2.0], [0.0, 5.0, 1.0, 0.0], [1.0, 0.0, 0.0, 0.0]]


@pytest.mark.usefixtures("proved")
@pytest.mark.parametrize("devices", BOXES.values(), ids=BOXES)
@pytest.mark.parametrize("ratios", RATIOS, ids=str)
@pytest.mark.parametrize("micro_batch", [None, 4])
def test_the_gradient_is_that_of_one_device(
    fake: Any, devices: list[str], ratios: list[float], micro_batch: int | None
) -> None:
    module, batch = module_and_batch()
    balance = ratios[: len(devices)]
    if not any(balance):
        balance[0] = 1.0
    with DataParallel(module, devices, balance=balance, micro_batch=micro_batch) as trainer:
        optimizer = trainer.optimizer(torch.optim.SGD, lr=0.3)
        for _ in range(4):
            expect_step(trainer, batch)
            optimizer.step()
        assert sum(trainer.shares.values()) == 24
    del trainer, optimizer
    gc.collect()
    assert fake.leftovers == 0


def test_gradients_are_added_to_what_is_there(fake: Any) -> None:
    module, batch = module_and_batch()
    _, once = plain(module, batch)
    with DataParallel(module, BOXES["two"], balance="even") as trainer:
        trainer.step(classify, batch)
        trainer.step(classify, batch)
    expect_same(module, [2 * gradient for gradient in once if gradient is not None])


def test_element_types_have_buckets_of_their_own(fake: Any) -> None:
    class Mixed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(6, 4).double(), nn.Linear(4, 3)
            self.turn = nn.Parameter(torch.randn(4, dtype=torch.complex128))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.second((self.first(x) * self.turn).real.float())
            return out

    module = Mixed()
    _, batch = module_and_batch()
    with DataParallel(module, BOXES["mixed"], balance="even") as trainer:
        expect_step(trainer, batch, tolerance=1e-6)


def test_weights_and_a_scaler_act_as_on_one_device(fake: Any) -> None:
    module, batch = module_and_batch()
    weight = torch.arange(24) % 5

    def weighted(one: Any, part: Any) -> Any:
        return nn.functional.cross_entropy(one(part[0]), part[1], reduction="none")

    def whole(one: Any, part: Any) -> Any:
        return 8.0 * (weighted(one, part) * weight).sum() / weight.sum()

    scaler = torch.amp.GradScaler(gpu_type(), init_scale=8.0)
    with DataParallel(module, BOXES["four"], balance="even") as trainer:
        expect_step(trainer, batch, weighted, whole=whole, weight=weight, scaler=scaler)


def test_predict_gives_the_items_back_in_order(fake: Any) -> None:
    module, batch = module_and_batch()
    with DataParallel(module, BOXES["mixed"], balance=[1.0, 2.0, 1.0, 4.0], micro_batch=3) as trainer:
        torch.testing.assert_close(trainer.predict(batch[0]), module(batch[0]).detach())
        assert trainer.predict(lambda one, x: {"twice": one(x) * 2}, batch[0])["twice"].shape == (24, 3)


def test_weights_that_leave_a_device_without_work(fake: Any) -> None:
    module, batch = module_and_batch()
    weight = torch.zeros(24)
    weight[20:] = 1.0
    _, expected = plain(module, (batch[0][20:], batch[1][20:]))
    with DataParallel(module, BOXES["two"], balance="even") as trainer:
        loss_fn = lambda one, part: nn.functional.cross_entropy(one(part[0]), part[1], reduction="none")  # noqa: E731
        trainer.step(loss_fn, batch, weight=weight)
    expect_same(module, expected)


def test_gradients_lie_in_memory_as_parameters_do(fake: Any) -> None:
    module = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Flatten()).double().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    images = torch.randn(8, 3, 6, 6, dtype=torch.float64)
    loss_fn = lambda one, x: one(x).square().mean()  # noqa: E731
    with DataParallel(module, BOXES["two"], balance="even") as trainer:
        expect_step(trainer, images, loss_fn)
    assert [parameter.grad.stride() for parameter in module.parameters() if parameter.grad is not None] == [
        parameter.stride() for parameter in module.parameters()
    ]


def test_complex_parameters_behind_odd_ones(fake: Any) -> None:
    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.real = nn.Parameter(torch.randn(3, dtype=torch.float64))
            self.turn = nn.Parameter(torch.randn(3, dtype=torch.complex128))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return ((x[:, :3] * self.real) * self.turn).abs().sum(1)

    module, (batch, _) = Odd(), module_and_batch()[1]
    loss_fn = lambda one, x: one(x).mean()  # noqa: E731
    with DataParallel(module, BOXES["mixed"], balance="even") as trainer:
        expect_step(trainer, batch, loss_fn)


def test_a_dropped_trainer_leaves_no_memory_behind(fake: Any) -> None:
    module, batch = module_and_batch()
    trainer = DataParallel(module, BOXES["four"])
    trainer.step(classify, batch)
    trainer.step(classify, batch)
    flat = weakref.ref(trainer._execution.flat)
    assert flat() is not None
    del trainer
    gc.collect()
    assert flat() is None
