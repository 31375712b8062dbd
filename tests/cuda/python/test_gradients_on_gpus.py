"""The training step of PyTorch modules on GPUs gives what one device gives: gradients, by cost too, losses, outputs, checkpoints and synchronised BatchNorm."""

from __future__ import annotations

import copy
import gc
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fake_device
from gpu_cases import BOXES, expect_same, expect_step, gpu_type, module_and_batch, plain
from paceline import InvalidArgument
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


@pytest.mark.parametrize("devices", BOXES.values(), ids=BOXES)
@pytest.mark.parametrize("micro_batch", [None, 4])
def test_the_gradient_by_cost_is_that_of_one_device(fake: Any, devices: list[str], micro_batch: int | None) -> None:
    module, batch = module_and_batch()
    generator = torch.Generator().manual_seed(1)
    with DataParallel(module, devices, micro_batch=micro_batch) as trainer:
        optimizer = trainer.optimizer(torch.optim.SGD, lr=0.3)
        for _ in range(6):
            costs = torch.rand(24, generator=generator, device="cpu")
            expect_step(trainer, batch, cost=costs)
            optimizer.step()
        assert sum(trainer.shares.values()) == 24
        assert trainer.report()["items"]["steps"] == 6
    del trainer, optimizer
    gc.collect()
    assert fake.leftovers == 0


def test_weights_follow_the_items(fake: Any) -> None:
    module, batch = module_and_batch()
    weight = torch.arange(24.0, dtype=torch.float64)

    def whole(one: Any, part: Any) -> Any:
        return (
            torch.nn.functional.cross_entropy(one(part[0]), part[1], reduction="none") * weight
        ).sum() / weight.sum()

    def single(one: Any, part: Any) -> Any:
        return torch.nn.functional.cross_entropy(one(part[0]), part[1], reduction="none")

    with DataParallel(module, BOXES["two"]) as trainer:
        expect_step(trainer, batch, single, whole=whole, weight=weight, cost=torch.arange(24).flip(0))


@pytest.mark.parametrize("devices", BOXES.values(), ids=BOXES)
def test_runs_of_a_batch_take_costs(fake: Any, devices: list[str]) -> None:
    module, batch = module_and_batch()
    generator = torch.Generator().manual_seed(2)
    loss, gradients = plain(module, batch)
    with DataParallel(module, devices) as trainer:
        for _ in range(4):
            module.zero_grad()
            with trainer.batch(batch, cost=torch.rand(24, generator=generator, device="cpu")) as global_batch:
                ours = global_batch.run(lambda one, part: part.backward(classify(one, part.data)), name="run")
            assert torch.allclose(ours, loss, rtol=1e-12)
            expect_same(module, gradients)
        assert trainer.report()["runs"]["run"]["items"]["steps"] == 4
    del trainer, global_batch
    gc.collect()
    assert fake.leftovers == 0


def test_predictions_come_in_the_callers_order(fake: Any) -> None:
    module, batch = module_and_batch()
    with torch.no_grad():
        wanted = module(batch[0])
    with DataParallel(module, BOXES["two"]) as trainer:
        torch.testing.assert_close(trainer.predict(batch[0], cost=torch.rand(24)), wanted)


def _with_sums(module: Any, batch: Any) -> Any:
    return classify(module, batch), {"sums": batch[0].sum(1)}


@pytest.mark.parametrize("box", BOXES)
def test_a_loss_hands_out_gradients_and_outputs_come_back_in_the_batchs_order(fake: Any, box: str) -> None:
    module, batch = module_and_batch()
    value, expected = plain(module, batch)
    with DataParallel(module, BOXES[box], balance="even", micro_batch=4) as trainer:
        for _ in range(3):
            module.zero_grad()
            loss = trainer.loss(_with_sums, batch)
            (2 * loss).backward()
            torch.testing.assert_close(loss.detach(), value, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(trainer.extras["sums"], batch[0].sum(1), rtol=1e-12, atol=1e-12)
            expect_same(module, [None if one is None else 2 * one for one in expected])


@pytest.mark.parametrize("box", BOXES)
def test_forward_and_backward_apart_are_exact(fake: Any, box: str) -> None:
    module, batch = module_and_batch()
    coupled = torch.randn(24, 24, dtype=torch.float64)

    def loss_fn(one: Any, items: Any) -> Any:
        rows = one(items[0])
        return (coupled * (rows @ rows.T)).logsumexp(1).mean()

    _, expected = plain(module, batch, loss_fn)
    apart = DataParallel(module, BOXES[box])
    with apart:
        for _ in range(3):
            module.zero_grad()
            loss_fn(apart, batch).backward()
            expect_same(module, expected)


@pytest.mark.own_gpus("it tells GPUs apart by their numbers")
def test_numbers_are_gpus_and_bring_a_module_to_the_first_one(far_gpus: Any) -> None:
    module, batch = module_and_batch()
    wanted = module(batch[0])
    classify(module, batch).backward()
    expected = [None if one.grad is None else one.grad.clone() for one in module.parameters()]
    module.zero_grad()
    first, second = fake_device.device(0), fake_device.device(1)
    with DataParallel(module, [0, 1], output_device=1) as model:
        assert next(module.parameters()).device == first
        assert model.to(first) is model
        for x in (batch[0], batch[0].to(first)):
            model.zero_grad()
            output = model(x)
            assert output.device == second
            torch.testing.assert_close(output.cpu(), wanted)
            nn.functional.cross_entropy(output, batch[1].to(second)).backward()
            for parameter, theirs in zip(module.parameters(), expected, strict=True):
                assert parameter.grad is not None
                torch.testing.assert_close(parameter.grad.cpu(), theirs)
        with pytest.raises(InvalidArgument, match="away from the devices"):
            model.cpu()


@pytest.mark.parametrize("box", BOXES)
def test_a_checkpoint_has_the_parameters_of_its_step(fake: Any, box: str, tmp_path: Path) -> None:
    module, batch = module_and_batch()
    optimizer = torch.optim.AdamW(module.parameters())
    with DataParallel(module, BOXES[box], balance="even") as trainer:
        for step in range(3):
            trainer.step(classify, batch)
            optimizer.step()
            optimizer.zero_grad()
            if step == 1:
                saved = copy.deepcopy(module.state_dict())
                trainer.save_async(tmp_path, optimizer=optimizer)
        assert trainer.verify_replicas(classify, batch)
        trainer.load(tmp_path, optimizer=optimizer)
        for name, tensor in module.state_dict().items():
            assert torch.equal(tensor, saved[name])
        assert optimizer.state[next(module.parameters())]["step"] == 2


@pytest.mark.parametrize("box", BOXES)
def test_batch_norm_over_all_gpus_is_that_of_one_device(fake: Any, box: str) -> None:
    _, batch = module_and_batch()
    module = nn.Sequential(nn.Linear(6, 10), nn.BatchNorm1d(10), nn.Tanh(), nn.Linear(10, 3)).double()
    alone = copy.deepcopy(module)
    with DataParallel(module, BOXES[box], batch_norm="synchronised", balance="even") as trainer:
        for _ in range(4):
            alone.zero_grad()
            module.zero_grad()
            value = classify(alone, batch)
            value.backward()
            loss = trainer.step(classify, batch)
            torch.testing.assert_close(loss, value.detach(), rtol=1e-12, atol=1e-12)
            expect_same(module, [parameter.grad for parameter in alone.parameters()])
            for ours, theirs in zip(module.buffers(), alone.buffers(), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
        assert 0 not in trainer.shares.values()
