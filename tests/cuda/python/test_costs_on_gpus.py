"""Items with costs on GPUs: gathered from where the batch is, gradients and outputs those of one device."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from gpu_cases import BOXES, expect_same, expect_step, module_and_batch, plain
from paceline.torch import DataParallel
from torch_support import classify


@pytest.mark.parametrize("devices", BOXES.values(), ids=BOXES)
@pytest.mark.parametrize("micro_batch", [None, 4])
def test_the_gradient_is_that_of_one_device(fake: Any, devices: list[str], micro_batch: int | None) -> None:
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
