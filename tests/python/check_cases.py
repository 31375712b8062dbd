"""Shared by the tests of `check`: a network, its batch, a call of `check`, and the kinds of causes in a report."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from paceline.torch import CheckReport, DataParallel
from torch_support import classify, hosts

F = nn.functional


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
    trainer: dict[str, Any] | None = None,
    **options: Any,
) -> CheckReport:
    """The report on `module` in the type of `batch`. `trainer`: options of the trainer; the others are of `check`."""
    batch = inputs() if batch is None else batch
    numbers = [one.dtype for one in tree_leaves(batch) if torch.is_tensor(one) and one.is_floating_point()]
    with DataParallel(module.to((*numbers, torch.float64)[0]), hosts(devices), **(trainer or {})) as found:
        return found.check(loss_fn, batch, **options)


def loss_of_words_each(module: Any, batch: dict[str, torch.Tensor]) -> Any:
    return F.cross_entropy(module(batch), batch["label"], reduction="none")


def kinds(report: CheckReport) -> list[str]:
    return [cause.kind for cause in report.causes]
