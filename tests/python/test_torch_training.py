"""Whole trainings: the loss curves of plain PyTorch, with what people put around a step."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.torch import DataParallel
from torch_support import TWO, assert_same_gradients, classifier, classify, gradients, hosts, plain

DEVICES = pytest.mark.parametrize("devices", [1, 2, 3])
Optimizer = Callable[[Any], torch.optim.Optimizer]

OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    "AdamW": (torch.optim.AdamW, {"lr": 3e-3, "weight_decay": 0.1}),
}


def batches(count: int) -> list[Any]:
    """Sizes change, and the last one is short."""
    return [classifier(32 if step % 7 else 9, seed=step)[1] for step in range(count)]


def plain_curve(module: Any, optimizer: torch.optim.Optimizer, data: list[Any], scheduler: Any = None) -> list[float]:
    losses = []
    for batch in data:
        loss = classify(module, batch)
        loss.backward()
        nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        if scheduler is not None:
            scheduler.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("balance", ["auto", "even", [3, 1]], ids=str)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_two_hundred_steps_follow_the_loss_curve_of_plain_pytorch(name: str, balance: Any) -> None:
    cls, options = OPTIMIZERS[name]
    module, _ = classifier()
    reference = copy.deepcopy(module)
    data = batches(200)
    optimizer = cls(reference.parameters(), **options)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=options["lr"], total_steps=200)
    wanted = plain_curve(reference, optimizer, data, schedule)
    losses = []
    with DataParallel(module, TWO, balance=balance) as trainer:
        optimizer = trainer.optimizer(cls, **options)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=options["lr"], total_steps=200)
        for batch in data:
            losses.append(trainer.step(classify, batch).item())
            nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
    # Rounding differences of 1e-16 a step, amplified by the training itself.
    assert losses == pytest.approx(wanted, rel=1e-9)
    assert len(set(losses)) == 200
    torch.testing.assert_close(list(module.parameters()), list(reference.parameters()), rtol=1e-8, atol=1e-10)


@DEVICES
def test_a_grad_scaler_works_as_always(devices: int) -> None:
    module, batch = classifier(dtype=torch.float32)
    loss, wanted = plain(module, classify, batch)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=1)
    with DataParallel(module, hosts(devices)) as trainer:
        optimizer = trainer.optimizer(torch.optim.SGD, lr=0.1)
        ours = trainer.step(classify, batch, scaler=scaler)
        assert ours.item() == pytest.approx(loss.item(), rel=1e-5), "the loss comes back unscaled"
        assert_same_gradients(module, [1024 * g for g in wanted if g is not None], torch.float32)
        scaler.unscale_(optimizer)
        assert_same_gradients(module, wanted, torch.float32)
        norm = nn.utils.clip_grad_norm_(module.parameters(), 1e-3)
        assert norm.item() == pytest.approx(sum(float(g.norm()) ** 2 for g in wanted if g is not None) ** 0.5, rel=1e-5)
        before = [parameter.detach().clone() for parameter in module.parameters()]
        scaler.step(optimizer)
        scaler.update()
        assert scaler.get_scale() == 2048
        assert not torch.equal(before[0], next(module.parameters()))


@DEVICES
def test_a_grad_scaler_skips_a_step_that_overflowed(devices: int) -> None:
    module, (x, y) = classifier(dtype=torch.float32)
    x[-1] = float("inf")  # on one device only
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    before = copy.deepcopy(module.state_dict())
    with DataParallel(module, hosts(devices), balance="even") as trainer:
        optimizer = trainer.optimizer(torch.optim.SGD, lr=0.1)
        trainer.step(classify, (x, y), scaler=scaler)
        scaler.step(optimizer)
        scaler.update()
    assert scaler.get_scale() == 4
    assert all(torch.equal(before[name], value) for name, value in module.state_dict().items())


@pytest.mark.parametrize("enabled", [True, False])
def test_scaled_steps_accumulate(enabled: bool) -> None:
    module, batch = classifier()
    _, wanted = plain(module, classify, batch)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, enabled=enabled)
    with DataParallel(module, TWO) as trainer:
        optimizer = trainer.optimizer(torch.optim.SGD, lr=0.1)
        trainer.step(classify, batch, scaler=scaler)
        trainer.step(classify, batch, scaler=scaler)
        scaler.unscale_(optimizer)
    assert_same_gradients(module, [2 * gradient for gradient in wanted if gradient is not None])


def test_a_module_in_training_can_be_copied_and_used_beside_the_trainer() -> None:
    """An average of the weights, a validation between steps, a second trainer on the same module."""
    module, batch = classifier()
    average = torch.optim.swa_utils.AveragedModel(module)
    with DataParallel(module, TWO) as trainer, DataParallel(module, ["host:0"]) as other:
        optimizer = trainer.optimizer(torch.optim.SGD, lr=0.1)
        for _ in range(3):
            trainer.step(classify, batch)
            optimizer.step()
            optimizer.zero_grad()
            average.update_parameters(module)
            with torch.no_grad():
                torch.testing.assert_close(other.predict(batch[0]), module(batch[0]))
        other.step(classify, batch)
        _, wanted = plain(module, classify, batch)
        assert_same_gradients(module, wanted)
    assert int(average.n_averaged) == 3
    assert len(gradients(module)) == 4
