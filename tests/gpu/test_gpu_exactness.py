"""The modules and random splits of the host's tests, on GPUs: gradients are those of plain PyTorch on one device."""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch

from gpu_support import TOLERANCE, Box
from paceline.torch import DataParallel
from test_torch_exactness import KINDS, made
from torch_support import classify, gradients, plain, worst_difference

SPLITS = 3


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_of_two_accumulated_batches_are_those_of_one_device(kind: str, dtype: torch.dtype, box: Box) -> None:
    for seed in range(SPLITS):
        rng = random.Random(f"{kind} {seed}")
        torch.manual_seed(seed)
        items = rng.randint(8, 40)
        module, batches, loss_fn = made(kind, items, dtype)
        module, batch, second = box.put(module), *map(box.put, batches)
        reference = copy.deepcopy(module)
        losses = [loss_fn(reference, each) for each in (batch, second)]
        for loss in losses:
            loss.backward()
        ratios = [rng.choice([0.0, 1.0, rng.uniform(0.1, 5)]) for _ in range(len(box))]
        ratios[rng.randrange(len(box))] += 1.0
        balance: Any = rng.choice(["auto", "even", ratios, ratios])
        with DataParallel(module, box.devices, balance=balance, micro_batch=rng.choice([None, 1, 3])) as trainer:
            first = trainer.step(loss_fn, batch)
            trainer.step(loss_fn, second)
            assert first.item() == pytest.approx(losses[0].item(), rel=TOLERANCE[dtype])
        assert worst_difference(gradients(module), gradients(reference)) <= TOLERANCE[dtype], (seed, balance)


def test_a_batch_in_host_memory_trains_as_one_on_the_gpu(box: Box) -> None:
    torch.manual_seed(0)
    module = box.put(torch.nn.Linear(6, 3).double())
    batch = torch.randn(50, 6, dtype=torch.double), torch.randint(0, 3, (50,))
    _, wanted = plain(module, classify, box.put(batch))
    with DataParallel(module, box.devices) as trainer:
        trainer.step(classify, batch)
    assert worst_difference(gradients(module), wanted) <= TOLERANCE[torch.float64]


def test_predictions_come_in_the_order_of_the_items(box: Box) -> None:
    torch.manual_seed(0)
    module, rows = box.put(torch.nn.Linear(6, 3).double()), box.put(torch.randn(53, 6, dtype=torch.double))
    with DataParallel(module, box.devices, micro_batch=5) as trainer:
        torch.testing.assert_close(trainer.predict(rows), module(rows).detach(), rtol=1e-12, atol=1e-12)


def test_mixed_precision_scales_and_unscales(box: Box) -> None:
    torch.manual_seed(0)
    module = box.put(torch.nn.Sequential(torch.nn.Linear(6, 32), torch.nn.ReLU(), torch.nn.Linear(32, 3)))
    batch = box.put((torch.randn(40, 6), torch.randint(0, 3, (40,))))
    kind = box.torch_device.type

    def loss_fn(replica: Any, part: Any) -> Any:
        with torch.autocast(kind, dtype=torch.bfloat16):
            return classify(replica, part)

    _, wanted = plain(module, loss_fn, batch)
    scaler = torch.amp.GradScaler(kind, init_scale=1024.0)
    with DataParallel(module, box.devices) as trainer:
        trainer.step(loss_fn, batch, scaler=scaler)
    unscaled = [None if gradient is None else gradient / 1024 for gradient in gradients(module)]
    assert worst_difference(unscaled, wanted) <= 2e-2  # bfloat16 keeps eight bits
