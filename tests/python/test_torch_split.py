"""Batches that are cut in ways of their own: ``split=``, packed sequences, nested tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, pad_packed_sequence

from paceline import InvalidArgument
from paceline.torch import DataParallel
from torch_support import TWO, assert_same_gradients, hosts, plain

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
