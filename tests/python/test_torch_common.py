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
from torch_support import module_of

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
    trainer = made(module, prove=False)
    trainer.step(squares, rows())
    assert all(replica.array is not module.array for replica in replicas_of(trainer)), "without proofs they are copied"


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


def write(m: Any, x: torch.Tensor) -> Any:
    """Writes its rows to memory that it holds."""
    array = isinstance(m.memory, np.ndarray)
    m.memory[: len(x)] = x.numpy() if array else x
    return m.layer(torch.as_tensor(m.memory[: len(x)].copy() if array else m.memory[: len(x)].clone()))


def scratch(*, array: bool) -> Any:
    module = module_of(write, layer=nn.Linear(4, 3))
    module.memory = np.zeros((500, 4)) if array else torch.zeros(500, 4, dtype=torch.float64)
    return module


@pytest.mark.filterwarnings("ignore:step. split over")  # that the memory has another device's rows
@pytest.mark.parametrize("array", [False, True])
def test_a_replica_has_its_own_copy_of_what_a_forward_writes(array: bool) -> None:
    module = scratch(array=array)
    other = copy.deepcopy(module)
    trainer = made(module)
    for step in range(3):
        batch = rows(16 + step)
        module.zero_grad()
        other.zero_grad()
        trainer.step(squares, batch)
        squares(other, batch).backward()
        assert same(module, other)
    assert len({id(replica.memory) for replica in (*replicas_of(trainer), module)}) == 3
    if not array:  # a cache that only `predict` writes, too
        module = scratch(array=False)
        trainer = made(module)
        for count in (16, 24):
            batch = rows(count)
            with torch.no_grad():
                assert torch.allclose(trainer.predict(batch), module.layer(batch))


def test_an_array_that_counts_is_named() -> None:
    def count(m: Any, x: torch.Tensor) -> Any:
        out = m.layer(x)
        np.add.at(m.seen, out.argmax(1).numpy(), 1)
        return out

    counts = module_of(count, layer=nn.Linear(4, 3), seen=np.zeros(3))
    assert "attribute 'seen' has values that sum to 16 on one device" in said_by(counts, squares, rows())


def mask(m: Any, x: torch.Tensor) -> Any:
    """By a buffer, as language models do. May write to it, without moving its version counter."""
    if m.writes:
        m.mask.data[:16] *= 1 + len(x)
    return m.layer(x) * m.mask[0]


def masked(*, writes: bool) -> Any:
    return module_of(mask, layer=nn.Linear(4, 3), writes=writes, mask=torch.ones(1 << 17))


def test_a_large_buffer_that_no_forward_writes_is_there_once() -> None:
    module: Any = masked(writes=False)
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
    module: Any = masked(writes=True)
    trainer = made(module)
    trainer.step(squares, rows())
    trainer.step(squares, rows())
    masks = [replica.mask for replica in replicas_of(trainer)]
    assert len({mask.data_ptr() for mask in (*masks, module.mask)}) == 3
    # The first step ran whole, and ten items of the second one on the device with most.
    assert module.mask[0] == 17 * 11


def average_late(m: Any, x: torch.Tensor) -> Any:
    """Begins to write some steps after the proof, as an average does after its warm-up."""
    if m.on:
        m.average.mul_(0.5).add_(1)
    if m.fails:
        raise ValueError("no")
    return m.layer(x)


def late() -> Any:
    return module_of(average_late, layer=nn.Linear(4, 3), on=False, fails=False, average=torch.zeros(1 << 17))


def test_a_buffer_that_forwards_begin_to_write_later_is_that_of_one_device() -> None:
    module, found = late(), []
    trainer = made(module)
    for step in range(5):
        module.on = step > 1
        trainer.step(squares, rows())
        found.append(float(module.get_buffer("average")[0]))
    assert found == [0, 0, 1, 1.5, 1.75]
    module = late()
    trainer = made(module)
    trainer.step(squares, rows())
    module.on = module.fails = True
    with pytest.raises(ValueError, match="no"):
        trainer.step(squares, rows())
    assert not module.get_buffer("average").any(), "a failed step leaves it"


def test_a_buffer_that_is_seen_in_another_way_is_followed() -> None:
    module: Any = masked(writes=False)
    trainer, batch = made(module), rows()
    module.mask = torch.arange(400.0 * 400, dtype=torch.float64).view(400, 400)
    for strides in ((400, 1), (1, 400)):
        trainer.predict(lambda one, x: x * one.mask[0, 1], batch)
        assert [replica.mask.stride() for replica in replicas_of(trainer)] == [strides] * 2
        module.mask = module.mask.t()


def test_a_dictionary_with_parameters_as_keys_belongs_to_each_replica() -> None:
    def forward(m: Any, x: torch.Tensor) -> Any:
        assert m.names[m.layers[7].weight] == "layers.7.weight"
        return m.layers[7](x)

    module = module_of(forward, layers=nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in range(300)))
    module.names = {one: name for name, one in module.named_parameters()}
    made(module).step(squares, rows())


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
    neighbours = torch.eye(4, dtype=torch.float64)[:3].to_sparse()
    module = module_of(lambda m, x: m.layer((m.neighbours @ x.T).T), layer=nn.Linear(3, 2), neighbours=neighbours)
    made(module, prove="raise").step(squares, rows())
