"""Checks the arguments that `BalancedRanks` has for itself."""

from __future__ import annotations

from typing import Any

from paceline import InvalidArgument
from paceline.torch._trainer.arguments import Balance, policy_of


def policy_options(balance: Balance, ranks: int) -> dict[str, Any]:
    """What a balancer needs to know of `balance`."""
    policy, ratios = policy_of(balance, "BalancedRanks", "rank", None if isinstance(balance, str) else ranks)
    if ratios and not min(ratios) > 0:
        raise InvalidArgument(
            f"BalancedRanks: balance is {balance!r}. Every rank needs a number above 0: the others wait for its backward."
        )
    return {"policy": policy, "weights": ratios or None}
