"""Batches: what is split, what goes along, and what is refused with advice."""

from __future__ import annotations

from collections import ChainMap, OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
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
    noting,
    plain,
)


class Named(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


OldNamed = namedtuple("OldNamed", ["x", "y"])


class Encoding(UserDict[str, Any]):
    """As the tokenizers of transformers return."""


@dataclass
class Plain:
    x: torch.Tensor
    y: torch.Tensor
    note: str = "whole"
    count: int = field(default=0, init=False)


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    y: torch.Tensor


@dataclass(frozen=True, slots=True)
class FrozenSlots:
    x: torch.Tensor
    y: torch.Tensor


NESTS: dict[str, tuple[Callable[[Any, Any], Any], Callable[[Any], Any]]] = {
    "tuple": (lambda x, y: (x, y), lambda b: (b[0], b[1])),
    "list": (lambda x, y: [x, y], lambda b: (b[0], b[1])),
    "dict": (lambda x, y: {"x": x, "y": y}, lambda b: (b["x"], b["y"])),
    "OrderedDict": (lambda x, y: OrderedDict(x=x, y=y), lambda b: (b["x"], b["y"])),
    "UserDict": (lambda x, y: Encoding(x=x, y=y), lambda b: (b["x"], b["y"])),
    "NamedTuple": (Named, lambda b: (b.x, b.y)),
    "namedtuple": (OldNamed, lambda b: (b.x, b.y)),
    "dataclass": (Plain, lambda b: (b.x, b.y)),
    "frozen dataclass": (Frozen, lambda b: (b.x, b.y)),
    "frozen dataclass with slots": (FrozenSlots, lambda b: (b.x, b.y)),
    "deep": (lambda x, y: {"in": [(x,), None], "out": Plain(x, y)}, lambda b: (b["in"][0][0], b["out"].y)),
}


@pytest.mark.parametrize("nest", NESTS)
def test_any_nest_is_split_into_nests_of_the_same_kind(nest: str) -> None:
    make, take = NESTS[nest]
    module, (x, y) = classifier(11)
    batch = make(x, y)
    kinds = []

    def loss_fn(replica: nn.Module, part: Any) -> Any:
        kinds.append(type(part))
        return classify(replica, take(part))

    assert_exact(module, loss_fn, batch, balance=[2, 1], micro_batch=3)
    assert set(kinds) == {type(batch)}
    assert len(kinds) >= 4
    assert take(batch)[0] is x, "the caller's batch was changed"
    assert len(take(batch)[1]) == 11


def test_other_leaves_go_along_unchanged_and_slices_are_views() -> None:
    module, (x, y) = classifier(8)
    leaves = {"scalar": torch.tensor(2.0), "text": "words", "number": 3, "none": None, "set": {1}, "empty": []}
    seen = []
    with DataParallel(module, TWO, balance="even") as trainer:
        trainer.step(noting(lambda m, b: seen.append(b)), (x, y, leaves))
    assert {part[0].data_ptr() for part in seen} == {x.data_ptr(), x[4:].data_ptr()}
    assert len(seen) == 2
    assert all(part[2][name] is value for part in seen for name, value in leaves.items())


@pytest.mark.parametrize("balance", ["auto", "even", [2, 1, 1, 1]], ids=str)
def test_the_size_may_change_from_step_to_step_and_be_below_the_number_of_devices(balance: Any) -> None:
    module, _ = classifier()
    with DataParallel(module, hosts(4), balance=balance) as trainer:
        for items in (1, 2, 3, 64, 64, 64, 17, 64, 1, 200, 3):
            _, batch = classifier(items, seed=items)
            _, wanted = plain(module, classify, batch)
            module.zero_grad()
            trainer.step(classify, batch)
            assert_same_gradients(module, wanted)
            assert sum(trainer.shares.values()) == items


class Graph:
    """Its tensors are where nobody sees them."""

    __slots__ = ("_x",)

    def __init__(self, x: torch.Tensor) -> None:
        self._x = x

    def to(self, place: torch.device) -> Graph:
        return Graph(self._x.to(place))


class Boxes:
    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Settings:
    """Belongs to the whole batch, like other objects without tensors."""

    factor = 2
    scale = torch.tensor(3.0)


class Fixed(Mapping[str, Any]):
    """A mapping that cannot be changed."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)

    def __getitem__(self, key: str) -> Any:
        return self._values[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)


class Sized(Fixed):
    """A mapping that is not made from another one alone."""

    def __init__(self, values: Mapping[str, Any], size: int) -> None:
        super().__init__(values)
        self.size = size


class Scaled(Fixed):
    """A mapping whose constructor changes values."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        super().__init__({name: value * 1 for name, value in values.items()})


class Padded(Fixed):
    """A mapping with an attribute of its own."""

    def __init__(self, values: Mapping[str, Any], pad: int = 0) -> None:
        super().__init__(values)
        self.pad = pad


X = torch.zeros(8, 6, dtype=torch.float64)
REFUSED: dict[str, tuple[Any, str]] = {
    "empty": (torch.zeros(0, 6), "batch has no items.*Skip empty batches"),
    "other length": ({"x": X, "deep": [X, (X[:5],)]}, r"batch\['deep'\]\[1\]\[0\] has 5 items.*batch\['x'\] has 8"),
    "other length in a field": (Plain(X, X[:3]), r"batch\.y has 3 items.*batch\.x has 8"),
    "other length in a named tuple": (Named(X, X[:3]), r"batch\.y has 3 items"),
    "no tensor": ({"x": 1, "y": "text"}, "no items to split"),
    "only a 0-dim tensor": (torch.tensor(1.0), "no items to split"),
    "None": (None, "no items to split"),
    "list of strings": ((X, ["a"] * 8), r"batch\[1\] is a list of str of 8.*indices that loss_fn looks up"),
    "tuple of strings": ((X, ("a",) * 8), r"batch\[1\] is a tuple of str of 8.*split=.*collate=.*batch_dim= has None"),
    "tuple of mappings": ((X, ({"name": "a"},) * 8), r"batch\[1\] is a tuple of dict of 8"),
    "an object that moves": (
        (X, Graph(X)),
        r"batch\[1\] is an object \(Graph\), which seems to hold items.*split=.*collate=",
    ),
    "an object with tensors": (
        {"x": X, "boxes": Boxes(X)},
        r"batch\['boxes'\] is an object \(Boxes\).*batch_dim= has None",
    ),
    "graphs": ([Graph(X)] * 8, "no items to split.*collate="),
    "images and targets": (
        (
            tuple(torch.zeros(3, 8 + one, 9) for one in range(6)),
            tuple({"boxes": torch.zeros(1 + one, 4)} for one in range(6)),
        ),
        r"batch\[1\]\[0\]\['boxes'\] has 1 item.*collate=",
    ),
    "list of numbers": ({"x": X, "y": list(range(8))}, r"batch\['y'\] is a list of int of 8.*torch\.as_tensor"),
    "array": ((X, np.zeros(8)), r"batch\[1\] is an array \(ndarray\) of 8.*torch\.as_tensor"),
    "array alone": (np.zeros((8, 6)), "no items to split"),
    "gradient": ((X, X.clone().requires_grad_()), r"batch\[1\] requires grad.*batch\[1\]\.detach\(\)"),
    "flattened": (
        (torch.zeros(7, 8), torch.zeros(56)),
        r"batch\[1\] has 56 items.*If batch\[1\] is flattened, pass it in the shape \[7, 8\] of batch\[0\]",
    ),
    "nested": (
        {"x": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)], layout=torch.jagged).unsqueeze(1)},
        r"batch\['x'\] is a nested tensor with .* its ragged dimension elsewhere than after the items.*transpose it in loss_fn",
    ),
    "sparse": (
        (X.to_sparse(), X),
        r"batch\[0\] is sparse \(torch\.sparse_coo\).*batch\[0\]\.to_dense\(\).*sparse\.index_select",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("call", ["step", "predict"])
def test_batches_that_cannot_be_split_are_refused_with_the_leaf_and_advice(case: str, call: str) -> None:
    batch, message = REFUSED[case]
    module, good = classifier(8)
    with DataParallel(module, TWO) as trainer:
        with pytest.raises(InvalidArgument, match=message):
            trainer.step(classify, batch) if call == "step" else trainer.predict(batch)
        assert gradients(module) == [None] * 4
        trainer.step(classify, good)  # and the trainer goes on


@pytest.mark.parametrize(
    ("kind", "arrives"),
    [
        (Fixed, Fixed),
        (ChainMap, ChainMap),
        (MappingProxyType, MappingProxyType),
        (lambda values: Sized(values, len(values["x"])), dict),
        (Scaled, dict),
        (lambda values: Padded(values, 7), dict),
    ],
)
def test_mappings_of_other_types_arrive_as_themselves_or_as_dicts(kind: Any, arrives: Any) -> None:
    module, (x, y) = classifier(11)
    kinds = []

    def loss_fn(replica: nn.Module, part: Any) -> Any:
        kinds.append((type(part), part["epoch"]))
        return classify(replica, (part["x"], part["y"]))

    batch = kind({"x": x, "y": y, "epoch": 7})
    x = batch["x"]
    assert_exact(module, loss_fn, batch, alone=lambda m, b: classify(m, (b["x"], b["y"])), balance=[2, 1])
    assert kinds == [(arrives, 7)] * 2
    assert batch["x"] is x


WHOLE: dict[str, tuple[int, tuple[Any, ...], Any]] = {
    "numbers": (2, (1, 2.5), 0),
    "sizes": (2, ((8, 8), (4, 4)), 0),
    "NumPy's numbers": (2, (np.int64(4), np.float32(4)), 0),
    "tensors of no dimension": (2, (torch.tensor(0.1), torch.tensor(0.2)), 0),
    "nothing": (2, (None, None), 0),
    "entries of one item, which is not split": (1, (("name",), ["name"], Graph(torch.ones(1, 6))), 0),
    "lists and arrays of another length": (8, (["a", "b"], np.ones(3)), 0),
    "what batch_dim says so of": (8, (("a",) * 8, Graph(torch.ones(8, 6)), (4, 4), Settings()), (None, None, 0, 0)),
}


@pytest.mark.parametrize("case", WHOLE)
def test_what_belongs_to_the_whole_batch_goes_along(case: str) -> None:
    items, leaves, batch_dim = WHOLE[case]
    module, (x, y) = classifier(items)
    seen: list[Any] = []
    with DataParallel(module, TWO, balance="even") as trainer:
        batch_dim = (0, 0, *batch_dim) if batch_dim else 0
        trainer.step(noting(lambda m, b: seen.append(b[2:])), (x, y, *leaves), batch_dim=batch_dim)
    assert len(seen) == min(items, 2)
    assert all(one is leaf for part in seen for one, leaf in zip(part, leaves, strict=True))


def test_a_failure_says_that_a_list_of_tensors_was_cut_in_each_of_them() -> None:
    module, _ = classifier(8)
    with DataParallel(module, TWO, balance="even") as trainer, pytest.raises(ZeroDivisionError) as caught:
        trainer.step(lambda m, b: b[0] / (1 // 0), [torch.zeros(3, 8 + one) for one in range(6)])
    assert "whose 6 tensors were cut along dimension 0" in "".join(caught.value.__notes__)
    assert "collate=" in "".join(caught.value.__notes__)
