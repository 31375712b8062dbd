"""Data that a module holds in plain attributes: replicas use the user's, see its changes, and get a copy of what a forward writes."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from paceline.torch import DataParallel
from proof_cases import made, rows, said_by, same, squares

np = pytest.importorskip("numpy")
LARGE = 2000  # numbers, more than are compared one by one


class Holder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()
        self.small, self.large = torch.ones(1), torch.ones(LARGE, dtype=torch.float64)
        self.array, self.words = np.ones(LARGE), dict.fromkeys(range(300), 1.0)
        self.nested = {"tables": [torch.ones(2), torch.ones(LARGE)], "arrays": (np.ones(LARGE),)}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = self.small * self.large[0] * float(self.array[0]) * self.words[0]
        tables: Any = self.nested["tables"]
        out: torch.Tensor = self.layer(x) * factor * tables[0][0] * tables[1][0] * float(self.nested["arrays"][0][0])
        return out


def replicas_of(trainer: DataParallel) -> list[Any]:
    return [replica.module for replica in trainer._execution.replicas.list]


def test_replicas_have_no_copies_of_data() -> None:
    module = Holder()
    trainer = made(module)
    trainer.step(squares, rows())
    for replica in replicas_of(trainer):
        assert replica is not module
        assert replica.array is module.array
        assert replica.words is module.words
        assert replica.nested["arrays"][0] is module.nested["arrays"][0]
        assert replica.large.data_ptr() == module.large.data_ptr()
        assert replica.nested["tables"][1].data_ptr() == module.nested["tables"][1].data_ptr()


def test_without_proofs_each_replica_has_a_copy() -> None:
    module = Holder()
    trainer = made(module, prove=False)
    trainer.step(squares, rows())
    assert all(replica.array is not module.array for replica in replicas_of(trainer))


CHANGES: dict[str, Callable[[Any], object]] = {
    "small tensor by .data": lambda module: module.small.data.fill_(2),
    "small tensor, other memory": lambda module: setattr(module.small, "data", torch.full((1,), 2.0)),
    "small tensor by NumPy": lambda module: module.small.numpy().fill(2),
    "large tensor by .data": lambda module: module.large.data.fill_(2),
    "large tensor, other memory": lambda module: setattr(module.large, "data", module.large * 0 + 2),
    "large tensor anew": lambda module: setattr(module, "large", module.large * 0 + 2),
    "array": lambda module: module.array.fill(2),
    "array anew": lambda module: setattr(module, "array", module.array * 0 + 2),
    "words": lambda module: module.words.update({0: 2.0}),
    "tensor in a list": lambda module: module.nested["tables"][0].fill_(2),
    "large tensor in a list": lambda module: module.nested["tables"][1].data.fill_(2),
    "array in a tuple": lambda module: module.nested["arrays"][0].fill(2),
}


@pytest.mark.parametrize("name", CHANGES)
def test_changes_between_steps_are_seen(name: str) -> None:
    module, batch = Holder(), rows()
    trainer = made(module)
    before = [trainer.step(squares, batch).item() for _ in range(2)][-1]
    for factor in (4, 4):  # the loss is a mean of squares
        CHANGES[name](module)
        assert trainer.step(squares, batch).item() == pytest.approx(factor * before)


class Scratch(nn.Module):
    """Writes its rows to memory that it holds."""

    def __init__(self, *, array: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3).double()
        self.memory: Any = np.zeros((500, 4)) if array else torch.zeros(500, 4, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.memory[: len(x)] = x.numpy() if isinstance(self.memory, np.ndarray) else x
        held = torch.as_tensor(self.memory[: len(x)].copy() if isinstance(self.memory, np.ndarray) else self.memory)
        out: torch.Tensor = self.layer(held[: len(x)].clone())
        return out


@pytest.mark.filterwarnings("ignore:step. split over")  # that the memory has another device's rows
@pytest.mark.parametrize("array", [False, True])
def test_a_replica_has_its_own_copy_of_what_a_forward_writes(array: bool) -> None:
    module = Scratch(array=array)
    other = copy.deepcopy(module)
    trainer = made(module)
    for step in range(3):
        batch = rows(16 + step)
        module.zero_grad()
        other.zero_grad()
        trainer.step(squares, batch)
        squares(other, batch).backward()
        assert same(module, other)
    ours = {id(replica.memory) for replica in replicas_of(trainer)}
    assert len(ours) == 2
    assert id(module.memory) not in ours


def test_a_cache_that_only_predict_writes_is_copied_when_it_is_written() -> None:
    module = Scratch(array=False)
    trainer = made(module)
    for count in (16, 24):
        batch = rows(count)
        with torch.no_grad():
            assert torch.allclose(trainer.predict(batch), module.layer(batch))


def test_an_array_that_counts_is_named() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.seen = nn.Linear(4, 3).double(), np.zeros(3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.layer(x)
            np.add.at(self.seen, out.argmax(1).numpy(), 1)
            return out

    assert "attribute 'seen' has values that sum to 16 on one device" in said_by(Counts(), squares, rows())


class Masked(nn.Module):
    """Has a mask in a buffer, as language models do. It may write to it, without moving its version counter."""

    def __init__(self, *, writes: bool) -> None:
        super().__init__()
        self.layer, self.writes = nn.Linear(4, 3).double(), writes
        self.register_buffer("mask", torch.ones(1 << 17, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mask: Any = self.mask
        if self.writes:
            mask.data[:16] *= 1 + len(x)
        out: torch.Tensor = self.layer(x) * mask[0]
        return out


def test_a_large_buffer_that_no_forward_writes_is_there_once() -> None:
    module: Any = Masked(writes=False)
    trainer, batch = made(module), rows()
    before = [trainer.step(squares, batch).item() for _ in range(2)][-1]
    assert [replica.mask.data_ptr() for replica in replicas_of(trainer)] == [module.mask.data_ptr()] * 2
    module.mask.fill_(2)
    assert trainer.step(squares, batch).item() == pytest.approx(4 * before)
    old, module.mask = module.mask, torch.full_like(module.mask, 3)
    assert trainer.step(squares, batch).item() == pytest.approx(9 * before)
    assert (old == 2).all()
    assert [replica.mask.data_ptr() for replica in replicas_of(trainer)] == [module.mask.data_ptr()] * 2
    module.eval()
    assert torch.allclose(trainer.predict(batch), module(batch))


@pytest.mark.filterwarnings("ignore:step. split over")
def test_a_large_buffer_that_a_forward_writes_is_copied() -> None:
    module: Any = Masked(writes=True)
    trainer = made(module)
    trainer.step(squares, rows())
    trainer.step(squares, rows())
    masks = [replica.mask for replica in replicas_of(trainer)]
    assert len({mask.data_ptr() for mask in (*masks, module.mask)}) == 3
    assert (
        module.mask[0] == 17 * 11
    )  # the first step ran whole, and ten items of the second one on the device with most


class Late(nn.Module):
    """Begins to write some steps after the proof, as an average does after its warm-up."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.on, self.fails = nn.Linear(4, 3).double(), False, False
        self.register_buffer("average", torch.zeros(1 << 17, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        average: Any = self.average
        if self.on:
            average.mul_(0.5).add_(1)
        if self.fails:
            raise ValueError("no")
        out: torch.Tensor = self.layer(x)
        return out


def test_a_buffer_that_forwards_begin_to_write_later_is_that_of_one_device() -> None:
    module, found = Late(), []
    trainer = made(module)
    for step in range(5):
        module.on = step > 1
        trainer.step(squares, rows())
        found.append(float(module.get_buffer("average")[0]))
    assert found == [0, 0, 1, 1.5, 1.75]


def test_a_failed_step_leaves_a_buffer_that_it_has_begun_to_write() -> None:
    module = Late()
    trainer = made(module)
    trainer.step(squares, rows())
    module.on = module.fails = True
    with pytest.raises(ValueError, match="no"):
        trainer.step(squares, rows())
    assert not module.get_buffer("average").any()


def by_mask(module: Any, x: Any) -> Any:
    return x * module.mask[0, 1]


def test_a_buffer_that_is_seen_in_another_way_is_followed() -> None:
    module: Any = Masked(writes=False)
    trainer, batch = made(module), rows()
    module.mask = torch.arange(400.0 * 400, dtype=torch.float64).view(400, 400)
    trainer.predict(by_mask, batch)
    assert [replica.mask.stride() for replica in replicas_of(trainer)] == [(400, 1)] * 2
    module.mask = module.mask.t()
    trainer.predict(by_mask, batch)
    assert [replica.mask.stride() for replica in replicas_of(trainer)] == [(1, 400)] * 2


def test_a_dictionary_with_parameters_as_keys_belongs_to_each_replica() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers: Any = nn.ModuleList(nn.Linear(4, 4, bias=False).double() for _ in range(300))
            self.names = {one: name for name, one in self.named_parameters()}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.names[self.layers[7].weight] == "layers.7.weight"
            out: torch.Tensor = self.layers[7](x)
            return out

    made(Named()).step(squares, rows())


def test_data_that_the_user_replaces_is_let_go() -> None:
    module: Any = Holder()
    trainer = made(module)
    trainer.step(squares, rows())
    gone = weakref.ref(module.large)
    module.large = torch.ones(1, dtype=torch.float64)
    for _ in range(2):
        trainer.step(squares, rows())
    gc.collect()
    assert gone() is None


def test_a_sparse_buffer_is_proved() -> None:
    class Graph(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2).double()
            self.register_buffer("neighbours", torch.eye(4, dtype=torch.float64)[:3].to_sparse())

        def forward(self, x: Any) -> Any:
            return self.layer((self.neighbours @ x.T).T)

    with DataParallel(Graph(), ["host:0", "host:1"], prove="raise") as trainer:
        trainer.step(lambda m, x: m(x).square().mean(), torch.randn(16, 4, dtype=torch.float64))
