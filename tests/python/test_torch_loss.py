"""`DataParallel.loss`: a loss whose ``backward`` hands out the gradients that the devices have computed."""

from __future__ import annotations

import copy
import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from paceline import InvalidArgument
from paceline.torch import DataParallel
from torch_support import (
    TWO,
    assert_same_gradients,
    classifier,
    classify,
    gradients,
    hosts,
    loss_of_words,
    plain,
    words,
    worst_difference,
)

COUNTS = [1, 2, 3]


def penalty(module: Any) -> Any:
    return sum(parameter.square().sum() for parameter in module.parameters())


@pytest.mark.parametrize("count", COUNTS)
def test_backward_gives_the_gradient_of_one_device(count: int) -> None:
    module, batch = classifier(17)
    wanted, expected = plain(module, classify, batch)
    with DataParallel(module, hosts(count)) as trainer:
        loss = trainer.loss(classify, batch)
        assert gradients(module) == [None] * 4
        assert loss.item() == pytest.approx(wanted.item(), rel=1e-14)
        assert loss.dim() == 0
        assert loss.requires_grad
        loss.backward()
    assert_same_gradients(module, expected)


@pytest.mark.parametrize("count", COUNTS)
def test_what_is_computed_from_the_loss_has_the_gradient_of_one_device(count: int) -> None:
    module, batch = classifier(16)
    reference, second = copy.deepcopy(module), classifier(16, seed=1)[1]
    (3 * classify(reference, batch) + 0.1 * penalty(reference)).backward()
    (classify(reference, second) / 4).backward()
    with DataParallel(module, hosts(count)) as trainer:
        (3 * trainer.loss(classify, batch) + 0.1 * penalty(module)).backward()
        (trainer.loss(classify, second) / 4).backward()
    assert_same_gradients(module, gradients(reference))


def test_two_losses_may_wait_for_one_backward() -> None:
    module, batch = classifier(16)
    second = classifier(16, seed=1)[1]
    wanted = [a + b for a, b in zip(plain(module, classify, batch)[1], plain(module, classify, second)[1], strict=True)]  # type: ignore[operator]
    with DataParallel(module, TWO) as trainer:
        first = trainer.loss(classify, batch)
        (first + trainer.loss(classify, second)).backward()
    assert_same_gradients(module, wanted)


def test_grad_of_autograd_takes_the_gradients_and_leaves_grad_alone() -> None:
    module, batch = classifier(16)
    expected = plain(module, classify, batch)[1]
    with DataParallel(module, TWO) as trainer:
        taken = torch.autograd.grad(trainer.loss(classify, batch), list(module.parameters()))
    assert worst_difference(taken, expected) < 1e-12
    assert gradients(module) == [None] * 4


@pytest.mark.parametrize("count", COUNTS)
def test_hooks_of_parameters_run_once_on_the_callers_thread_with_the_whole_gradient(count: int) -> None:
    module, batch = classifier(16)
    expected = plain(module, classify, batch)[1]
    seen: list[torch.Tensor] = []
    late: list[torch.Tensor] = []

    def double(gradient: torch.Tensor) -> torch.Tensor:
        seen.append(gradient.clone())
        return gradient * 2

    module[0].weight.register_hook(double)
    module[0].weight.register_post_accumulate_grad_hook(lambda parameter: late.append(parameter.grad.clone()))
    with DataParallel(module, hosts(count)) as trainer:
        loss = trainer.loss(classify, batch)
        assert not seen
        loss.backward()
    assert worst_difference(seen, expected[:1]) < 1e-12
    assert expected[0] is not None
    assert worst_difference(late, [2 * expected[0]]) < 1e-12


def test_gradients_are_taken_over_without_a_copy_where_nothing_multiplies_them() -> None:
    module, batch = classifier(16)
    with DataParallel(module, TWO) as trainer:
        loss = trainer.loss(classify, batch)
        carried = loss.grad_fn.carried  # type: ignore[union-attr]
        addresses = [gradient.data_ptr() for gradient in carried._gradients]
        loss.backward()
    assert [parameter.grad.data_ptr() for parameter in module.parameters()] == addresses


def test_a_scaler_scales_once() -> None:
    module, batch = classifier(16)
    expected = plain(module, classify, batch)[1]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    seen: list[float] = []

    def watched(replica: Any, part: Any) -> Any:
        output = replica(part[0])
        output.register_hook(lambda gradient: seen.append(float(gradient.abs().max())))
        return nn.functional.cross_entropy(output, part[1])

    optimizer = torch.optim.SGD(module.parameters(), lr=0.0)
    with DataParallel(module, TWO) as trainer:
        scaler.scale(trainer.loss(watched, batch, scaler=scaler) / 2).backward()
    assert max(seen) > 1  # the devices have scaled their losses: without that it would be at most 1/16
    assert_same_gradients(module, [gradient * 512 for gradient in expected if gradient is not None])
    scaler.unscale_(optimizer)
    assert_same_gradients(module, [gradient / 2 for gradient in expected if gradient is not None])


def test_a_loss_with_a_scaler_that_is_not_scaled_has_plain_gradients() -> None:
    module, batch = classifier(16)
    expected = plain(module, classify, batch)[1]
    with DataParallel(module, TWO) as trainer:
        trainer.loss(classify, batch, scaler=torch.amp.GradScaler("cpu", init_scale=1024.0)).backward()
    assert_same_gradients(module, expected)


def test_costs_and_weights_go_along() -> None:
    module, batch = words(24, 0)
    expected = plain(module, loss_of_words, batch)[1]
    with DataParallel(module, TWO) as trainer:
        trainer.loss(loss_of_words, batch, cost=batch["length"]).backward()
    assert_same_gradients(module, expected)


def test_tensors_outside_of_the_module_get_their_gradients_with_the_factor() -> None:
    module, batch = classifier(16)
    temperature = torch.tensor(1.5, dtype=torch.float64, requires_grad=True)
    temperature.grad = torch.tensor(7.0, dtype=torch.float64)
    wanted = torch.autograd.grad(nn.functional.cross_entropy(module(batch[0]) * temperature, batch[1]), temperature)[0]
    with DataParallel(module, TWO) as trainer:
        loss = trainer.loss(lambda m, b: nn.functional.cross_entropy(m(b[0]) * temperature, b[1]), batch)
        assert temperature.grad.item() == 7
        (3 * loss).backward()
    torch.testing.assert_close(temperature.grad, 7 + 3 * wanted, rtol=1e-12, atol=0)


@pytest.mark.parametrize("count", [1, 2])
def test_tensors_that_are_new_each_time_get_their_gradient_at_backward(count: int) -> None:
    module, batch = classifier(16)
    with DataParallel(module, hosts(count)) as trainer:
        for _ in range(6):
            shift = torch.zeros(3, dtype=torch.float64, requires_grad=True)
            wanted = torch.autograd.grad(nn.functional.cross_entropy(module(batch[0]) + shift, batch[1]), shift)[0]
            loss = trainer.loss(lambda m, b, s=shift: nn.functional.cross_entropy(m(b[0]) + s, b[1]), batch)  # type: ignore[misc]
            assert shift.grad is None
            (3 * loss).backward()
            torch.testing.assert_close(shift.grad, 3 * wanted, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("count", [1, 2])
def test_hooks_of_tensors_outside_of_the_module_run_once(count: int) -> None:
    module, batch = classifier(16)
    factor = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
    wanted = torch.autograd.grad(nn.functional.cross_entropy(module(batch[0]) * factor, batch[1]), factor)[0]
    seen: list[torch.Tensor] = []

    def double(gradient: torch.Tensor) -> torch.Tensor:
        seen.append(gradient)
        return 2 * gradient

    factor.register_hook(double)
    with DataParallel(module, hosts(count)) as trainer:
        trainer.loss(lambda m, b: nn.functional.cross_entropy(m(b[0]) * factor, b[1]), batch).backward()
    torch.testing.assert_close(factor.grad, 2 * wanted, rtol=1e-12, atol=0)
    assert len(seen) == 1


def test_the_loss_may_be_changed_in_place() -> None:
    module, batch = classifier(16)
    expected = [one / 4 for one in plain(module, classify, batch)[1] if one is not None]
    with DataParallel(module, TWO) as trainer:
        loss = trainer.loss(classify, batch)
        loss /= 4
        loss.backward()
    assert_same_gradients(module, expected)


def test_a_parameter_that_a_loss_does_not_reach_may_be_written_before_its_backward() -> None:
    module: Any = nn.ModuleDict({"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)})
    batch = torch.randn(8, 3)

    def loss_fn(replica: Any, part: Any) -> Any:
        return replica["a"](part).square().mean()

    with DataParallel(module, TWO) as trainer:
        first = trainer.loss(loss_fn, batch)
        with torch.no_grad():
            module["b"].weight.add_(1)
        first.backward()
    assert module["a"].weight.grad is not None


def test_sparse_gradients_of_one_device_accumulate() -> None:
    module: Any = nn.EmbeddingBag(10, 3, sparse=True, dtype=torch.float64)
    with DataParallel(module, ["host:0"]) as trainer:
        for _ in range(2):
            trainer.loss(lambda m, b: m(b).square().mean(), torch.arange(8).reshape(4, 2)).backward()
    assert module.weight.grad.is_sparse


def test_a_module_that_cannot_be_copied_still_steps_on_one_device_after_a_loss_that_was_refused() -> None:
    module, batch = classifier(16)
    module.lock = threading.Lock()
    with DataParallel(module, ["host:0"]) as trainer:
        with pytest.raises(InvalidArgument, match="cannot be copied"):
            trainer.loss(classify, batch)
        trainer.step(classify, batch)
    assert module[0].weight.grad is not None


def test_a_batch_without_weight_has_no_gradient_if_the_caller_names_the_total() -> None:
    module, batch = classifier(16)
    with DataParallel(module, TWO) as trainer:
        loss = trainer.loss(classify, batch, weight=torch.zeros(16), total=5)
        assert loss.item() == 0
        loss.backward()
    assert gradients(module) == [None] * 4


def test_parameters_that_the_loss_does_not_reach_keep_their_gradient() -> None:
    module, batch = classifier(16)
    module.spare = nn.Linear(2, 2)
    module.spare.weight.grad = torch.ones(2, 2)

    def loss_fn(replica: Any, part: Any) -> Any:
        return nn.functional.cross_entropy(replica[2](replica[1](replica[0](part[0]))), part[1])

    with DataParallel(module, TWO) as trainer:
        trainer.loss(loss_fn, batch).backward()
    assert module.spare.weight.grad.equal(torch.ones(2, 2))
    assert module.spare.bias.grad is None
    assert module[0].weight.grad is not None


def test_frozen_parameters_are_left_out() -> None:
    module, batch = classifier(16)
    module[0].weight.requires_grad_(False)
    expected = plain(module, classify, batch)[1]
    with DataParallel(module, TWO) as trainer:
        (2 * trainer.loss(classify, batch)).backward()
    assert module[0].weight.grad is None
    assert worst_difference(gradients(module)[1:], [2 * one for one in expected[1:] if one is not None]) < 1e-12


def test_sparse_gradients_of_one_device_are_handed_out() -> None:
    module: Any = nn.Sequential(
        nn.EmbeddingBag(10, 3, sparse=True, dtype=torch.float64), nn.Linear(3, 2, dtype=torch.float64)
    )
    batch = torch.randint(0, 10, (8, 4)), torch.randint(0, 2, (8,))
    expected = plain(module, classify, batch)[1]
    with DataParallel(module, ["host:0"]) as trainer:
        (2 * trainer.loss(classify, batch)).backward()
    got = gradients(module)
    assert got[0] is not None
    assert expected[0] is not None
    assert got[0].is_sparse
    torch.testing.assert_close(got[0].to_dense(), 2 * expected[0].to_dense())


def test_a_second_backward_is_an_error() -> None:
    module, batch = classifier(16)
    with DataParallel(module, TWO) as trainer:
        loss = trainer.loss(classify, batch)
        loss.backward(retain_graph=True)
        before = gradients(module)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert_same_gradients(module, before)


def test_a_graph_of_the_gradients_is_an_error() -> None:
    module, batch = classifier(16)
    with DataParallel(module, TWO) as trainer, pytest.raises(RuntimeError, match="create_graph=True"):
        trainer.loss(classify, batch).backward(create_graph=True)
    assert gradients(module) == [None] * 4


def test_a_parameter_that_was_written_in_between_is_an_error() -> None:
    module, batch = classifier(16)
    with DataParallel(module, TWO) as trainer:
        loss = trainer.loss(classify, batch)
        with torch.no_grad():
            module[2].weight.add_(1)
        with pytest.raises(RuntimeError, match=r"parameter 2\.weight was written in place"):
            loss.backward()


@pytest.mark.parametrize("count", [1, 2])
def test_a_failure_leaves_gradients_as_they_were_and_the_next_loss_works(count: int) -> None:
    module, batch = classifier(16)
    expected = plain(module, classify, batch)[1]
    with DataParallel(module, hosts(count)) as trainer:

        def fails(replica: Any, part: Any) -> Any:
            raise ValueError("broken")

        with pytest.raises(ValueError, match="broken"):
            trainer.loss(fails, batch)
        assert gradients(module) == [None] * 4
        trainer.loss(classify, batch).backward()
    assert_same_gradients(module, expected)


@pytest.mark.parametrize("count", [1, 2])
def test_loss_and_step_may_take_turns(count: int) -> None:
    module, batch = classifier(16)
    expected = [3 * one for one in plain(module, classify, batch)[1] if one is not None]
    with DataParallel(module, hosts(count)) as trainer:
        trainer.step(classify, batch)
        trainer.loss(classify, batch).backward()
        trainer.step(classify, batch)
        assert trainer.report()["steps"] == 3
    assert_same_gradients(module, expected)


@pytest.mark.parametrize("count", [1, 2])
def test_buffers_and_attributes_follow_as_after_a_step(count: int) -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(6, 3, dtype=torch.float64)
            self.runs: Any
            self.register_buffer("runs", torch.zeros(()))

        def forward(self, x: Any) -> Any:
            self.runs += 1
            self.seen = 5
            return self.linear(x)

    module, batch = Counts(), classifier(16)[1]
    with DataParallel(module, hosts(count), micro_batch=None) as trainer:
        trainer.loss(classify, batch)
    assert module.runs.item() == 1
    assert module.seen == 5


def test_the_gradients_are_free_when_the_loss_is_dropped() -> None:
    module, batch = classifier(16)
    with DataParallel(module, TWO) as trainer:
        loss = trainer.loss(classify, batch)
        carried = weakref.ref(loss.grad_fn.carried)  # type: ignore[union-attr]
        assert carried() is not None
        gc.disable()
        try:
            del loss
            assert carried() is None
        finally:
            gc.enable()


def test_loss_is_refused_without_gradients() -> None:
    module, batch = classifier(16)
    with (
        DataParallel(module, TWO) as trainer,
        torch.no_grad(),
        pytest.raises(InvalidArgument, match="loss: called under no_grad"),
    ):
        trainer.loss(classify, batch)
