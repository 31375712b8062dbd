"""Shared by the tests of `check`: a network, its batch, a call of `check`, and the kinds of causes in a report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import pytest
import torch
from torch import nn

from paceline.torch import DataParallel
from torch_support import classify, hosts

F = nn.functional
DEVICES = pytest.mark.parametrize("devices", [1, 2, 3])


def inputs(items: int = 24, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(items, 6, generator=generator, dtype=dtype), torch.randint(0, 3, (items,), generator=generator)


def network(*between: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 8), *between, nn.Tanh(), nn.Linear(8, 3)).to(dtype)


def checked(
    module: nn.Module,
    loss_fn: Callable[[Any, Any], Any] = classify,
    batch: Any = None,
    *,
    devices: int = 2,
    reduction: Literal["mean", "sum"] = "mean",
    micro_batch: int | None = None,
    **options: Any,
) -> Any:
    with DataParallel(module, hosts(devices), reduction=reduction, micro_batch=micro_batch) as trainer:
        return trainer.check(loss_fn, inputs() if batch is None else batch, **options)


def loss_of_words_each(module: Any, batch: dict[str, torch.Tensor]) -> Any:
    return F.cross_entropy(module(batch), batch["label"], reduction="none")


def kinds(report: Any) -> list[str]:
    return [cause.kind for cause in report.causes]
