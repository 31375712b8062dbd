"""What a call of `Pipeline` takes and gives: scalers, terms, totals, extras, predictions, hooks, optimizers. Each as on one device."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

from pipeline_models import (
    Batch,
    NanoGpt,
    accumulate,
    assert_equal,
    loss_inside,
    same,
    sequential,
    slices,
    text,
    two_stages,
    vectors,
)
from torch_support import classify, gradients, worst_difference


def twins(make: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = make()
    return model, copy.deepcopy(model)


def test_a_grad_scaler_scales_as_on_one_device() -> None:
    model, plain = twins(NanoGpt)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with two_stages(model) as trainer:
        for _ in range(4):
            model.zero_grad()
            plain.zero_grad()
            assert trainer.step(loss_inside, text(), scaler=scaler) < 10
            # A power of two scales without rounding.
            accumulate(plain, lambda *given: scaler.scale(loss_inside(*given)), text(), trainer)
            assert_equal(model, plain)


def test_several_terms_each_have_their_own_weight() -> None:
    (model, plain), counted = twins(sequential), torch.tensor([1.0, 0, 2, 1, 0, 3, 1, 1, 1])
    batch = (*vectors(), counted)

    def loss_fn(module: Any, part: Any) -> Any:
        output = module(part[0])
        weight = part[2]
        return {
            "class": functional.cross_entropy(output, part[1]),
            "size": (output.pow(2).mean(1) * weight).sum() / weight.sum().clamp(min=1e-9),
        }

    with two_stages(model) as trainer:
        for _ in range(4):
            trainer.step(loss_fn, batch, weight={"class": None, "size": counted})
            for part in slices(batch, trainer.report()["micro_batches"]):
                terms = loss_fn(plain, part)
                (terms["class"] * (len(part[0]) / 9) + terms["size"] * (part[2].sum() / counted.sum())).backward()
    assert worst_difference(gradients(model), gradients(plain)) < 1e-6


def test_loss_carries_gradients_to_backward() -> None:
    model, plain = twins(NanoGpt)
    with two_stages(model) as trainer:
        for _ in range(4):
            model.zero_grad()
            loss = trainer.loss(loss_inside, text())
            assert model.lm_head.weight.grad is None
            (loss * 3).backward()
        wanted = accumulate(plain, loss_inside, text(), trainer)
    assert same(gradients(model), [None if one is None else one * 3 for one in wanted])


def test_extras_come_back_in_the_order_of_the_items() -> None:
    model, batch = sequential(), vectors()

    def loss_fn(module: Any, part: Any) -> Any:
        output = module(part[0])
        return functional.cross_entropy(output, part[1]), {"output": output, "items": part[1]}

    with two_stages(model) as trainer:
        for _ in range(4):
            trainer.step(loss_fn, batch)
        assert torch.equal(trainer.extras["items"], batch[1])
        with torch.no_grad():
            torch.testing.assert_close(trainer.extras["output"], model(batch[0]))


def test_sums_of_samples_over_a_total_that_is_given() -> None:
    """collate=, total=, reduction= and accumulation over two steps."""
    (model, plain), (x, y) = twins(sequential), vectors(8)

    def loss_fn(module: Any, part: Any) -> Any:
        return functional.cross_entropy(module(part[0]), part[1], reduction="sum")

    def collate(samples: list[tuple[torch.Tensor, torch.Tensor]]) -> Batch:
        return tuple(torch.stack(column) for column in zip(*samples, strict=True))

    with two_stages(model, reduction="sum") as trainer:
        for _ in range(4):
            model.zero_grad(), plain.zero_grad()
            for half in (slice(0, 4), slice(4, 8)):
                trainer.step(loss_fn, list(zip(x[half], y[half], strict=True)), collate=collate, total=16)
            assert trainer.report()["micro_batches"] == [1, 1, 1, 1]
            (loss_fn(plain, (x, y)) / 16).backward()
    assert worst_difference(gradients(model), gradients(plain)) < 1e-6


def test_predict_keeps_the_order_and_leaves_gradients_alone() -> None:
    model, (x, _) = sequential(), vectors(17)
    with two_stages(model) as trainer:
        for _ in range(5):
            with torch.no_grad():
                torch.testing.assert_close(trainer.predict(x), model(x))
            trainer.step(classify, vectors())
        assert trainer.predict(x[:1]).shape == (1, 3)


def test_the_user_s_hooks_on_blocks_run_once_per_micro_batch() -> None:
    model, plain = twins(NanoGpt)
    calls: list[int] = []

    def halve(module: nn.Module, args: Any, output: torch.Tensor) -> torch.Tensor:
        calls.append(len(output))
        return output * 0.5

    for one in (model, plain):
        one.transformer["h"][2].register_forward_hook(halve)
        one.transformer["h"][2].register_forward_pre_hook(lambda module, args: (args[0] + 1,))
    with two_stages(model) as trainer:
        for _ in range(4):
            calls.clear()
            model.zero_grad()
            trainer.step(loss_inside, text())
        assert sorted(calls) == sorted(trainer.report()["micro_batches"])
        accumulate(plain, loss_inside, text(), trainer)
    assert_equal(model, plain)


@pytest.mark.parametrize("optimizer", [torch.optim.AdamW, torch.optim.SGD])
def test_the_optimizer_updates_as_on_one_device(optimizer: Any) -> None:
    model, plain = twins(NanoGpt)
    theirs = optimizer(plain.parameters(), lr=0.1)
    with two_stages(model) as trainer:
        ours = trainer.optimizer(optimizer, lr=0.1)
        for _ in range(5):
            trainer.step(loss_inside, text())
            accumulate(plain, loss_inside, text(), trainer)
            for each in (ours, theirs):
                each.step()
                each.zero_grad()
    assert all(map(torch.equal, model.parameters(), plain.parameters()))
