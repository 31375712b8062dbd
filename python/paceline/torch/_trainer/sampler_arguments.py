"""Checks the arguments of what deals out global batches, and makes the sampler of a rank."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import torch

from paceline import InvalidArgument
from paceline._words import require
from paceline.torch._batch.by_cost import ByCost, Cost
from paceline.torch._batch.global_sampler import GlobalBatchSampler
from paceline.torch._trainer.arguments import check_count, is_whole

Items = int | Sequence[float] | torch.Tensor  # how many a data set has, or the length of each of them
Ledger = bool | str | os.PathLike[str]


def sampler_of(
    call: str,
    items: Items,
    batch_size: int,
    *,
    cost: Cost,
    padded: bool,
    seed: int,
    **options: Any,
) -> GlobalBatchSampler:
    """Make the sampler of a rank. `options` are further ones of `GlobalBatchSampler`."""
    count: Any = items
    by_cost = None
    if is_whole(items):  # NumPy's, too
        count = int(count)
    elif isinstance(items, (Sequence, torch.Tensor)) or hasattr(items, "__array__"):
        by_cost = ByCost(count, cost, padded)
        count = len(by_cost.costs)
        if count and not 0.0 < (whole := sum(by_cost.costs)) < math.inf:
            raise InvalidArgument(
                f"{call}: the costs of all items sum to {whole}, so nothing can be measured by them. If all items cost the same, give their number in place "
                "of their lengths."
            )
    if by_cost is None and (cost is not None or padded):
        raise InvalidArgument(
            f"{call}: cost= and padded= need the lengths of all items. Give these in place of the number of items."
        )
    check_count(call, "items", count)
    check_count(call, "batch_size", batch_size)
    require(is_whole(seed), call, "seed", seed, "it must be an integer")
    return GlobalBatchSampler(count, batch_size, seed=int(seed), by_cost=by_cost, call=call, **options)


def ledger_of(call: str, ledger: object) -> bool | str:
    """Whether to keep a ledger, or the file for it."""
    if isinstance(ledger, bool):
        return ledger
    path: Any = os.fspath(ledger) if isinstance(ledger, (str, os.PathLike)) else None
    wanted = "it must be the path of a file, True to keep it in memory, or False"
    require(path and isinstance(path, str), call, "ledger", ledger, wanted)
    return str(path)
