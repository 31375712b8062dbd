"""A function that changes its slice of the batch in place, in a step that runs its items twice."""

from __future__ import annotations

import gc
import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn

from paceline import InvalidArgument
from paceline.torch import DataParallel
from torch_support import TWO, assert_same_gradients, gradients, plain

F = nn.functional


class Drawing(nn.Module):
    """Draws once it is told to: that step runs again, by then with seeds."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer, self.p = nn.Linear(4, 3), 0.0

    def forward(self, x: torch.Tensor) -> Any:
        if self.p > 0.0:
            torch.rand(1)
        return self.layer(x)


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
    module, data = Drawing().double(), batch()
    _, wanted = plain(module, lambda m, b: mask(m, b) / 16, batch())
    with DataParallel(module, TWO[:devices], reduction="sum") as trainer:
        trainer.step(mask, data)
        module.zero_grad()
        module.p = 0.5
        trainer.step(mask, batch())
    assert_same_gradients(module, wanted)


def test_an_edit_that_adds_up_is_refused_where_a_step_runs_again() -> None:
    module = Drawing().double()
    with DataParallel(module, TWO, reduction="sum", balance="even") as trainer:
        trainer.step(scale, batch())
        module.zero_grad()
        module.p = 0.5
        with pytest.raises(
            InvalidArgument, match=r"batch\[0\] is changed in place.*x = x\.clone\(\).*Nothing was committed"
        ):
            trainer.step(scale, batch())
        assert gradients(module) == [None, None]
        _, wanted = plain(module, lambda m, b: scale(m, b) / 16, batch())
        trainer.step(scale, batch())  # it is known now that it draws
        assert_same_gradients(module, wanted)


@pytest.mark.parametrize("fails", [True, False])
def test_nothing_runs_again_over_a_batch_that_is_changed_in_part(fails: bool) -> None:
    module = Drawing().double()
    failed: list[bool] = []

    def loss_fn(replica: Any, part: Any) -> Any:
        loss = scale(replica, part)
        if fails and not failed and len(part[0]) > 2:
            failed.append(True)
            raise torch.OutOfMemoryError("out of memory, says the test")
        return loss

    with DataParallel(module, TWO, reduction="sum", balance="even") as trainer:
        if not fails:
            trainer.step(loss_fn, batch())
            return
        with pytest.raises(InvalidArgument, match="memory ran out"):
            trainer.step(loss_fn, batch())
        assert gradients(module) == [None, None]


def test_an_edit_on_one_device_does_not_disturb_the_backward_of_another() -> None:
    module, data = Drawing().double(), batch()
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


def relabel(labels: torch.Tensor) -> None:
    labels[labels == 3] = 2


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.table, self.out = nn.Embedding(4, 5), nn.Linear(5, 4)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.out(self.table(words))  # type: ignore[no-any-return]


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("overlap", [False, True])
def test_an_edit_of_what_backward_needs_is_an_error_as_in_pytorch(devices: int, overlap: bool) -> None:
    words = torch.arange(32) % 4
    data = (words[:-1], words[1:]) if overlap else (words, words)

    def loss_fn(module: Any, part: Any) -> Any:
        scores = module(part[0])
        relabel(part[1])
        return F.cross_entropy(scores, part[1], reduction="sum")

    with DataParallel(Words(), TWO[:devices], reduction="sum", balance="even") as trainer:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            trainer.step(loss_fn, data)


@pytest.mark.parametrize("devices", [1, 2])
def test_an_edit_of_what_a_closure_needs_is_an_error_as_in_pytorch(devices: int) -> None:
    words = torch.arange(32) % 4

    def loss_fn(module: Any, part: Any) -> Any:
        scores = module(words).mean(0).expand(len(part), -1)  # all words, from outside of the slice
        relabel(part)
        return F.cross_entropy(scores, part, reduction="sum")

    with DataParallel(Words(), TWO[:devices], reduction="sum", balance="even") as trainer:
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            trainer.step(loss_fn, words)


class Masking(nn.Module):
    """The second device changes its slice when the first one has a graph."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.layer = nn.Linear(4, 3).double()

    def forward(self, x: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
        first = entered.acquire(blocking=False)
        assert first or computed.wait(60.0)
        label[label == 3] = -100
        loss = F.cross_entropy(self.layer(x), label, ignore_index=-100, reduction="none")
        computed.set()
        return loss


entered, computed = threading.Lock(), threading.Event()


def test_a_wrapped_module_may_change_its_slices_too() -> None:
    module, (x, label) = Masking(), batch()
    masked = label.where(label != 3, -100)
    _, wanted = plain(
        module, lambda m, b: F.cross_entropy(m.layer(b[0]), b[1], ignore_index=-100, reduction="sum"), (x, masked)
    )
    wrapped, version = DataParallel(module, TWO, balance="even"), label._version
    wrapped(x, label).sum().backward()
    wrapped.close()
    assert_same_gradients(module, wanted)
    assert torch.equal(label, masked)
    assert label._version > version


def test_no_batch_is_kept_alive() -> None:
    module, data = Drawing().double(), batch()
    with DataParallel(module, TWO, reduction="sum") as trainer:
        trainer.step(mask, data)
        seen = weakref.ref(data[0])
        del data
        gc.collect()
        assert seen() is None
