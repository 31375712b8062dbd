"""What a loss function changes beside the module: its slice of the batch, in a step that runs items twice, and parameters outside of the module."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline import InvalidArgument
from paceline.torch import DataParallel
from torch_support import TWO, assert_same_gradients, classifier, classify, gradients, hosts, linear, module_of, plain

F = nn.functional


def draw(m: Any, x: torch.Tensor) -> Any:
    """Draws once it is told to: that step runs again, by then with seeds."""
    if m.p > 0.0:
        torch.rand(1)
    return m.layer(x)


def drawing() -> Any:
    torch.manual_seed(1)
    return module_of(draw, layer=nn.Linear(4, 3), p=0.0)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.rand(16, 4, generator=generator, dtype=torch.float64) * 255, torch.arange(16) % 4


def mask(module: Any, part: Any) -> Any:
    x, label = part
    label[label == 3] = -100
    x[x > 200] = float("nan")  # twice is once
    return F.cross_entropy(module(x.nan_to_num(0.0) / 255), label, ignore_index=-100, reduction="sum")


def scale(module: Any, part: Any) -> Any:
    return module(part[0].div_(255) - 0.5).square().sum()


@pytest.mark.parametrize("devices", [1, 2])
def test_an_edit_that_does_the_same_twice_is_free(devices: int) -> None:
    module, data = drawing().double(), batch()
    _, wanted = plain(module, lambda m, b: mask(m, b) / 16, batch())
    with DataParallel(module, TWO[:devices], reduction="sum") as trainer:
        trainer.step(mask, data)
        module.zero_grad()
        module.p = 0.5
        trainer.step(mask, batch())
        assert_same_gradients(module, wanted)
        seen = weakref.ref(data[0])
        del data
        gc.collect()
        assert seen() is None, "a batch is kept alive"


def test_an_edit_that_adds_up_is_refused_where_a_step_runs_again() -> None:
    module = drawing().double()
    with DataParallel(module, TWO, reduction="sum", balance="even") as trainer:
        trainer.step(scale, batch())
        module.zero_grad()
        module.p = 0.5
        told = r"batch\[0\] is changed in place.*x = x\.clone\(\).*Nothing was committed"
        with pytest.raises(InvalidArgument, match=told):
            trainer.step(scale, batch())
        assert gradients(module) == [None, None]
        _, wanted = plain(module, lambda m, b: scale(m, b) / 16, batch())
        trainer.step(scale, batch())  # it is known now that it draws
        assert_same_gradients(module, wanted)


def test_nothing_runs_again_over_a_batch_that_is_changed_in_part() -> None:
    module = drawing().double()

    def loss_fn(replica: Any, part: Any) -> Any:
        loss = scale(replica, part)
        if len(part[0]) > 2:
            raise torch.OutOfMemoryError("out of memory, says the test")
        return loss

    with DataParallel(module, TWO, reduction="sum", balance="even") as trainer:
        with pytest.raises(InvalidArgument, match="memory ran out"):
            trainer.step(loss_fn, batch())
        assert gradients(module) == [None, None]


def test_an_edit_on_one_device_does_not_disturb_the_backward_of_another() -> None:
    module, data = drawing().double(), batch()
    _, wanted = plain(module, lambda m, b: mask(m, b) / 16, batch())
    forward, edited = threading.Event(), threading.Event()

    def loss_fn(replica: Any, part: Any) -> Any:
        if threading.get_ident() in seen:  # a later micro-batch of this device
            return mask(replica, part)
        seen.append(threading.get_ident())
        if threading.get_ident() == seen[0]:
            loss = mask(replica, part)  # backward needs these labels
            forward.set()
            assert edited.wait(60.0)
        else:
            assert forward.wait(60.0)
            loss = mask(replica, part)
            edited.set()
        return loss

    seen: list[int] = []
    version = data[1]._version
    with DataParallel(module, TWO, reduction="sum", balance="even") as trainer:
        trainer.step(loss_fn, data)
    assert_same_gradients(module, wanted)
    assert data[1]._version > version  # the caller's own graphs notice


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("needs", ["its own tensor", "another one", "a closure"])
def test_an_edit_of_what_backward_needs_is_an_error_as_in_pytorch(devices: int, needs: str) -> None:
    words = torch.arange(32) % 4
    data = (words[:-1], words[1:]) if needs == "another one" else (words, words)

    def loss_fn(module: Any, part: Any) -> Any:
        outside = module(words).mean(0).expand(len(part[1]), -1)  # of all words
        scores = outside if needs == "a closure" else module(part[0])
        part[1][part[1] == 3] = 2
        return F.cross_entropy(scores, part[1], reduction="sum")

    module = nn.Sequential(nn.Embedding(4, 5), nn.Linear(5, 4))
    with DataParallel(module, TWO[:devices], reduction="sum", balance="even") as trainer:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            trainer.step(loss_fn, data)


entered, computed = threading.Lock(), threading.Event()


def test_a_wrapped_module_may_change_its_slices_too() -> None:
    """The second device changes its slice when the first one has a graph."""

    def forward(m: Any, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        assert entered.acquire(blocking=False) or computed.wait(60.0)
        label[label == 3] = -100
        loss = F.cross_entropy(m.layer(x), label, ignore_index=-100, reduction="none")
        computed.set()
        return loss

    module, (x, label) = module_of(forward, layer=linear(4, 3)), batch()
    masked = label.where(label != 3, -100)
    _, wanted = plain(
        module, lambda m, b: F.cross_entropy(m.layer(b[0]), b[1], ignore_index=-100, reduction="sum"), (x, masked)
    )
    version = label._version
    with DataParallel(module, TWO, balance="even") as wrapped:
        wrapped(x, label).sum().backward()
    assert_same_gradients(module, wanted)
    assert torch.equal(label, masked)
    assert label._version > version


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
