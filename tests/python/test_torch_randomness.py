"""Random draws on several devices: seeded, and the same again where activation checkpointing runs a forward again."""

from __future__ import annotations

import contextlib
import random
import threading
import warnings
from collections.abc import Callable
from typing import Any

import numpy.random
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from paceline import InvalidArgument
from paceline.torch import DataParallel, UnseededDrawsWarning
from torch_support import TWO, assert_same_gradients, classifier, classify, gradients, hosts, plain, worst_difference

REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])


class Checkpointed(nn.Module):
    """A block that is run again during backward, which may draw a mask."""

    def __init__(self, dropout: float, reentrant: bool | None, outer_dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(6, 10).double()
        self.block = nn.Sequential(nn.Linear(10, 10), nn.Tanh(), nn.Dropout(dropout), nn.Linear(10, 3)).double()
        self.outer = nn.Dropout(outer_dropout)
        self.reentrant = reentrant  # None: no checkpointing

    def forward(self, x: torch.Tensor) -> Any:
        inputs = self.outer(self.first(x))
        if self.reentrant is None:
            return self.block(inputs)
        return checkpoint(self.block, inputs, use_reentrant=self.reentrant)


def seeded_step(trainer: Any, loss_fn: Any, batch: Any, seed: int = 5) -> list[torch.Tensor | None]:
    """The gradients of one step from `seed`."""
    trainer.module.zero_grad()
    torch.manual_seed(seed)
    trainer.step(loss_fn, batch)
    return gradients(trainer.module)


def masks_agree(make: Any, reentrant: bool, **options: Any) -> None:
    """With checkpointing and without the same seed gives the same gradients."""
    _, batch = classifier()
    checkpointing, plainly = make(reentrant), make(None)
    plainly.load_state_dict(checkpointing.state_dict())
    with DataParallel(plainly, **options) as reference, DataParallel(checkpointing, **options) as trainer:
        for seed in range(20):  # however the devices' recomputations interleave
            wanted = seeded_step(reference, classify, batch, seed)
            assert worst_difference(seeded_step(trainer, classify, batch, seed), wanted) < 1e-12
        other = seeded_step(reference, classify, batch, seed + 1)
        assert worst_difference(other, wanted) > 1e-3, "nothing was drawn"


@REENTRANT
@pytest.mark.parametrize("outer", [0.0, 0.5])
def test_checkpointing_draws_the_masks_of_the_first_forward_again(reentrant: bool, outer: float) -> None:
    masks_agree(lambda kind: Checkpointed(0.5, kind, outer), reentrant, devices=hosts(3), balance="even", micro_batch=3)


class Nested(nn.Module):
    """Checkpoints inside of checkpoints, with draws in both."""

    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.inner = nn.ModuleList(Checkpointed(0.5, reentrant, 0.5) for _ in range(3))
        self.back = nn.ModuleList(nn.Linear(3, 6).double() for _ in range(3))
        self.head = nn.Linear(6, 3).double()
        self.reentrant = reentrant

    def both(self, index: int, x: torch.Tensor) -> Any:
        return x + self.back[index](nn.functional.dropout(self.inner[index](x), 0.2))

    def forward(self, x: torch.Tensor) -> Any:
        x = x.clone().requires_grad_()
        for index in range(3):
            if self.reentrant is None:
                x = self.both(index, x)
            else:
                x = checkpoint(self.both, index, x, use_reentrant=self.reentrant)
        return self.head(x)


@REENTRANT
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_checkpoints_inside_of_checkpoints_draw_the_same_again(reentrant: bool) -> None:
    masks_agree(Nested, reentrant, devices=TWO, balance="even")


@REENTRANT
@pytest.mark.parametrize(("dropout", "devices"), [(0.5, 1), (0.0, 2)])
def test_checkpointing_is_exact_on_one_device_and_without_draws(reentrant: bool, dropout: float, devices: int) -> None:
    module, (_, batch) = Checkpointed(dropout, reentrant), classifier()
    torch.manual_seed(5)
    _, wanted = plain(module, classify, batch)
    with DataParallel(module, hosts(devices), balance=[2, 1][:devices]) as trainer:
        torch.manual_seed(5)
        trainer.step(classify, batch)
    assert_same_gradients(module, wanted)


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


@pytest.mark.parametrize("what", ["a custom function", "hooks on saved tensors", "hooks on tensors"])
def test_what_is_no_recomputation_may_stand_beside_dropout(what: str) -> None:
    module, batch = classifier()
    module = nn.Sequential(nn.Dropout(0.5), module)

    def loss_fn(replica: Any, part: Any) -> Any:
        custom = what == "a custom function"
        output = replica(SCALED(part[0].clone().requires_grad_()) if custom else part[0])
        if what == "hooks on tensors":
            output.register_hook(lambda gradient: gradient * 2)
        return nn.functional.cross_entropy(output, part[1])

    saved = torch.autograd.graph.save_on_cpu() if what == "hooks on saved tensors" else contextlib.nullcontext()
    with DataParallel(module, TWO) as trainer, saved:
        trainer.step(loss_fn, batch)
    assert all(gradient is not None for gradient in gradients(module))


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


# Random numbers that no seed reaches are named once, and what a seed reaches is not.


class Recurrent(nn.Module):
    def __init__(self, dropout: float = 0.5) -> None:
        super().__init__()
        self.body = nn.LSTM(6, 5, 2, batch_first=True, dropout=dropout).double()
        self.head = nn.Linear(5, 3).double()

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.body(x[:, None].expand(-1, 4, -1))[0][:, -1])


def test_what_no_seed_reaches_is_said_once_and_by_name() -> None:
    module, (_, batch) = Recurrent(), classifier(32)
    with DataParallel(module, TWO, balance="even") as trainer:
        with pytest.warns(UnseededDrawsWarning, match=r"the dropout of nn\.LSTM"):
            trainer.step(classify, batch)
        with warnings.catch_warnings():
            warnings.simplefilter("error", UnseededDrawsWarning)
            trainer.step(classify, batch)
            trainer.predict(batch[0])


OWN = torch.Generator()
DRAWN_BY: dict[str, Callable[[], float]] = {
    "calls with generator=": lambda: torch.rand((), generator=OWN).item(),
    "numpy.random": numpy.random.random,
    "Python's random": random.random,
}


@pytest.mark.parametrize("name", DRAWN_BY)
def test_generators_of_a_loss_that_all_devices_share_are_named_where_the_caller_is(name: str) -> None:
    module, batch = classifier(32)

    def loss_fn(replica: Any, part: Any) -> Any:
        return classify(replica, part) * DRAWN_BY[name]()

    with DataParallel(module, TWO, balance="even") as trainer:
        with pytest.warns(UnseededDrawsWarning, match=f"drawn by {name} come") as told:
            trainer.step(loss_fn, batch)
        assert [one.filename for one in told] == [__file__]


def test_the_draws_of_another_thread_beside_a_step_are_named_with_the_cure() -> None:
    module, batch = classifier(32)

    def beside(replica: Any, part: Any) -> Any:
        client = threading.Thread(target=torch.randn, args=(3,))
        client.start()
        client.join()
        return classify(replica, part)

    cure = "another thread, which needs a torch.Generator of its own"
    with DataParallel(module, TWO, balance="even", prove=True) as trainer:
        trainer.step(beside, batch)
        (proof,) = [line for line in trainer.explain().splitlines() if line.startswith("Proof: ")]
        assert "not proved: random draws that cannot be repeated" in proof
        assert cure in proof
        with pytest.warns(UnseededDrawsWarning, match=cure):
            trainer.step(beside, batch)


def own_for_each(module: Any, part: Any) -> Any:
    """A generator that a loss makes for each micro-batch."""
    return classify(module, part) * torch.rand((), generator=torch.Generator().manual_seed(3)).item()


@pytest.mark.parametrize(
    ("module", "loss_fn"),
    [
        (nn.Sequential(nn.Dropout(), classifier(32)[0]), classify),
        (Recurrent(0.0), classify),
        (classifier(32)[0], own_for_each),
    ],
    ids=["dropout", "no dropout in nn.LSTM", "a generator of its own"],
)
def test_what_a_seed_reaches_is_not_warned_of(module: nn.Module, loss_fn: Any) -> None:
    _, batch = classifier(32)
    with DataParallel(module, TWO, balance="even") as trainer, warnings.catch_warnings():
        warnings.simplefilter("error", UnseededDrawsWarning)
        for _ in range(3):
            trainer.step(loss_fn, batch)
