"""Shared by the tests with frameworks. It imports none of them, so that other processes start quickly."""

from __future__ import annotations

import os
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

TWO = ["host:0", "host:1"]
# On as many devices a resumed run then draws the same random numbers.
EVEN: dict[str, Any] = {"devices": TWO, "balance": "even"}

differences: dict[str, float] = {}  # to one device, by test; a table of them follows the tests' results


def loss_fn(module: Any, batch: Any) -> Any:
    return nn.functional.cross_entropy(module(batch[0]), batch[1])


def setting(dtype: torch.dtype = torch.float64) -> tuple[Any, list[Any]]:
    """A module, and batches for it."""
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).to(dtype)
    return module, [(torch.randn(20, 6, dtype=dtype), torch.randint(0, 3, (20,))) for _ in range(8)]


def network(seed: int = 0, dropout: float = 0.0) -> Any:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.Dropout(dropout), nn.Linear(16, 3)).double()


def dataset() -> TensorDataset:
    """40 items for `network`."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(40, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (40,), generator=generator))


def adam(module: nn.Module) -> Any:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def difference(ours: nn.Module, theirs: nn.Module) -> float:
    """The largest difference of a parameter or buffer."""
    mine, others = ours.state_dict(), theirs.state_dict()
    return float(max((mine[key] - value).abs().max().item() for key, value in others.items()))


def within(difference: float, tolerance: float) -> bool:
    """Whether a difference to one device is below the tolerance. Notes it for the table."""
    test = os.environ["PYTEST_CURRENT_TEST"].split("::", 1)[1].removesuffix(" (call)")
    differences[test] = max(difference, differences.get(test, 0.0))
    return difference < tolerance
