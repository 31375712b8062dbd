"""What tests of proofs have in common."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from paceline.torch import DataParallel, ProofWarning

HOSTS = ["host:0", "host:1"]


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def made(module: nn.Module, **options: Any) -> DataParallel:
    return DataParallel(module, HOSTS, **({"balance": [3, 5], "prove": "warn"} | options))


def squares(module: Any, rows: Any) -> Any:
    return module(rows).square().mean()


def said(call: Callable[[], object]) -> str:
    """What proofs warn of in a call."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return "\n".join(str(one.message) for one in caught if one.category is ProofWarning)


def said_by(module: nn.Module, loss_fn: Any, batch: Any, steps: int = 1, **options: Any) -> str:
    """What proofs warn of in these steps."""
    with made(module, **options) as trainer:
        return said(lambda: [trainer.step(loss_fn, batch) for _ in range(steps)])


def gradients(module: Any) -> list[Any]:
    return [one.grad for one in ([module] if isinstance(module, torch.Tensor) else module.parameters())]


def same(ours: Any, theirs: Any, *, exact: bool = False) -> bool:
    compare: Any = torch.equal if exact else torch.allclose
    return all(map(compare, gradients(ours), gradients(theirs)))


class Seen:
    """A list that no run puts back."""

    __slots__ = ("items",)

    def __init__(self) -> None:
        self.items: list[Any] = []


def rows(count: int = 16) -> torch.Tensor:
    return torch.randn(count, 4, dtype=torch.float64)
