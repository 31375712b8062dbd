"""What a step does to ``.grad``: set, add, or leave alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from paceline import InvalidArgument
from paceline.torch import DataParallel
from torch_support import (
    DEVICES,
    TWO,
    assert_exact,
    assert_same_gradients,
    classifier,
    classify,
    gradients,
    hosts,
    module_of,
    plain,
)

pytestmark = pytest.mark.usefixtures("proved")


def halve(m: Any, x: torch.Tensor, number: torch.Tensor) -> Any:
    """`right` runs only for items whose number is 6 or more."""
    y, late = m.left(x).pow(2).sum(1), number >= 6
    return y + m.right(x).pow(2).sum(1) * late if late.any() else y


def per_item(module: nn.Module, batch: Any) -> Any:
    return module(*batch)


def halves() -> tuple[Any, tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(3)
    module = module_of(halve, **{name: nn.Linear(4, 2) for name in ("left", "right", "unused")})
    return module, (torch.randn(8, 4, dtype=torch.double), torch.arange(8))


@DEVICES
def test_gradients_that_no_micro_batch_touched_stay_none(devices: int) -> None:
    module, batch = halves()
    _, wanted = plain(module, lambda m, b: per_item(m, b).mean(), batch)
    with DataParallel(module, hosts(devices), balance="even") as trainer:
        trainer.step(per_item, batch)
        assert_same_gradients(module, wanted)
        assert gradients(module)[4:] == [None, None]
        module.zero_grad()
        trainer.step(per_item, (batch[0], batch[1] % 6))
        assert [gradient is None for gradient in gradients(module)] == [False, False, True, True, True, True]


@DEVICES
def test_what_no_micro_batch_touched_keeps_its_gradient_and_weight_decay_does_not_move_it(devices: int) -> None:
    module, batch = halves()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    with DataParallel(module, hosts(devices)) as trainer:
        optimizer = trainer.optimizer(torch.optim.AdamW, lr=0.1, weight_decay=0.5)
        trainer.step(per_item, batch)
        optimizer.step()
        moved = {name for name, value in module.state_dict().items() if not torch.equal(value, before[name])}
        assert moved == {"left.weight", "left.bias", "right.weight", "right.bias"}
        kept = module.unused.weight.grad = torch.full((2, 4), 7.0, dtype=torch.double)
        trainer.step(per_item, batch)
    assert module.unused.weight.grad is kept
    assert bool((kept == 7).all())


@DEVICES
def test_steps_add_up_until_gradients_are_zeroed(devices: int) -> None:
    module, batch = classifier()
    _, wanted = plain(module, classify, batch)
    with DataParallel(module, hosts(devices)) as trainer:
        for count in (1, 2, 3):
            trainer.step(classify, batch)
            assert_same_gradients(module, [count * gradient for gradient in wanted if gradient is not None])
        module.zero_grad(set_to_none=False)
        own = [parameter.grad for parameter in module.parameters()]
        trainer.step(classify, batch)
        assert_same_gradients(module, wanted)
        assert all(a.grad is b for a, b in zip(module.parameters(), own, strict=True)), "gradients were replaced"
        before = gradients(module)
        module.zero_grad()
        trainer.step(classify, (batch[0] * 2, batch[1]))
        assert all(map(torch.equal, own, before)), "they are not the user's own"  # type: ignore[arg-type]


@DEVICES
def test_frozen_parameters_get_no_gradient(devices: int) -> None:
    module, batch = classifier()
    module[0].weight.requires_grad_(False)
    assert_exact(module, classify, batch, devices)
    assert module[0].weight.grad is None


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.complex128], ids=str)
def test_other_types_of_parameters_are_summed_too(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = nn.ParameterList([nn.Parameter(torch.randn(5, 3, dtype=dtype))])
    batch = torch.randn(8, 5, dtype=dtype)

    def loss_fn(m: Any, b: torch.Tensor) -> Any:
        return (b @ m[0]).abs().pow(2).sum(1)

    _, wanted = plain(module, lambda m, b: loss_fn(m, b).float().mean(), batch)
    with DataParallel(module, hosts(3), balance=[2, 1, 1]) as trainer:
        trainer.step(loss_fn, batch)
    got, expected = gradients(module)[0], wanted[0]
    assert got is not None
    assert expected is not None
    assert got.dtype == dtype
    tolerance = 1e-12 if dtype == torch.complex128 else 2e-2
    assert float((got - expected).abs().max() / expected.abs().max()) < tolerance


def test_sparse_gradients_are_refused_by_name_on_several_devices_and_work_on_one() -> None:
    module, batch = nn.EmbeddingBag(10, 3, sparse=True, dtype=torch.float64), torch.arange(8).reshape(4, 2)
    with DataParallel(module, TWO) as trainer:
        with pytest.raises(InvalidArgument, match=r"weight is sparse.*sparse=False"):
            trainer.step(lambda m, b: m(b).square().sum(1), batch)
        assert gradients(module) == [None]
    _, (wanted,) = plain(module, lambda m, b: m(b).square().sum(1).mean(), batch)
    with DataParallel(module, ["host:0"]) as trainer:
        for call in (trainer.step, trainer.loss):  # which add up
            loss = call(lambda m, b: m(b).square().sum(1), batch)
            if call == trainer.loss:
                (2 * loss).backward()
    assert module.weight.grad is not None
    assert module.weight.grad.is_sparse
    assert wanted is not None
    torch.testing.assert_close(module.weight.grad.to_dense(), 3 * wanted.to_dense())
