"""Shared by the tests of sharded optimizers: the classes, a module with batches, and a plain optimizer beside the sharded one."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from gpu_cases import BOXES
from paceline.torch import DataParallel
from torch_support import classify

CLASSES: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "SGD": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}),
    "SGD-plain": (torch.optim.SGD, {"lr": 0.1}),
    "SGD-fused": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "fused": True}),
    "Adam": (torch.optim.Adam, {"lr": 0.01}),
    "Adam-amsgrad": (torch.optim.Adam, {"lr": 0.01, "amsgrad": True, "maximize": True}),
    "AdamW-fused": (torch.optim.AdamW, {"lr": 0.01, "fused": True}),
    "AdamW-foreach": (torch.optim.AdamW, {"lr": 0.01, "foreach": True}),
    "AdamW-tensor": (torch.optim.AdamW, {"lr": torch.tensor(0.01), "foreach": False}),
    "Adagrad": (torch.optim.Adagrad, {"lr": 0.01, "initial_accumulator_value": 0.1}),
    "RMSprop": (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
    "Adadelta": (torch.optim.Adadelta, {"lr": 0.5, "foreach": True}),
    "Adamax": (torch.optim.Adamax, {"lr": 0.01}),
    "NAdam": (torch.optim.NAdam, {"lr": 0.01}),
    "RAdam": (torch.optim.RAdam, {"lr": 0.01}),
    "ASGD": (torch.optim.ASGD, {"lr": 0.01}),
    "Rprop": (torch.optim.Rprop, {"lr": 0.01}),
    "Adafactor": (torch.optim.Adafactor, {"lr": 0.01}),
}


def network() -> Any:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 3))


def batches(count: int) -> list[Any]:
    generator = torch.Generator().manual_seed(5)
    drawn = [
        (
            torch.randn(24, 6, generator=generator, device="cpu"),
            torch.randint(0, 3, (24,), generator=generator, device="cpu"),
        )
        for _ in range(count)
    ]
    home = torch.get_default_device()  # the GPU, in tests on a real one
    return [(x.to(home), y.to(home)) for x, y in drawn]


def held(optimizer: Any) -> list[int]:
    """How many elements of the parameters each device has."""
    counts = {owner.device: 0 for owner in optimizer._shards._owners}
    for owner, piece in optimizer._shards._all():
        counts[owner.device] += piece.end - piece.begin
    return list(counts.values())


def lay_out_anew(module: nn.Module) -> None:
    """As ``module.to(memory_format=...)`` does."""
    for parameter in module.parameters():
        if parameter.dim() == 2:
            contiguous = parameter.is_contiguous()
            parameter.data = parameter.data.t().contiguous().t() if contiguous else parameter.data.contiguous()


class Pair:
    """A module with a trainer and its optimizer, and a plain optimizer that gets the same gradients."""

    def __init__(self, trainer: DataParallel, cls: Any, options: dict[str, Any], parameters: Any = None) -> None:
        self.trainer = trainer
        self.module: Any = trainer.module
        self.optimizer: Any
        self.reference: Any = copy.deepcopy(self.module)
        options = {"shard": True} | options
        self.optimizer = trainer.optimizer(cls, *([parameters(self.module)] if parameters else []), **options)
        del options["shard"]
        self.plain = cls(
            parameters(self.reference) if parameters else self.reference.parameters(), **copy.deepcopy(options)
        )

    def step(self, batch: Any, edit: Callable[[nn.Module], object] = lambda module: None) -> None:
        """One step of both. `edit` is done to both modules between the gradients and the update."""
        self.optimizer.zero_grad()
        self.plain.zero_grad()
        self.trainer.step(classify, batch)
        for ours, theirs in zip(self.module.parameters(), self.reference.parameters(), strict=True):
            theirs.grad = None if ours.grad is None else ours.grad.detach().clone()
        edit(self.module)
        edit(self.reference)
        self.optimizer.step()
        self.plain.step()
        self.expect_same_parameters()

    def expect_same_parameters(self) -> None:
        for ours, theirs in zip(self.module.parameters(), self.reference.parameters(), strict=True):
            assert torch.equal(ours, theirs)

    def expect_same_state(self) -> None:
        expect_same_state(self.optimizer.state_dict(), self.plain.state_dict())


@contextlib.contextmanager
def paired(cls: Any, options: dict[str, Any], parameters: Any = None, *, box: str = "four") -> Iterator[Pair]:
    """A pair on the GPUs of a box."""
    with DataParallel(network(), BOXES[box]) as trainer:
        yield Pair(trainer, cls, options, parameters)


def expect_same_state(found: Any, wanted: Any) -> None:
    assert found["param_groups"] == wanted["param_groups"]
    assert found["state"].keys() == wanted["state"].keys()
    for index, state in wanted["state"].items():
        assert found["state"][index].keys() == state.keys()
        for key, value in state.items():
            assert torch.equal(torch.as_tensor(found["state"][index][key]), torch.as_tensor(value)), (index, key)
