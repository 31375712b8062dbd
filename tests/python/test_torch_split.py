"""Batches that are cut otherwise than along the first dimension: ``batch_dim=``, ``split=``, packed sequences, nested tensors."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from paceline import InvalidArgument
from paceline.torch import DataParallel
from torch_support import (
    TWO,
    assert_exact,
    assert_same_gradients,
    classifier,
    classify,
    gradients,
    hosts,
    module_of,
    plain,
    worst_difference,
)

ITEMS = 7


def sequences(*, batch_first: bool = False) -> tuple[Any, torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """A module, inputs [time, items, 3] or [items, time, 3], and hidden states [layers, items, 4]."""
    torch.manual_seed(0)
    lstm, shape = nn.LSTM(3, 4, num_layers=2, batch_first=batch_first), (ITEMS, 5, 3) if batch_first else (5, ITEMS, 3)
    module = module_of(lambda m, x, state=None: m.head(m.lstm(x, state)[0]), lstm=lstm, head=nn.Linear(4, 2))
    return module, torch.randn(shape).double(), (torch.randn(2, ITEMS, 4).double(), torch.randn(2, ITEMS, 4).double())


def with_states(module: Any, batch: Any) -> Any:
    return module(batch[0], batch[1]).square().mean()


@pytest.mark.parametrize("count", [1, 2, 3])
@pytest.mark.parametrize("call", ["step", "loss", "batch"])
def test_one_number_is_for_all_tensors(count: int, call: str) -> None:
    module, x, states = sequences()
    batch = (x, states)
    wanted, expected = plain(module, with_states, batch)
    with DataParallel(module, hosts(count), balance="even") as trainer:
        if call == "batch":
            with trainer.batch(batch, batch_dim=1) as global_batch:
                loss = global_batch.run(lambda m, part: part.backward(with_states(m, part.data)))
        else:
            loss = getattr(trainer, call)(with_states, batch, batch_dim=1)
        if call == "loss":
            loss.backward()
        assert list(trainer.shares.values()) == [len(part) for part in torch.arange(ITEMS).tensor_split(count)]
    assert loss.item() == pytest.approx(wanted.item(), rel=1e-12)
    assert_same_gradients(module, expected)


class Named(NamedTuple):
    x: torch.Tensor
    states: Any


@dataclass
class Fields:
    x: torch.Tensor
    states: Any


NESTS: dict[str, tuple[Any, Any, Any]] = {
    "tuple": (lambda x, s: (x, s), (0, 1), lambda b: (b[0], b[1])),
    "tuple, in full": (lambda x, s: (x, s), [0, (1, -2)], lambda b: (b[0], b[1])),
    "tuple, by place": (lambda x, s: (x, s), {1: 1}, lambda b: (b[0], b[1])),
    "mapping": (lambda x, s: {"x": x, "states": s}, {"states": 1}, lambda b: (b["x"], b["states"])),
    "named tuple": (Named, {"states": 1}, lambda b: (b.x, b.states)),
    "named tuple, by order": (Named, (0, 1), lambda b: (b.x, b.states)),
    "dataclass": (Fields, {"states": (1, 1)}, lambda b: (b.x, b.states)),
}


@pytest.mark.parametrize("nest", NESTS)
def test_a_nest_says_it_for_each_tensor(nest: str) -> None:
    make, batch_dim, take = NESTS[nest]
    module, x, states = sequences(batch_first=True)
    batch = make(x, states)
    kinds = set()

    def loss_fn(replica: Any, part: Any) -> Any:
        kinds.add(type(part))
        x, (hidden, cell) = take(part)
        assert x.shape[0] == hidden.shape[1] == cell.shape[1]
        assert hidden.is_contiguous()
        return with_states(replica, (x, (hidden, cell)))

    assert_exact(module, loss_fn, batch, given={"batch_dim": batch_dim}, balance="even")
    assert kinds == {type(batch)}
    assert take(batch)[1][0] is states[0]


def test_none_is_for_a_tensor_of_the_whole_batch() -> None:
    module, (x, y) = classifier(8)
    table = torch.rand(3, dtype=torch.float64)
    seen = []

    def loss_fn(replica: Any, part: Any) -> Any:
        seen.append(part[2])
        return (nn.functional.cross_entropy(replica(part[0]), part[1], reduction="none") * part[2][part[1]]).mean()

    assert_exact(module, loss_fn, (x, y, table), given={"batch_dim": (0, 0, None)}, balance="even")
    assert len(seen) == 3
    assert all(part is table for part in seen)


def test_predictions_costs_weights_and_extras_go_along() -> None:
    module, x, states = sequences()
    weight = torch.arange(ITEMS) + 1.0

    def per_item(replica: Any, part: Any) -> Any:
        part[0].mul_(2)  # a slice is its own
        output = replica(*part)
        return output.square().mean((0, 2)), output[-1]

    reference, before = copy.deepcopy(module), x.clone()
    losses, last = per_item(reference, (x.clone(), states))
    ((losses * weight).sum() / weight.sum()).backward()
    with DataParallel(module, TWO) as trainer:
        trainer.step(per_item, (x, states), weight=weight, cost=torch.arange(ITEMS).flip(0) + 1.0, batch_dim=1)
        assert worst_difference([trainer.extras], [last]) < 1e-12
        outputs = trainer.predict(lambda m, b: m(*b).transpose(0, 1), (x, states), batch_dim=1)
    assert_same_gradients(module, gradients(reference))
    assert worst_difference([outputs], [module(x, states).transpose(0, 1).detach()]) < 1e-12
    assert torch.equal(x, before)


def test_check_takes_it_and_names_it_where_it_is_missing() -> None:
    module, x, _ = sequences()
    square = torch.randn(ITEMS, ITEMS, 3).double()
    with DataParallel(module, TWO) as trainer:
        report = trainer.check(lambda m, b: m(b).square().mean(), square)
        (cause,) = report.causes
        assert "batch_dim=1" in cause.text
        assert trainer.check(lambda m, b: m(b).square().mean(), square, batch_dim=1).exact
        assert trainer.check(lambda m, b: m(b).square().mean(), x, batch_dim=1).exact
        weighted = trainer.check(weighted_mean, {"x": x, "mask": MASK}, batch_dim=1)
        (cause,) = weighted.causes
        assert "weight=lambda batch: batch['mask'].movedim(1, 0).sum(1)" in cause.text
        assert trainer.check(
            weighted_mean, {"x": x, "mask": MASK}, batch_dim=1, weight=lambda batch: batch["mask"].movedim(1, 0).sum(1)
        ).exact


MASK = (torch.arange(5)[:, None] <= torch.arange(ITEMS) % 5).double()  # [time, items]


def weighted_mean(module: Any, batch: Any) -> Any:
    return (module(batch["x"]).square().mean(2) * batch["mask"]).sum() / batch["mask"].sum()


X = torch.zeros(5, 8, 6, dtype=torch.float64)
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "beyond the dimensions": (X, 3, r"batch_dim: 3 for batch, a tensor of shape \(5, 8, 6\)"),
    "negative beyond": ((X,), -4, r"batch_dim: -4 for batch\[0\]"),
    "a word": (X, "first", "batch_dim: 'first' for batch"),
    "a truth": (X, True, "batch_dim: True for batch"),
    "a nest for a tensor": (X, {"x": 1}, r"batch_dim: \{'x': 1\} for batch, a tensor"),
    "an unknown key": ({"x": X}, {"y": 1}, "batch_dim: it names 'y', which batch does not have. It has 'x'"),
    "too few entries": ((X, X), (1,), r"batch_dim: \(1,\) for batch, which has 0, 1"),
    "entries by order for a mapping": ({"x": X}, [1], r"batch_dim: \[1\] for batch, which has 'x'"),
    "other lengths": ((X, X), (0, 1), r"batch\[1\] has 8 items along dimension 1, but batch\[0\] has 5"),
    "nothing to split": (X, None, "no items to split|no tensor with dimensions"),
    "no items": (torch.zeros(3, 0), 1, r"batch has no items \(its dimension 1 is 0\)"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_the_batch_is_refused_with_the_leaf(case: str) -> None:
    batch, batch_dim, message = REFUSED[case]
    module, good = classifier(8)
    with DataParallel(module, TWO) as trainer:
        with pytest.raises(InvalidArgument, match=message):
            trainer.step(classify, batch, batch_dim=batch_dim)
        with pytest.raises(InvalidArgument, match="batch_dim= together with collate="):
            trainer.step(classify, [1, 2], collate=len, batch_dim=1)
        trainer.step(classify, good)


def test_batch_sizes_are_searched_and_devices_compared_along_that_dimension() -> None:
    module, x, states = sequences()

    def make_batch(items: int) -> Any:
        return x[:, :items], tuple(state[:, :items] for state in states)

    with DataParallel(module, TWO, verify_every=1) as trainer:
        found = trainer.find_batch_size(with_states, make_batch, batch_dim=1, smallest=3, largest=6, seconds=0.001)
        assert list(found.seconds) == [3, 6]
        trainer.step(with_states, (x, states), batch_dim=1)
        assert trainer.verify_replicas(with_states, (x, states), batch_dim=1).agree
    _, expected = plain(module, with_states, (x, states))
    assert_same_gradients(module, expected)


F = nn.functional
LENGTHS = [3, 5, 1, 4, 4, 2, 6, 1, 3]


@dataclass
class Lengths:
    """A dataclass whose tensors do not all have the item in their first dimension."""

    flat: torch.Tensor
    starts: list[int]

    def __len__(self) -> int:
        return len(self.starts) - 1


class Ragged:
    """Sequences one after the other. It has no length of its own."""

    def __init__(self, flat: torch.Tensor, starts: list[int]) -> None:
        self.flat, self.starts = flat, starts


class Cut:
    """Cuts `Ragged`."""

    def length(self, batch: Ragged) -> int:
        return len(batch.starts) - 1

    def slice(self, batch: Ragged, begin: int, end: int) -> Ragged:
        first, last = batch.starts[begin], batch.starts[end]
        return Ragged(batch.flat[first:last], [start - first for start in batch.starts[begin : end + 1]])


def cut(batch: Lengths, begin: int, end: int) -> Lengths:
    part = Cut().slice(batch, begin, end)  # type: ignore[arg-type]
    return Lengths(part.flat, part.starts)


def ragged() -> tuple[nn.Module, torch.Tensor, list[int]]:
    torch.manual_seed(0)
    flat = torch.randn(sum(LENGTHS), 6).double()
    starts = [0, *torch.tensor(LENGTHS).cumsum(0).tolist()]
    return nn.Linear(6, 3).double(), flat, starts


def means(module: Any, batch: Any) -> torch.Tensor:
    """For each item the square of the mean over its sequence."""
    rows = module(batch.flat).tanh()
    spans = zip(batch.starts[:-1], batch.starts[1:], strict=True)
    return torch.stack([rows[begin:end].mean(0).square().sum() for begin, end in spans])


@pytest.mark.parametrize("kind", ["function", "object", "by type"])
def test_a_split_of_ones_own_cuts_the_batch(kind: str) -> None:
    module, flat, starts = ragged()
    whole: Any = Lengths(flat, starts) if kind == "function" else Ragged(flat, starts)
    labels = torch.linspace(0, 1, len(LENGTHS)).double()

    def fn(m: Any, b: Any) -> Any:
        return means(m, b[0]) * b[1] if kind == "by type" else means(m, b)

    batch = (whole, labels) if kind == "by type" else whole
    split: Any = {"function": cut, "object": Cut(), "by type": {Ragged: Cut()}}[kind]
    _, wanted = plain(module, lambda m, b: fn(m, b).mean(), batch)
    with DataParallel(module, hosts(3), balance=[5, 3, 1]) as trainer:
        trainer.step(fn, batch, split=split)
        assert_same_gradients(module, wanted)
        assert list(trainer.shares.values()) == [5, 3, 1]
        module.zero_grad()
        trainer.loss(fn, batch, split=split).backward()
        assert_same_gradients(module, wanted)
        module.zero_grad()
        with trainer.batch(batch, split=split) as global_batch:
            global_batch.run(lambda m, micro: micro.backward(fn(m, micro.data)))
        assert_same_gradients(module, wanted)
        assert torch.equal(trainer.predict(fn, batch, split=split), fn(module, batch).detach())
        assert trainer.check(fn, batch, split=split).exact
        assert trainer.verify_replicas(fn, batch, split=split).agree


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.lstm = nn.LSTM(3, 4, num_layers=2).double()
        self.head = nn.Linear(4, 2).double()

    def forward(self, packed: PackedSequence, states: Any) -> Any:
        output, _ = self.lstm(packed, states)
        return PackedSequence(self.head(output.data), *output[1:])


@pytest.mark.parametrize("is_sorted", [True, False])
@pytest.mark.parametrize("costs", [True, False])
def test_packed_sequences_are_cut_with_their_states(costs: bool, is_sorted: bool) -> None:
    module = Recurrent()
    lengths = sorted(LENGTHS, reverse=True) if is_sorted else LENGTHS
    sequences = [torch.randn(length, 3).double() for length in lengths]
    targets = [torch.randn(length, 2).double() for length in lengths]
    states = (torch.randn(2, 9, 4).double(), torch.randn(2, 9, 4).double())  # [layers, items, 4]
    packed, target = (pack_sequence(one, enforce_sorted=is_sorted) for one in (sequences, targets))

    def fn(m: Any, b: Any) -> Any:
        return (m(b[0], b[1]).data - b[2].data).square().mean()  # over all steps

    batch = (packed, states, target)
    counts = torch.tensor(lengths)
    options: Any = {"weight": counts, "batch_dim": (0, 1, 0)}
    loss, wanted = plain(module, fn, batch)
    with DataParallel(module, TWO, balance=[7, 2]) as trainer:
        found = trainer.step(fn, batch, **options, cost=counts if costs else None)
        assert found.item() == pytest.approx(loss.item(), rel=1e-12)
        assert_same_gradients(module, wanted)

        def outputs(m: Any, b: Any) -> Any:
            padded, _ = pad_packed_sequence(m(b[0], b[1]), batch_first=True, total_length=6)
            return padded

        got = trainer.predict(outputs, batch, batch_dim=(0, 1, 0))
        torch.testing.assert_close(got, outputs(module, batch).detach(), rtol=0, atol=1e-13)


@pytest.mark.parametrize("layout", [torch.jagged, torch.strided])
@pytest.mark.parametrize("costs", [True, False])
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_cut(costs: bool, layout: torch.layout) -> None:
    module, flat, _ = ragged()
    jagged = layout == torch.jagged
    x: Any = torch.nested.as_nested_tensor(list(flat.split(LENGTHS)), layout=layout)
    offsets = x.offsets() if jagged else None
    target: Any = torch.nested.nested_tensor_from_jagged(flat[:, :3].clone(), offsets) if jagged else flat.new_zeros(9)

    def fn(m: Any, b: Any) -> Any:
        out = m(b[0])
        # Two jagged tensors can be subtracted only if they share their offsets.
        out = (out - b[1]).values() if jagged else torch.cat(out.unbind())
        return out.square().mean()

    _, wanted = plain(module, fn, (x, target))
    counts = torch.tensor(LENGTHS)
    with DataParallel(module, TWO, micro_batch=2) as trainer:
        trainer.step(fn, (x, target), weight=counts, cost=counts if costs else None)
        assert_same_gradients(module, wanted)


def test_module_takes_jagged_tensors() -> None:
    class Means(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = ragged()[0]

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return torch.stack([one.tanh().mean(0) for one in self.inner(x).unbind()]) * y

    _, flat, _ = ragged()
    module, y = Means(), torch.randn(9, 1).double()
    x = torch.nested.as_nested_tensor(list(flat.split(LENGTHS)), layout=torch.jagged)
    _, wanted = plain(module, lambda m, b: m(*b).std(0).sum(), (x, y))  # couples the items
    inputs = y.clone().requires_grad_()
    with DataParallel(module, TWO) as replaced:
        replaced(x, inputs).std(0).sum().backward()
    assert_same_gradients(module, wanted)
    own = y.clone().requires_grad_()
    module(x, own).std(0).sum().backward()
    torch.testing.assert_close(inputs.grad, own.grad)


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        (Ragged(torch.ones(3, 6), [0, 3]), {"split": cut}, r"batch is a Ragged, whose number of items.*has no len"),
        (Ragged(torch.ones(3, 6), [0, 3]), {}, r"no tensor with dimensions in it \(a Ragged\).*split= how to cut"),
        (Lengths(torch.ones(3, 6), [0, 1, 3]), {"split": 3}, r"split: 3 for .*Give a function split"),
        ((Lengths(torch.ones(3, 6), [0, 1, 3]), torch.ones(3)), {"split": {Lengths: cut}}, r"batch\[1\] has 3 items"),
        (Lengths(torch.ones(3, 6), [0, 1, 3]), {"split": cut, "cost": torch.ones(2)}, r"cost= together with split="),
        (Lengths(torch.ones(3, 6), [0, 1, 3]), {"split": cut, "collate": list}, r"split= together with collate="),
        (pack_sequence([torch.ones(3, 6)]), {"batch_dim": 1}, r"batch_dim: 1 for batch, a PackedSequence"),
        (pack_sequence([torch.ones(3, 6).requires_grad_()]), {}, r"batch requires grad"),
    ],
)
def test_what_cannot_be_cut_is_named(batch: Any, options: Any, message: str) -> None:
    module, *_ = ragged()
    with DataParallel(module, TWO) as trainer, pytest.raises(InvalidArgument, match=message):
        trainer.step(means, batch, **options)
