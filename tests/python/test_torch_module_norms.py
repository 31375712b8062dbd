"""Calls with ``batch_norm="synchronised"``: the devices meet in the forward, and again in the backward, which is another run."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from norm_cases import Images, assert_same, case, rows, same_buffers
from paceline.torch import DataParallel
from torch_support import TWO, assert_same_gradients, gradients, hosts

pytestmark = pytest.mark.filterwarnings("error:DataParallel. .*each micro-batch is normalised")


def contrast(outputs: torch.Tensor, others: torch.Tensor) -> torch.Tensor:
    """A loss that couples all items."""
    return nn.functional.cross_entropy(outputs @ others.T, torch.arange(len(outputs)))


def synchronised(module: nn.Module, devices: list[str] = TWO, balance: Any = (2, 1)) -> DataParallel:
    return DataParallel(module, devices, balance=list(balance), batch_norm="synchronised")


@pytest.mark.parametrize("kind", ["rows", "images"])
@pytest.mark.parametrize("balance", [[1], [3, 1], [1, 0, 2], [2, 1, 1]], ids=str)
def test_two_forwards_and_a_loss_over_both_are_those_of_one_device(balance: list[float], kind: str) -> None:
    module, (x, _) = case(kind)
    reference = copy.deepcopy(module)
    ours, theirs = (torch.optim.SGD(one.parameters(), lr=0.01) for one in (module, reference))
    with synchronised(module, hosts(len(balance)), balance) as parallel:
        for _ in range(2):
            wanted = contrast(reference(x), reference(x.flip(1)))
            wanted.backward()
            loss = contrast(parallel(x), parallel(x.flip(1)))
            loss.backward()
            assert loss.item() == pytest.approx(wanted.item(), rel=1e-12)
            assert_same(module, reference)
            for optimizer in (ours, theirs):
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():  # in training mode, without gradients
            torch.testing.assert_close(parallel(x), reference(x), rtol=0, atol=1e-12)
        assert same_buffers(module, reference)


def test_inputs_get_their_gradient_and_the_mode_may_change_before_the_backward() -> None:
    module, (x, _) = case("rows")
    reference = copy.deepcopy(module)
    mine, theirs = (x.clone().requires_grad_() for _ in range(2))
    reference(theirs).std(0).sum().backward()
    with synchronised(module) as parallel:
        outputs = parallel(mine)
        module.eval()
        torch.testing.assert_close(parallel(x), reference.eval()(x).detach(), rtol=0, atol=1e-12)  # no meeting
        outputs.std(0).sum().backward()
    assert_same_gradients(module, gradients(reference))
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-11, atol=1e-14)


def test_activation_checkpointing_meets_again_in_the_backward() -> None:
    class Checkpointed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = rows()

        def forward(self, x: torch.Tensor) -> Any:
            return checkpoint(self.inner, x, use_reentrant=False)

    torch.manual_seed(0)
    module = Checkpointed().double()
    reference = copy.deepcopy(module)
    x = torch.randn(11, 6).double()
    reference(x).std(0).sum().backward()
    with synchronised(module) as parallel:
        parallel(x).std(0).sum().backward()
    assert_same_gradients(module, gradients(reference))


def adversarial(generator: nn.Module, critic: nn.Module, x: torch.Tensor, noise: torch.Tensor) -> None:
    """One step of each network, as in PyTorch's DCGAN: the critic's second forward on the generator's outputs has both backward."""
    ones, losses = torch.ones(len(x)).double(), nn.BCEWithLogitsLoss()
    critic.zero_grad()
    losses(critic(x)[:, 0], ones).backward()
    fake = generator(noise)
    losses(critic(fake.detach())[:, 0], 0 * ones).backward()
    with torch.no_grad():
        for parameter in critic.parameters():
            assert parameter.grad is not None
            parameter.sub_(parameter.grad)
    generator.zero_grad()
    losses(critic(fake)[:, 0], ones).backward()


def test_a_loop_over_two_networks_stays_as_it_is() -> None:
    first, (noise, _) = case("rows")
    generator = nn.Sequential(first, nn.Linear(3, 6).double())
    critic, (x, _) = case("rows")
    twins = [copy.deepcopy(one) for one in (generator, critic)]
    with synchronised(generator) as ours, synchronised(critic, balance=(1, 2)) as theirs:
        for _ in range(2):
            adversarial(ours, theirs, x, noise)
            adversarial(twins[0], twins[1], x, noise)
    for module, twin in zip((generator, critic), twins, strict=True):
        assert_same(module, twin)


class Raising(torch.autograd.Function):
    """Raises in the backward of the slice with a marked item."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, marked: bool) -> torch.Tensor:
        ctx.marked = marked
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        if ctx.marked:
            raise ArithmeticError("on purpose")
        return gradients[0], None


@pytest.mark.parametrize("item", [0, 12], ids=["first device", "second device"])
def test_a_device_that_fails_in_the_backward_leaves_nobody_waiting(item: int) -> None:
    class Failing(Images):
        def forward(self, x: torch.Tensor) -> Any:
            apply: Any = Raising.apply
            inner = self.norms(self.first(x))
            inner = apply(inner, bool((x > 1e6).any()))
            return self.head(self.branch(inner).mean((2, 3)))

    _, (x, _) = case("images")
    module = Failing().double()
    with synchronised(module) as parallel:
        marked = x.clone()
        marked[item] += 1e7
        outputs = parallel(marked)
        with pytest.raises(ArithmeticError, match="on purpose") as raised:
            outputs.sum().backward()
        assert f"host:{int(item > 0)}" in str(getattr(raised.value, "__notes__", raised.value.__cause__))
        assert gradients(module) == [None] * len(gradients(module))
        reference = copy.deepcopy(module)
        parallel(x).std(0).sum().backward()
    reference(x).std(0).sum().backward()
    assert_same_gradients(module, gradients(reference))
