"""Shared by the tests of ``batch_norm="synchronised"``: modules with batch normalisation, and a comparison of their buffers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torch_support import assert_same_gradients, gradients

Synchronised: Any = {"batch_norm": "synchronised"}
ITEMS = 13


class Images(nn.Module):
    """Convolutions with two norms in a row, and a branch with a norm of its own."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 4, 3)
        self.norms = nn.Sequential(nn.BatchNorm2d(4, **options), nn.ReLU(), nn.BatchNorm2d(4, **options))
        self.branch = nn.Sequential(nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4, **options))
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> Any:
        x = self.norms(self.first(x))
        return self.head((x + self.branch(x)).tanh().mean((2, 3)))


def rows(**options: Any) -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 8),
        nn.BatchNorm1d(8, **options),
        nn.Tanh(),
        nn.Linear(8, 8),
        nn.BatchNorm1d(8, **options),
        nn.Linear(8, 3),
    )


def case(kind: str, items: int = ITEMS, **options: Any) -> tuple[nn.Module, Any]:
    """A module and its batch, far from mean 0 and variance 1."""
    torch.manual_seed(0)
    module = (Images(**options) if kind == "images" else rows(**options)).double()
    x = torch.randn(items, 2, 6, 5).double() if kind == "images" else torch.randn(items, 6).double()
    return module, (30 + 3 * x, torch.randint(0, 3, (items,)))


def assert_same(module: nn.Module, reference: nn.Module) -> None:
    """Gradients and buffers."""
    assert_same_gradients(module, gradients(reference))
    assert same_buffers(module, reference)


def same_buffers(module: nn.Module, reference: nn.Module) -> bool:
    pairs = zip(module.buffers(), reference.buffers(), strict=True)
    return all(torch.allclose(ours, theirs, rtol=1e-12, atol=1e-13) for ours, theirs in pairs)
