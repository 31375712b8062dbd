"""Losses that carry gradients, outputs beside the loss, calls, checkpoints and synchronised BatchNorm on GPUs."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import fake_device
from gpu_cases import BOXES, expect_same, module_and_batch, plain
from paceline import InvalidArgument
from paceline.torch import DataParallel
from torch_support import classify


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
