"""Buffers: from the user's module to the replicas before a step, from the busiest device back after it, untouched by a failure."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from paceline import InvalidArgument
from paceline.torch import DataParallel
from torch_support import TWO, assert_same_gradients, hosts, plain

DEVICES = pytest.mark.parametrize("devices", [1, 2, 3])


def mean_of_squares(module: nn.Module, batch: torch.Tensor) -> Any:
    return module(batch).pow(2).mean()


def batch_norm() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)).double()


def values(module: nn.Module) -> list[torch.Tensor]:
    return [buffer.clone() for buffer in module.buffers()]


def same(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def after_plain_steps(module: nn.Module, batch: torch.Tensor, steps: int = 1) -> list[torch.Tensor]:
    """The buffers after plain forward passes over `batch`."""
    reference = copy.deepcopy(module)
    for _ in range(steps):
        reference(batch)
    return values(reference)


def test_statistics_come_from_the_device_that_ran_most_items() -> None:
    module = batch_norm()
    batch = torch.randn(16, 4, dtype=torch.double)
    wanted = after_plain_steps(module, batch[4:13])
    with DataParallel(module, hosts(3), balance=[4, 9, 3]) as trainer:
        trainer.step(mean_of_squares, batch)
        assert list(trainer.shares.values()) == [4, 9, 3]
    for ours, theirs in zip(module.buffers(), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@DEVICES
def test_statistics_go_on_from_step_to_step_on_every_device(devices: int) -> None:
    """All devices see the same items here, so whichever ran most, the statistics are those of plain PyTorch."""
    module = batch_norm()
    part = torch.randn(4, 4, dtype=torch.double)
    wanted = after_plain_steps(module, part, steps=6)
    with DataParallel(module, hosts(devices), balance="even") as trainer:
        for _ in range(6):
            trainer.step(mean_of_squares, part.repeat(devices, 1))
    for ours, theirs in zip(module.buffers(), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    assert module[1].num_batches_tracked.item() == 6  # type: ignore[index]


def test_one_device_has_the_statistics_of_plain_pytorch() -> None:
    module = batch_norm()
    batch = torch.randn(32, 4, dtype=torch.double)
    wanted = after_plain_steps(module, batch)
    with DataParallel(module, ["host:0"]) as trainer:
        trainer.step(mean_of_squares, batch)
    for ours, theirs in zip(module.buffers(), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_predicting_uses_the_present_statistics() -> None:
    module = batch_norm()
    batch = torch.randn(8, 4, dtype=torch.double)
    with DataParallel(module, TWO, balance="even") as trainer:
        trainer.step(mean_of_squares, batch)
        module.eval()
        torch.testing.assert_close(trainer.predict(batch), module(batch).detach())
        module[1].running_mean.add_(1.0)  # type: ignore[index]
        torch.testing.assert_close(trainer.predict(batch), module(batch).detach())


class Averaging(nn.Module):
    """A running average that is assigned anew instead of written in place, and one that appears in the first forward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.register_buffer("average", torch.zeros((), dtype=torch.double))
        self.register_buffer("first", None)
        self.average: torch.Tensor
        self.first: torch.Tensor | None

    def forward(self, x: torch.Tensor) -> Any:
        self.average = 0.5 * self.average + x.mean()
        if self.first is None:
            self.first = torch.ones(3)
        return self.linear(x)


@DEVICES
@pytest.mark.parametrize("runs", [1, 2, 3])
def test_buffers_that_are_assigned_anew_come_back(devices: int, runs: int) -> None:
    """Several times in a step, too: Python gives the memory of a dropped tensor to the next one, with the same id."""
    module = Averaging()
    part = torch.ones(2, 4, dtype=torch.double)
    expected = 0.0
    with DataParallel(module, hosts(devices), balance="even", micro_batch=2) as trainer:
        for _ in range(8):
            trainer.step(mean_of_squares, part.repeat(devices * runs, 1))
            for _ in range(runs):
                expected = 0.5 * expected + 1.0
            assert module.average.item() == pytest.approx(expected)


@DEVICES
def test_a_buffer_that_was_none_comes_back(devices: int) -> None:
    module = Averaging()
    with DataParallel(module, hosts(devices)) as trainer:
        trainer.step(mean_of_squares, torch.ones(8, 4, dtype=torch.double))
        assert module.first is not None
        assert module.first.tolist() == [1, 1, 1]
        module.first = None
        trainer.step(mean_of_squares, torch.ones(8, 4, dtype=torch.double))
        assert module.first is not None


@DEVICES
def test_what_the_user_assigns_to_a_buffer_reaches_every_device(devices: int) -> None:
    module = Averaging()
    seen: list[float] = []

    def loss_fn(replica: Any, batch: torch.Tensor) -> Any:
        seen.append(replica.average.item())
        return mean_of_squares(replica, batch)

    with DataParallel(module, hosts(devices), balance="even") as trainer:
        for value in range(6):
            module.average = torch.tensor(float(value), dtype=torch.double)
            trainer.step(loss_fn, torch.zeros(6, 4, dtype=torch.double))
            assert seen[-devices:] == [value] * devices


class Masked(nn.Module):
    """A constant mask whose rows are one and the same memory, as `expand` makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.register_buffer("mask", torch.tensor([1.0, 0, 1, 1]).double().expand(3, 4))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> Any:
        self.steps += 1  # type: ignore[operator,assignment]
        return self.linear(x * self.mask[0])  # type: ignore[index]


@DEVICES
def test_expanded_buffers_work_also_when_a_step_fails(devices: int) -> None:
    module = Masked()
    batch = torch.ones(6, 4, dtype=torch.double)
    with DataParallel(module, hosts(devices), balance="even") as trainer:
        trainer.step(mean_of_squares, batch)
        with pytest.raises(ZeroDivisionError):
            trainer.step(lambda m, b: m(b).sum() / 0 if 1 / 0 else None, batch)  # type: ignore[arg-type,return-value]
        trainer.step(mean_of_squares, batch)
    assert module.steps.item() == 2  # type: ignore[operator]


class Codebook(nn.Module):
    """Writes its buffer through ``.data``, which no version counter sees, and keeps a large one that never changes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        self.register_buffer("codes", torch.zeros(4, dtype=torch.double))
        self.register_buffer("table", torch.arange(1 << 16).double())

    def forward(self, x: torch.Tensor) -> Any:
        self.codes.data.add_(x.sum(0))  # type: ignore[operator]
        return self.linear(x) + self.table[:4]  # type: ignore[index]


@DEVICES
def test_what_is_written_behind_the_version_counter_comes_back(devices: int) -> None:
    module = Codebook()
    table, codes = module.table, module.codes
    values = torch.arange(1 << 16).double()
    with DataParallel(module, hosts(devices), balance="even") as trainer:
        for step in range(1, 5):
            trainer.step(mean_of_squares, torch.ones(2 * devices, 4, dtype=torch.double))
            assert module.codes.tolist() == [2.0 * step] * 4  # type: ignore[operator]
    assert (module.table is table, module.codes is codes) == (True, True), "buffers stay the user's tensors"
    assert torch.equal(module.table, values)  # type: ignore[arg-type]


@DEVICES
@pytest.mark.parametrize("make", [batch_norm, Averaging], ids=["in place", "assigned"])
def test_buffers_are_as_before_after_a_failure(devices: int, make: Any) -> None:
    module = make()
    batch = torch.randn(12, 4, dtype=torch.double)

    def fail_at_the_end(replica: nn.Module, part: torch.Tensor) -> Any:
        loss = mean_of_squares(replica, part)
        if torch.equal(part[-1], batch[-1]):
            raise LookupError("at the end")
        return loss

    with DataParallel(module, hosts(devices), balance="even") as trainer:
        for _ in range(2):
            before, objects = values(module), list(module.buffers())
            with pytest.raises(LookupError):
                trainer.step(fail_at_the_end, batch)
            assert same(values(module), before)
            assert all(a is b for a, b in zip(module.buffers(), objects, strict=True))
            wanted = after_plain_steps(module, batch[: len(batch) // devices])
            trainer.step(mean_of_squares, torch.cat([batch[: len(batch) // devices]] * devices))
            for ours, theirs in zip(values(module), wanted, strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


class Calls(TorchDispatchMode):
    """Counts the operators that the caller's thread runs. The workers run under it, too."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()
        self._caller = threading.get_ident()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if threading.get_ident() == self._caller:
            self.counts[func.__name__] += 1
        return func(*args, **(kwargs or {}))


def test_one_device_keeps_many_buffers_by_one_copy_for_each_type() -> None:
    module = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(53)), nn.Linear(4, 4))
    module.register_buffer("scale", torch.ones(()))
    batch = torch.randn(8, 4)
    with DataParallel(module, ["host:0"]) as trainer:
        trainer.step(mean_of_squares, batch)
        with Calls() as calls:
            trainer.step(mean_of_squares, batch)
        assert calls.counts["cat.out"] == 2, "160 buffers of two types"
        assert calls.counts["clone.default"] == 1, "the loss"


def test_one_device_goes_back_to_buffers_that_have_changed_between_steps() -> None:
    module: Any = batch_norm()
    norm = module[1]
    batch = torch.randn(8, 4, dtype=torch.double)

    def fails(replica: nn.Module, part: torch.Tensor) -> Any:
        mean_of_squares(replica, part)
        raise LookupError

    with DataParallel(module, ["host:0"]) as trainer:
        trainer.step(mean_of_squares, batch)
        for change in (
            lambda: norm.running_mean.fill_(3.0),
            lambda: setattr(norm, "running_mean", torch.full((4,), 5.0, dtype=torch.double)),
            lambda: setattr(norm.running_mean, "data", torch.full((4,), 6.0, dtype=torch.double)),
            lambda: setattr(norm, "num_batches_tracked", torch.tensor(7, dtype=torch.int32)),
            lambda: setattr(norm, "num_batches_tracked", None),
            lambda: norm.register_buffer("more", torch.arange(3)),
            lambda: setattr(norm.more, "data", torch.arange(5)),
            lambda: norm.register_buffer("renamed", norm._buffers.pop("more")),
            lambda: module.append(nn.BatchNorm1d(4).double()),
        ):
            change()
            before, objects = values(module), list(module.buffers())
            with pytest.raises(LookupError):
                trainer.step(fails, batch)
            assert same(values(module), before)
            assert all(a is b for a, b in zip(module.buffers(), objects, strict=True))
            trainer.step(mean_of_squares, batch)
            assert not same(values(module), before)


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_a_sparse_buffer_is_shared_until_it_is_replaced(devices: int) -> None:
    class Net(nn.Module):
        adjacency: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2).double()
            self.register_buffer("adjacency", torch.eye(4, dtype=torch.double)[:3].to_sparse())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = self.linear((self.adjacency @ x.T).T)
            return result

    torch.manual_seed(0)
    module, batch = Net(), torch.randn(12, 4, dtype=torch.double)
    with DataParallel(module, hosts(devices), balance="even") as trainer:
        for factor in (1.0, 2.0):
            module.adjacency = module.adjacency * factor
            mine = module.adjacency
            _, wanted = plain(module, mean_of_squares, batch)
            module.zero_grad()
            for _ in range(2):
                module.zero_grad()
                trainer.step(mean_of_squares, batch)
                assert_same_gradients(module, wanted)
            assert module.adjacency is mine
            with pytest.raises(ZeroDivisionError):
                trainer.step(lambda m, b: b / (1 // 0), batch)
            assert module.adjacency is mine


def test_a_forward_that_writes_to_a_sparse_buffer_in_place_is_told_so() -> None:
    class Net(nn.Module):
        adjacency: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2).double()
            self.register_buffer("adjacency", torch.eye(3, dtype=torch.double).to_sparse())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.adjacency.mul_(0.9)
            result: torch.Tensor = self.linear((self.adjacency @ x.T).T)
            return result

    with (
        DataParallel(Net(), TWO, balance="even") as trainer,
        pytest.raises(InvalidArgument, match="writes to the sparse buffer 'adjacency' in place"),
    ):
        trainer.step(mean_of_squares, torch.randn(8, 3, dtype=torch.double))
