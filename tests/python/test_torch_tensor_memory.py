"""Buffers of the host are copied by one call of the binding, without an operator for each."""

from __future__ import annotations

import threading
from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from paceline._core.engine import TensorMemory
from paceline.torch import DataParallel
from paceline.torch._replicas.buffers import alias_of_data
from test_torch_buffers import batch_norm, mean_of_squares
from torch_support import TWO, hosts


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


@pytest.mark.parametrize("devices", [1, 2])
def test_many_buffers_are_kept_and_copied_without_an_operator_for_each(devices: int) -> None:
    module = nn.Sequential(*(nn.BatchNorm1d(4) for _ in range(53)), nn.Linear(4, 4))
    module.register_buffer("scale", torch.ones(()))
    batch = torch.randn(8, 4)
    with DataParallel(module, hosts(devices), prove=False) as trainer:
        trainer.step(mean_of_squares, batch)
        trainer.step(mean_of_squares, batch)
        with Calls() as calls:
            trainer.step(mean_of_squares, batch)
        assert sum(calls.counts.values()) <= 12, calls.counts


def test_copies_in_plain_memory_leave_everything_else_to_pytorch() -> None:
    def tensors(value: float) -> dict[str, Any]:
        kinds = {
            "matrix": torch.full((2, 3), value),
            "number": torch.tensor(value),
            "bool": torch.tensor([bool(value)]),
            "empty": torch.empty(0),
            "none": None,
            "turned": torch.full((2, 3), value).t(),
            "complex": torch.full((2,), value, dtype=torch.complex64),
            "conjugated": torch.full((), value * 1j).conj(),
            "sparse": torch.full((2,), value).to_sparse(),
            "large": torch.full((1 << 18, 2), value),
            "meta": torch.empty(2, device="meta"),
            "parameter": nn.Parameter(torch.full((2,), value)),
            "shared": alias_of_data(torch.full((2,), value)),
        }
        return {**kinds, "shape": torch.full((int(value) + 1,), value), "type": torch.tensor([value, 1][: int(value)])}

    ours, theirs = tensors(1.0), tensors(0.0)
    theirs["type"], theirs["absent"], ours["only"] = torch.tensor([0]), None, torch.ones(2)
    written, left = TensorMemory(torch.Tensor).copy([(ours, theirs, name) for name in ours])
    copied = ["matrix", "number", "bool", "empty"]
    assert all(any(one is theirs[name] for one in written) for name in copied)
    assert [name for *_, name in left] == [name for name in ours if name not in (*copied, "none")]
    assert all(torch.equal(theirs[name], ours[name]) for name in copied)
    assert torch.equal(theirs["turned"], torch.zeros(3, 2))
    assert torch.equal(theirs["large"], torch.zeros(1 << 18, 2))


def test_a_graph_that_has_saved_a_buffer_notices_that_a_step_writes_to_it() -> None:
    module: Any = batch_norm()
    module.register_buffer("scale", torch.ones((), dtype=torch.double))
    module.register_forward_hook(lambda one, given, output: one.scale.mul_(2.0) and None)
    leaf = torch.ones((), dtype=torch.double, requires_grad=True)
    with DataParallel(module, TWO, prove=False) as trainer:
        saved = leaf * module.scale
        trainer.step(mean_of_squares, torch.randn(8, 4, dtype=torch.double))
        assert module.scale.item() == 2.0
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            saved.backward()
