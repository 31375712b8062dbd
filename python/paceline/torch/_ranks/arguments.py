"""Checks the arguments of `BalancedRanks`, and makes of them what it works with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from paceline import InvalidArgument
from paceline.torch._batch.by_cost import ByCost, Cost
from paceline.torch._batch.global_sampler import GlobalBatchSampler
from paceline.torch._ranks.meeting import Meeting
from paceline.torch._trainer.arguments import Balance, check_count, is_whole, policy_of


def policy_options(balance: Balance, ranks: int) -> dict[str, Any]:
    """What a balancer needs to know of `balance`."""
    policy, ratios = policy_of(balance, "BalancedRanks", "rank", None if isinstance(balance, str) else ranks)
    if ratios and not min(ratios) > 0:
        raise InvalidArgument(
            f"BalancedRanks: balance is {balance!r}. Every rank needs a number above 0: the others wait for its backward."
        )
    return {"policy": policy, "weights": ratios or None}


def sampler_of(
    meeting: Meeting,
    items: int | Sequence[float] | torch.Tensor,
    batch_size: int,
    cost: Cost,
    padded: bool,
    seed: int,
    shuffle: bool,
    drop_last: bool,
) -> GlobalBatchSampler:
    """Make the sampler of this rank."""
    by_cost = None
    if isinstance(items, (Sequence, torch.Tensor)):
        by_cost = ByCost(items, cost, padded)
        items = len(by_cost.costs)
    elif cost is not None or padded:
        raise InvalidArgument(
            "BalancedRanks: cost= and padded= need the lengths of all items. Give these in place of the number of items."
        )
    check_count("BalancedRanks", "items", items)
    check_count("BalancedRanks", "batch_size", batch_size)
    if not is_whole(seed):
        raise InvalidArgument(f"BalancedRanks: seed is {seed!r}; it must be an integer.")
    return GlobalBatchSampler(
        items,
        batch_size,
        seed=int(seed),
        shuffle=shuffle,
        drop_last=drop_last,
        rank=meeting.rank,
        ranks=meeting.size,
        every_rank=True,
        by_cost=by_cost,
        call="BalancedRanks",
    )
