"""``batch_dim=``: tensors that have the item in another dimension than the first."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

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
