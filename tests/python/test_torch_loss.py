"""`DataParallel.loss`, whose backward is the caller's, and losses that are not finite."""

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
from torch.nn import functional

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
    module_of,
    plain,
    words,
    worst_difference,
)

COUNTS = [1, 2, 3]


def scaled_in_place(loss: torch.Tensor) -> torch.Tensor:
    loss /= 4
    return loss


USES: dict[str, Callable[[Any, Any, Any], Any]] = {
    "itself": lambda loss, module, batches: loss(batches[0]),
    "a factor and a penalty": lambda loss, module, batches: (
        3 * loss(batches[0]) + 0.1 * sum(parameter.square().sum() for parameter in module.parameters())
    ),
    "a sum of two": lambda loss, module, batches: loss(batches[0]) + loss(batches[1]),
    "changed in place": lambda loss, module, batches: scaled_in_place(loss(batches[0])),
}


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("use", USES)
def test_what_is_computed_from_the_loss_has_the_gradient_of_one_device(count: int, use: str) -> None:
    module, *batches = classifier(17)[0], classifier(17)[1], classifier(16, seed=1)[1]
    frozen = use == "changed in place"
    module[0].weight.requires_grad_(not frozen)
    reference = copy.deepcopy(module)
    with DataParallel(module, hosts(count)) as trainer:
        for step in (1, 2):  # they add up, also with those of a step
            wanted = USES[use](lambda batch: classify(reference, batch), reference, batches)
            wanted.backward()
            loss = USES[use](lambda batch: trainer.loss(classify, batch), module, batches)
            assert (gradients(module) == [None] * 4) == (step == 1)
            assert loss.item() == pytest.approx(wanted.item(), rel=1e-14)
            assert loss.dim() == 0
            loss.backward()
            assert_same_gradients(module, gradients(reference))
            classify(reference, batches[1]).backward()
            trainer.step(classify, batches[1])
            assert_same_gradients(module, gradients(reference))
        assert trainer.report()["steps"] == (6 if use == "a sum of two" else 4)
    assert (module[0].weight.grad is None) == frozen


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


def test_gradients_are_taken_over_without_a_copy_and_free_when_the_loss_is_dropped() -> None:
    module, batch = classifier(16)
    with DataParallel(module, TWO) as trainer:
        loss = trainer.loss(classify, batch)
        addresses = [gradient.data_ptr() for gradient in loss.grad_fn.gradients_of.__self__._gradients]  # type: ignore[union-attr]
        loss.backward()
        assert [parameter.grad.data_ptr() for parameter in module.parameters()] == addresses
        loss = trainer.loss(classify, batch)
        carried = weakref.ref(loss.grad_fn.gradients_of.__self__)  # type: ignore[union-attr]
        assert carried() is not None
        gc.disable()
        try:
            del loss
            assert carried() is None
        finally:
            gc.enable()


@pytest.mark.parametrize("scaled", [True, False])
def test_a_scaler_scales_once(scaled: bool) -> None:
    module, batch = classifier(16)
    expected = plain(module, classify, batch)[1]
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    seen: list[float] = []

    def watched(replica: Any, part: Any) -> Any:
        output = replica(part[0])
        output.register_hook(lambda gradient: seen.append(float(gradient.abs().max())))
        return nn.functional.cross_entropy(output, part[1])

    with DataParallel(module, TWO) as trainer:
        loss = trainer.loss(watched, batch, scaler=scaler) / 2
        (scaler.scale(loss) if scaled else loss).backward()
    assert max(seen) > 1  # the devices have scaled their losses: without that it would be at most 1/16
    factor = 512 if scaled else 0.5
    assert_same_gradients(module, [gradient * factor for gradient in expected if gradient is not None])
    if scaled:
        scaler.unscale_(torch.optim.SGD(module.parameters(), lr=0.0))
        assert_same_gradients(module, [gradient / 2 for gradient in expected if gradient is not None])


@pytest.mark.parametrize("count", [1, 2])
def test_tensors_outside_get_their_gradient_at_backward_and_their_hooks_run_once(count: int) -> None:
    """Also those that are new each time."""
    module, batch = classifier(16)
    factor = nn.Parameter(torch.tensor(1.5, dtype=torch.float64))
    factor.grad = torch.tensor(7.0, dtype=torch.float64)
    seen: list[torch.Tensor] = []
    factor.register_hook(lambda gradient: seen.append(gradient) or 2 * gradient)  # type: ignore[func-returns-value]

    def loss_fn(module: Any, batch: Any, shift: torch.Tensor) -> Any:
        return nn.functional.cross_entropy(module(batch[0]) * factor + shift, batch[1])

    with DataParallel(module, hosts(count)) as trainer:
        for step in range(1, 7):
            shift = torch.zeros(3, dtype=torch.float64, requires_grad=True)
            wanted = torch.autograd.grad(loss_fn(module, batch, shift), [factor, shift])  # runs the hook, too
            seen.clear()
            loss = trainer.loss(lambda m, b, s=shift: loss_fn(m, b, s), batch)  # type: ignore[misc]
            assert shift.grad is None
            (3 * loss).backward()
            assert len(seen) == 1
            torch.testing.assert_close(factor.grad, 7 + step * 3 * wanted[0], rtol=1e-12, atol=0)
            torch.testing.assert_close(shift.grad, 3 * wanted[1], rtol=1e-12, atol=1e-14)


def test_a_module_that_cannot_be_copied_still_steps_on_one_device_after_a_loss_that_was_refused() -> None:
    module, batch = classifier(16)
    module.lock = threading.Lock()
    with DataParallel(module, ["host:0"]) as trainer:
        with pytest.raises(InvalidArgument, match="cannot be copied"):
            trainer.loss(classify, batch)
        trainer.step(classify, batch)
    assert module[0].weight.grad is not None


def test_parameters_that_the_loss_does_not_reach_keep_their_gradient_and_may_be_written() -> None:
    module, batch = classifier(16)
    module.spare = nn.Linear(2, 2)
    module.spare.weight.grad = torch.ones(2, 2)

    def loss_fn(replica: Any, part: Any) -> Any:
        return nn.functional.cross_entropy(replica[2](replica[1](replica[0](part[0]))), part[1])

    with DataParallel(module, TWO) as trainer:
        loss = trainer.loss(loss_fn, batch)
        with torch.no_grad():
            module.spare.weight.add_(1)
        loss.backward()
        assert module.spare.weight.grad.equal(torch.ones(2, 2))
        assert module.spare.bias.grad is None
        assert module[0].weight.grad is not None
        loss = trainer.loss(loss_fn, batch)
        with torch.no_grad():
            module[2].weight.add_(1)
        with pytest.raises(RuntimeError, match=r"parameter 2\.weight was written in place"):
            loss.backward()


@pytest.mark.parametrize("count", [1, 2])
def test_a_failure_leaves_gradients_as_they_were_and_the_next_loss_works(count: int) -> None:
    module, batch = words(16, 0)
    expected = plain(module, loss_of_words, batch)[1]

    def fails(replica: Any, part: Any) -> Any:
        raise ValueError("broken")

    with DataParallel(module, hosts(count)) as trainer:
        with pytest.raises(ValueError, match="broken"):
            trainer.loss(fails, batch)
        with torch.no_grad(), pytest.raises(InvalidArgument, match="loss: called under no_grad"):
            trainer.loss(loss_of_words, batch)
        with pytest.raises(RuntimeError, match="create_graph=True"):
            trainer.loss(loss_of_words, batch).backward(create_graph=True)
        loss = trainer.loss(loss_of_words, batch, weight=torch.zeros(16), total=5)
        assert loss.item() == 0
        loss.backward()
        assert gradients(module) == [None] * len(expected)
        loss = trainer.loss(loss_of_words, batch, cost=batch["length"])
        loss.backward(retain_graph=True)
        with pytest.raises(RuntimeError, match="second time"):
            loss.backward()
    assert_same_gradients(module, expected)


@pytest.mark.parametrize("count", [1, 2])
def test_buffers_and_attributes_follow_as_after_a_step(count: int) -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        m.runs += 1
        m.seen = 5
        return m.linear(x)

    module, batch = module_of(forward, linear=nn.Linear(6, 3), runs=torch.zeros(())), classifier(16)[1]
    with DataParallel(module, hosts(count), micro_batch=None) as trainer:
        trainer.loss(classify, batch)
    assert module.runs.item() == 1
    assert module.seen == 5


def labelled(module: nn.Module, batch: Any) -> torch.Tensor:
    """The mean over the items that have a label."""
    return functional.cross_entropy(module(batch[0]), batch[1], ignore_index=-100)


def sparse_labels() -> tuple[nn.Module, tuple[torch.Tensor, torch.Tensor]]:
    module, (x, y) = classifier(8)
    y[4:] = -100
    return module, (x, y)


@pytest.mark.parametrize("call", ["step", "loss"])
def test_a_slice_without_labels_is_an_error_that_names_the_weight(call: str) -> None:
    module, batch = sparse_labels()
    loss, wanted = plain(module, labelled, batch)
    module.zero_grad()
    with DataParallel(module, TWO, balance="even") as trainer:
        with pytest.raises(InvalidArgument, match=r"host:1 .* begins with item 4 is not finite.*weight="):
            getattr(trainer, call)(labelled, batch)
        assert gradients(module) == [None] * 4
        got = trainer.step(labelled, batch, weight=batch[1] != -100)
    assert got.item() == pytest.approx(float(loss))
    assert_same_gradients(module, wanted)


def test_it_is_seen_under_a_scaler_by_the_loss_alone() -> None:
    module, batch = sparse_labels()
    scaler = torch.amp.GradScaler("cpu", init_scale=3e38)  # gradients may overflow under a scaler
    with DataParallel(module, TWO, balance="even") as trainer:
        with pytest.raises(InvalidArgument, match="is not finite"):
            trainer.step(labelled, batch, scaler=scaler)
        loss = trainer.step(lambda m, b: labelled(m, b) * 1e280, batch, weight=batch[1] != -100, scaler=scaler)
    assert loss.isfinite()
    assert any(not one.isfinite().all() for one in gradients(module) if one is not None)


def test_a_loss_that_is_not_finite_on_one_device_either_or_overflows_under_dropout_is_the_result() -> None:
    module, (x, y) = classifier(8)

    def dropped(replica: nn.Module, part: Any) -> torch.Tensor:
        loss = functional.dropout(replica(part[0]), 0.5).square().mean()
        return loss * torch.inf if len(part[1]) < 8 and part[0][0, 0] == x[4, 0] else loss

    with DataParallel(module, TWO, balance="even") as trainer:
        assert trainer.step(dropped, (x, y)).isinf()
        x[5] = torch.nan
        assert trainer.step(labelled, (x, y)).isnan()
        assert trainer.step(lambda m, b: labelled(m, b) * torch.inf, (x, y)).isnan()


def test_looking_at_the_whole_batch_leaves_no_trace() -> None:
    def forward(m: Any, x: torch.Tensor) -> torch.Tensor:
        m.calls += 1
        return functional.dropout(m.norm(m.linear(x)), 0.5)

    def draws() -> Any:
        return module_of(forward, linear=nn.Linear(6, 3), norm=nn.BatchNorm1d(3), calls=0)

    module, (x, y) = draws(), sparse_labels()[1]
    x[0] = torch.nan
    with DataParallel(module, TWO, balance="even", micro_batch=4) as trainer:
        trainer.step(labelled, (x.nan_to_num(), y.clamp(min=0)))
        torch.manual_seed(1)
        trainer.step(labelled, (x, y.clamp(min=0)))
        state, calls = torch.get_rng_state(), module.calls
    other = draws()
    other.load_state_dict(module.state_dict())
    assert calls == 2
    with DataParallel(other, TWO, balance="even", micro_batch=4) as trainer:
        trainer.step(labelled, (x.nan_to_num(), y.clamp(min=0)))
        torch.manual_seed(1)
        trainer.step(labelled, (x.nan_to_num(), y.clamp(min=0)))
    assert torch.equal(state, torch.get_rng_state())  # as a step that did not have to look
