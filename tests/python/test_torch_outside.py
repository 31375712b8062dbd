"""Parameters outside of the module that a loss trains get the gradient of the batch, and keep theirs after a failure."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline import InvalidArgument
from paceline.torch import DataParallel
from torch_support import TWO, classifier, classify, hosts, linear

DEVICES = pytest.mark.parametrize("devices", [1, 2, 3])
BEFORE = pytest.mark.parametrize("before", [None, torch.ones(3, 3, dtype=torch.double)], ids=["none", "some"])


def outside(head: Any) -> Callable[[Any, Any], Any]:
    def loss_fn(module: Any, part: Any) -> Any:
        return nn.functional.cross_entropy(head(module(part[0])), part[1])

    return loss_fn


@DEVICES
def test_parameters_outside_of_the_module_get_the_gradient_of_the_batch(devices: int) -> None:
    torch.manual_seed(1)
    module, batch = classifier()
    head = linear(3, 3)
    reference, other = copy.deepcopy(module), copy.deepcopy(head)
    with DataParallel(module, hosts(devices), micro_batch=3) as trainer:
        for _ in range(4):
            trainer.step(outside(head), batch)
            outside(other)(reference, batch).backward()
            for mine, theirs in zip(head.parameters(), other.parameters(), strict=True):
                torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-11, atol=1e-13)


@DEVICES
@pytest.mark.parametrize("steps", [0, 3], ids=["at once", "after steps that worked"])
@BEFORE
def test_a_failed_step_leaves_no_gradient_outside_of_the_module(
    devices: int, steps: int, before: torch.Tensor | None
) -> None:
    module, batch = classifier()
    head = linear(3, 3)
    loss_fn, calls, failing = outside(head), [], [False]

    def failing_later(replica: Any, part: Any) -> Any:
        calls.append(1)
        if failing[0] and len(calls) >= 4:
            raise ZeroDivisionError
        return loss_fn(replica, part)

    with DataParallel(module, hosts(devices), micro_batch=2) as trainer:
        for _ in range(steps):
            trainer.step(failing_later, batch)
        failing[0] = True
        calls.clear()
        kept = None if before is None else before.clone()
        head.weight.grad, head.bias.grad = kept, None
        with pytest.raises(ZeroDivisionError):
            trainer.step(failing_later, batch)
    assert head.weight.grad is kept
    assert kept is None or torch.equal(kept, torch.ones_like(kept))
    assert head.bias.grad is None


@BEFORE
def test_a_failed_run_leaves_no_gradient_of_backward_by_hand_outside_of_the_module(before: torch.Tensor | None) -> None:
    module, batch = classifier()
    head = linear(3, 3)

    def failing(replica: Any, part: Any) -> None:
        part.weigh(outside(head)(replica, part.data)).backward()
        raise ZeroDivisionError

    head.weight.grad = kept = None if before is None else before.clone()
    with DataParallel(module, TWO, balance="even") as trainer, trainer.batch(batch) as whole:
        with pytest.raises(ZeroDivisionError):
            whole.run(failing)
    assert head.weight.grad is kept
    assert kept is None or torch.equal(kept, torch.ones_like(kept))


def test_a_failed_step_leaves_no_gradient_of_what_a_loss_depends_on_since_then() -> None:
    """Also after so many steps that graphs are not looked through in each."""
    module, batch = classifier()
    head, failing, calls = linear(3, 3), [False], list[int]()

    def loss_fn(replica: Any, part: Any) -> Any:
        calls.append(1)
        if failing[0] and len(calls) % 4 == 0:
            raise ZeroDivisionError
        return outside(head)(replica, part) if failing[0] else classify(replica, part)

    with DataParallel(module, TWO, micro_batch=4) as trainer:
        for _ in range(4):
            trainer.step(loss_fn, batch)
        failing[0] = True
        with pytest.raises(ZeroDivisionError):
            trainer.step(loss_fn, batch)
    assert [parameter.grad for parameter in head.parameters()] == [None, None]


def test_a_head_that_becomes_a_part_of_the_module_is_put_back_as_one() -> None:
    module, batch = classifier()
    head, failing = linear(3, 3), [False]

    def loss_fn(replica: Any, part: Any) -> Any:
        if failing[0]:
            raise ZeroDivisionError
        return outside(head)(replica, part)

    with DataParallel(module, TWO, balance="even") as trainer:
        trainer.step(loss_fn, batch)
        kept = head.weight.grad
        assert kept is not None
        module.append(head)
        failing[0] = True
        with pytest.raises(ZeroDivisionError):
            trainer.step(loss_fn, batch)
    assert head.weight.grad is kept


def test_finding_the_batch_size_leaves_no_gradient_outside_of_the_module() -> None:
    module, batch = classifier()
    head = linear(3, 3)
    with DataParallel(module, TWO) as trainer:
        trainer.find_batch_size(
            outside(head), lambda items: tuple(one[:items] for one in batch), smallest=8, largest=16, seconds=0.0
        )
    assert [parameter.grad for parameter in head.parameters()] == [None, None]


def test_a_hook_on_a_parameter_outside_of_the_module_is_refused_on_several_devices() -> None:
    module, batch = classifier()
    head = linear(3, 3)
    head.bias.register_hook(lambda gradient: gradient)
    head.bias.grad = before = torch.ones(3, dtype=torch.double)
    with DataParallel(module, TWO) as trainer:
        for _ in range(2):
            with pytest.raises(InvalidArgument, match=r"outside of the module has a gradient hook"):
                trainer.step(outside(head), batch)
            assert head.bias.grad is before
            assert all(parameter.grad is None for parameter in module.parameters())
