"""Buffers: from the user's module to the replicas before a step, from the busiest device back or joined by rules after it, untouched by a failure."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from paceline import InvalidArgument
from paceline.torch import DataParallel
from proof_cases import made, rows, said_by, squares
from torch_support import DEVICES, TWO, assert_same_gradients, hosts, module_of, noting, plain


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


def assert_values(module: nn.Module, wanted: list[torch.Tensor]) -> None:
    torch.testing.assert_close(values(module), wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("shares", "most", "cost"),
    [([4, 9, 3], slice(4, 13), None), ([16], slice(16), None), ([16], slice(16), torch.ones(16))],
)
def test_statistics_come_from_the_device_that_ran_most_items(shares: list[int], most: slice, cost: Any) -> None:
    module = batch_norm()
    batch = torch.randn(16, 4, dtype=torch.double)
    wanted = after_plain_steps(module, batch[most])
    with DataParallel(module, hosts(len(shares)), balance=shares) as trainer:
        trainer.step(mean_of_squares, batch, cost=cost)
        assert list(trainer.shares.values()) == shares
    assert_values(module, wanted)


@DEVICES
def test_statistics_go_on_from_step_to_step_on_every_device(devices: int) -> None:
    """All devices see the same items here, so whichever ran most, the statistics are those of plain PyTorch."""
    module = batch_norm()
    part = torch.randn(4, 4, dtype=torch.double)
    wanted = after_plain_steps(module, part, steps=6)
    with DataParallel(module, hosts(devices), balance="even") as trainer:
        for _ in range(6):
            trainer.step(mean_of_squares, part.repeat(devices, 1))
    assert_values(module, wanted)
    assert module[1].num_batches_tracked.item() == 6  # type: ignore[index]


def test_predicting_uses_the_present_statistics() -> None:
    module = batch_norm()
    batch = torch.randn(8, 4, dtype=torch.double)
    with DataParallel(module, TWO, balance="even") as trainer:
        trainer.step(mean_of_squares, batch)
        module.eval()
        torch.testing.assert_close(trainer.predict(batch), module(batch).detach())
        module[1].running_mean.add_(1.0)  # type: ignore[index]
        torch.testing.assert_close(trainer.predict(batch), module(batch).detach())


def average(m: Any, x: torch.Tensor) -> Any:
    """A running average that is assigned anew instead of written in place, and one that appears in the first forward."""
    m.average = 0.5 * m.average + x.mean()
    if m.first is None:
        m.first = torch.ones(3)
    return m.linear(x)


def averaging() -> Any:
    module = module_of(average, linear=nn.Linear(4, 4), average=torch.zeros(()))
    module.register_buffer("first", None)
    return module


@DEVICES
@pytest.mark.parametrize("runs", [1, 2, 3])
def test_buffers_that_are_assigned_anew_or_were_none_come_back(devices: int, runs: int) -> None:
    """Several times in a step, too: Python gives the memory of a dropped tensor to the next one, with the same id."""
    module = averaging()
    part = torch.ones(2, 4, dtype=torch.double)
    expected = 0.0
    with DataParallel(module, hosts(devices), balance="even", micro_batch=2) as trainer:
        for _ in range(8):
            module.first = None
            trainer.step(mean_of_squares, part.repeat(devices * runs, 1))
            for _ in range(runs):
                expected = 0.5 * expected + 1.0
            assert module.average.item() == pytest.approx(expected)
            assert module.first.tolist() == [1, 1, 1]


@DEVICES
def test_what_the_user_assigns_to_a_buffer_reaches_every_device(devices: int) -> None:
    module = averaging()
    seen: list[float] = []
    loss_fn = noting(lambda replica, __: seen.append(replica.average.item()), mean_of_squares)
    with DataParallel(module, hosts(devices), balance="even") as trainer:
        for value in range(6):
            module.average = torch.tensor(float(value), dtype=torch.double)
            trainer.step(loss_fn, torch.zeros(6, 4, dtype=torch.double))
            assert seen[-devices:] == [value] * devices


def count_masked(m: Any, x: torch.Tensor) -> Any:
    m.steps += 1
    return m.linear(x * m.mask[0])


@DEVICES
def test_expanded_buffers_work_also_when_a_step_fails(devices: int) -> None:
    """A constant mask whose rows are one and the same memory, as `expand` makes it."""
    module = module_of(count_masked, linear=nn.Linear(4, 4), steps=torch.zeros((), dtype=torch.long))
    module.register_buffer("mask", torch.tensor([1.0, 0, 1, 1]).double().expand(3, 4))
    batch = torch.ones(6, 4, dtype=torch.double)
    with DataParallel(module, hosts(devices), balance="even") as trainer:
        trainer.step(mean_of_squares, batch)
        with pytest.raises(ZeroDivisionError):
            trainer.step(lambda m, b: m(b).sum() / (1 // 0), batch)
        trainer.step(mean_of_squares, batch)
    assert module.steps.item() == 2


def collect(m: Any, x: torch.Tensor) -> Any:
    """Writes its buffer through ``.data``, which no version counter sees, and keeps a large one that never changes."""
    m.codes.data.add_(x.sum(0))
    return m.linear(x) + m.table[:4]


@DEVICES
def test_what_is_written_behind_the_version_counter_comes_back(devices: int) -> None:
    values = torch.arange(1 << 16).double()
    module = module_of(collect, linear=nn.Linear(4, 4), codes=torch.zeros(4), table=values.clone())
    table, codes = module.table, module.codes
    with DataParallel(module, hosts(devices), balance="even") as trainer:
        for step in range(1, 5):
            trainer.step(mean_of_squares, torch.ones(2 * devices, 4, dtype=torch.double))
            assert module.codes.tolist() == [2.0 * step] * 4
    assert (module.table is table, module.codes is codes) == (True, True), "buffers stay the user's tensors"
    assert torch.equal(module.table, values)


@DEVICES
@pytest.mark.parametrize("make", [batch_norm, averaging], ids=["in place", "assigned"])
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
            assert_values(module, wanted)


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


def multiply(m: Any, x: torch.Tensor) -> Any:
    """By a sparse buffer, which a forward may write to."""
    if m.writes:
        m.adjacency.mul_(0.9)
    return m.linear((m.adjacency @ x.T).T)


def neighbours(writes: bool = False, layout: Any = torch.sparse_coo) -> Any:
    torch.manual_seed(0)
    adjacency = torch.eye(4, dtype=torch.double)[:3].to_sparse(layout=layout)
    return module_of(multiply, linear=nn.Linear(3, 2), writes=writes, adjacency=adjacency)


@DEVICES
def test_a_sparse_buffer_is_shared_until_it_is_replaced(devices: int) -> None:
    module, batch = neighbours(), torch.randn(12, 4, dtype=torch.double)
    with DataParallel(module, hosts(devices), balance="even") as trainer:
        for factor in (1.0, 2.0):
            module.adjacency = module.adjacency * factor
            mine = module.adjacency
            _, wanted = plain(module, mean_of_squares, batch)
            for _ in range(2):
                module.zero_grad()
                trainer.step(mean_of_squares, batch)
                assert_same_gradients(module, wanted)
            with pytest.raises(ZeroDivisionError):
                trainer.step(lambda m, b: b / (1 // 0), batch)
            assert module.adjacency is mine


def test_one_device_leaves_a_buffer_that_is_no_plain_memory_where_it_is() -> None:
    module, batch = neighbours(layout=torch.sparse_csr), torch.randn(12, 4, dtype=torch.double)
    mine = module.adjacency
    with DataParallel(module, ["host:0"]) as trainer:
        for _ in range(2):
            trainer.step(mean_of_squares, batch)
        with pytest.raises(ZeroDivisionError):
            trainer.step(lambda m, b: b / (1 // 0), batch)
    assert module.adjacency is mine


def test_a_forward_that_writes_to_a_sparse_buffer_in_place_is_told_so() -> None:
    told = pytest.raises(InvalidArgument, match="writes to the sparse buffer 'adjacency' in place")
    with DataParallel(neighbours(writes=True), TWO, balance="even") as trainer, told:
        trainer.step(mean_of_squares, torch.randn(8, 4, dtype=torch.double))


RULES: dict[str, Any] = {"seen": "sum", "inner.center": "mean", "last": "home"}


def center(m: Any, x: torch.Tensor) -> torch.Tensor:
    m.center.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return x


def count(m: Any, x: torch.Tensor) -> Any:
    m.seen += len(x)
    m.other += len(x)
    m.last = x.detach()[0, 0].clone()
    return m.layer(m.inner(x))


def counts() -> Any:
    inner, zero = module_of(center, center=torch.zeros(4)), torch.tensor(0)
    layer = nn.Linear(4, 3)
    return module_of(count, layer=layer, inner=inner, seen=zero, last=torch.tensor(0.0), other=zero.clone())


def test_changes_are_added_averaged_by_items_and_taken_from_the_first_device() -> None:
    module, batches = counts(), [rows(16) for _ in range(3)]
    other = copy.deepcopy(module)
    trainer = made(module, buffers=RULES, prove=False)
    for batch in batches:
        trainer.step(squares, batch)
        squares(other, batch)
    assert module.seen == other.seen == 48
    assert all(map(torch.allclose, module.inner.buffers(), other.inner.buffers()))
    assert module.last == other.last == batches[-1][0, 0]
    assert module.other == 30  # of the device that ran ten of sixteen items
    module = counts()
    made(module, buffers=RULES, balance=[0, 1], prove=False).step(squares, batch := rows(5))
    assert module.seen == 5, "a device without items changes nothing"
    assert module.last == batch[0, 0]


def test_a_proof_agrees_with_what_is_joined_and_names_the_rule_that_gives_the_values_of_one_device() -> None:
    text = said_by(counts(), squares, rows(), buffers=RULES)
    assert "buffer 'other'" in text
    assert "'seen' has" not in text
    assert "center" not in text
    assert "buffers={'other': 'sum'}) gives these" in text  # which was tried
    rules = "buffers={'seen': 'sum', 'other': 'sum', 'inner.center': 'mean'}) gives these the values of one device"
    assert rules in said_by(counts(), squares, rows())


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"seen": "add"}, "must be 'sum', 'mean' or 'home'"),
        ({"unseen": "sum"}, "no such buffer. It has 'seen'"),
        ({"seen": "mean"}, "holds torch.int64. Use 'sum'"),
    ],
)
def test_rules_that_cannot_be_used_are_refused(rules: Any, message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        made(counts(), buffers=rules)
