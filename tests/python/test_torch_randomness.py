"""Random draws: fine by themselves, refused together with activation checkpointing on several devices."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline import InvalidArgument
from paceline.torch import DataParallel
from torch_support import TWO, assert_same_gradients, classifier, classify, gradients, hosts, plain

REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])


class Checkpointed(nn.Module):
    """A block that is run again during backward, which may draw a mask."""

    def __init__(self, dropout: float, reentrant: bool, outer_dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10).double()
        self.block = nn.Sequential(nn.Linear(10, 10), nn.Tanh(), nn.Dropout(dropout), nn.Linear(10, 3)).double()
        self.outer = nn.Dropout(outer_dropout)
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.block, self.outer(self.first(x)), use_reentrant=self.reentrant)


@REENTRANT
def test_dropout_with_checkpointing_raises_on_several_devices(reentrant: bool) -> None:
    module, (_, batch) = Checkpointed(0.5, reentrant), classifier()
    with DataParallel(module, TWO, balance="even") as trainer:
        for _ in range(50):  # however the devices' recomputations interleave
            with pytest.raises(InvalidArgument, match=r"random draws.*activation checkpointing.*use one device"):
                trainer.step(classify, batch)
            assert gradients(module) == [None] * 6
        module.eval()  # draws nothing
        _, wanted = plain(module, classify, batch)
        trainer.step(classify, batch)
        assert_same_gradients(module, wanted)


@REENTRANT
def test_dropout_with_checkpointing_works_on_one_device(reentrant: bool) -> None:
    module, (_, batch) = Checkpointed(0.5, reentrant), classifier()
    torch.manual_seed(5)
    _, wanted = plain(module, classify, batch)
    with DataParallel(module, ["host:0"]) as trainer:
        torch.manual_seed(5)
        trainer.step(classify, batch)
    assert_same_gradients(module, wanted)


@REENTRANT
def test_checkpointing_without_draws_is_exact_on_several_devices(reentrant: bool) -> None:
    module, (_, batch) = Checkpointed(0.0, reentrant), classifier()
    _, wanted = plain(module, classify, batch)
    with DataParallel(module, TWO, balance=[2, 1]) as trainer:
        trainer.step(classify, batch)
    assert_same_gradients(module, wanted)


@REENTRANT
def test_draws_outside_of_the_checkpoint_raise_too(reentrant: bool) -> None:
    """The generator's state tells that somebody drew, not who; refusing is the safe side."""
    module, (_, batch) = Checkpointed(0.0, reentrant, outer_dropout=0.5), classifier()
    with DataParallel(module, TWO) as trainer, pytest.raises(InvalidArgument, match="random draws"):
        trainer.step(classify, batch)


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_dropout_alone_is_valid(devices: int) -> None:
    """Every item's mask is its own, and what is kept is scaled: so is the gradient of a linear module."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Dropout(0.25), nn.Linear(64, 1, bias=False)).double()
    batch = torch.ones(64, 64, dtype=torch.double)
    masks: list[torch.Tensor] = []
    module[0].register_forward_hook(lambda _, __, output: masks.append(output.detach()))
    with DataParallel(module, hosts(devices), balance="even") as trainer:
        trainer.step(lambda m, b: m(b).mean(), batch)
    gradient = gradients(module)[0]
    assert gradient is not None
    torch.testing.assert_close(gradient[0], torch.cat(masks).mean(0))
    assert set(torch.cat(masks).unique().tolist()) == {0.0, 1 / 0.75}
    assert torch.cat(masks).eq(0).double().mean().item() == pytest.approx(0.25, abs=0.05)
    assert len({tuple(mask.flatten().tolist()) for mask in masks}) == devices, "two devices drew the same mask"


class Scaled(torch.autograd.Function):
    """A function with a backward in Python: not a recomputation."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        ctx.save_for_backward(x)
        return x * 2

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return torch.where(x == x, gradient * 2, gradient)


SCALED: Any = Scaled.apply


def test_a_custom_function_with_dropout_is_no_recomputation() -> None:
    module, batch = classifier()
    drop = nn.Dropout(0.5)
    with DataParallel(module, TWO) as trainer:
        trainer.step(lambda m, b: classify(m, (SCALED(drop(b[0].clone().requires_grad_())), b[1])), batch)
    assert all(gradient is not None for gradient in gradients(module))


def test_hooks_on_saved_tensors_with_dropout_are_no_recomputation() -> None:
    module, batch = classifier()
    module = nn.Sequential(nn.Dropout(0.5), module)
    with DataParallel(module, TWO) as trainer, torch.autograd.graph.save_on_cpu():
        trainer.step(classify, batch)
    assert all(gradient is not None for gradient in gradients(module))


def test_tensor_hooks_with_dropout_are_no_recomputation() -> None:
    module, batch = classifier()
    module = nn.Sequential(nn.Dropout(0.5), module)

    def loss_fn(replica: Any, part: Any) -> Any:
        output = replica(part[0])
        output.register_hook(lambda gradient: gradient * 2)
        return nn.functional.cross_entropy(output, part[1])

    with DataParallel(module, TWO) as trainer:
        trainer.step(loss_fn, batch)
    assert all(gradient is not None for gradient in gradients(module))


def test_the_callers_generator_goes_on() -> None:
    module, batch = classifier()
    module = nn.Sequential(nn.Dropout(0.5), module)
    with DataParallel(module, TWO) as trainer:
        torch.manual_seed(1)
        before = torch.get_rng_state()
        trainer.step(classify, batch)
        assert not torch.equal(torch.get_rng_state(), before)
        module.eval()
        before = torch.get_rng_state()
        trainer.step(classify, batch)
        assert torch.equal(torch.get_rng_state(), before)


def test_dropout_with_checkpointing_raises_also_where_another_part_is_compiled() -> None:
    class Half(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.eager = Checkpointed(0.5, False)
            self.head = nn.Linear(3, 3).double()

        def forward(self, x: torch.Tensor) -> Any:
            return self.head(self.eager(x))

    module, (_, batch) = Half(), classifier()
    module.head.compile(backend="eager")
    with DataParallel(module, TWO, balance="even") as trainer:
        for _ in range(10):
            with pytest.raises(InvalidArgument, match=r"random draws.*activation checkpointing"):
                trainer.step(classify, batch)
