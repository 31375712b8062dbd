"""Which part of each global batch each rank gets, by how long ranks take."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Protocol

from paceline.balance import Balancer
from paceline.torch._batch.by_cost import ByCost
from paceline.torch._batch.global_sampler import GlobalBatchSampler, Stamp


class Measured(Protocol):
    """What a rank says of its part of a global batch."""

    @property
    def items(self) -> float:
        """How many it has."""

    @property
    def loss_type(self) -> float:
        """Negative if none of them ran."""

    @property
    def seconds(self) -> float:
        """What its own work took, without waiting for others."""

    @property
    def between(self) -> float:
        """The seconds of its own work between the step before and this one; negative if unknown."""


class RankShares:
    """Deals global batches out to the ranks of a group.

    Rank 0 decides, with the balancer that splits batches over devices: here a rank is a device. Floating-point code may decide differently on
    two types of processors, so no other rank computes a plan. They get its integers.

    The balancer plans, is told what came of it, and plans again. Between a plan and its first batch lie the batches that loaders have drawn ahead.
    They are left out of the record: they say nothing about this plan, and without them the ledger is that of a loop without delay.

    Parameters
    ----------
    sampler
        This rank's sampler.
    balancer
        On rank 0, None elsewhere.
    """

    def __init__(self, sampler: GlobalBatchSampler, balancer: Balancer | None) -> None:
        self.sampler = sampler
        self.balancer = balancer
        self.plan = 0  # the number of the newest plan that this rank knows of
        self.followed = 0  # the number of the newest plan that all ranks know of
        self.shares: tuple[int, ...] = sampler.shares  # of the newest plan
        self._batch: Stamp | None = None  # the one that `_calls` are about
        self._calls: list[Sequence[Measured]] = []
        self._warned = False  # whether it was said that the ledger has failed
        self._warm = False  # whether a batch has run; the first one takes longer than others
        if balancer is not None:
            self._decide(balancer)

    def decide(self) -> None:
        """Before an exchange: on rank 0, plan by what the last global batch took, if all of its calls have been made."""
        if self.balancer is None or self._batch is None or self._batch == self.sampler.current:
            return
        batch, calls, self._batch, self._calls = self._batch, self._calls, None, []
        if batch.plan != self.plan or batch.size != self.sampler.batch_size:
            return
        if any(rank.items != items for call in calls for rank, items in zip(call, batch.shares, strict=True)):
            return  # another batch than the sampler's
        if not any(batch.work):
            return  # items that cost nothing say nothing of speeds
        if not self._warm:
            self._warm = True
            return
        seconds = [sum(call[rank].seconds for call in calls) for rank in range(len(batch.shares))]
        ran = [any(call[rank].loss_type >= 0 for call in calls) for rank in range(len(batch.shares))]
        first = [rank.between for rank in calls[0]]
        starts: list[float | None] = []
        if min(first) >= 0:
            starts = [late - min(first) if items else None for late, items in zip(first, batch.work, strict=True)]
        ends = [(late or 0.0) + own for late, own in zip(starts or [0.0] * len(seconds), seconds, strict=True)]
        self.balancer.record(
            [
                [(items, own, not really)] if items else []
                for items, own, really in zip(batch.work, seconds, ran, strict=True)
            ],
            max(end for end, items in zip(ends, batch.work, strict=True) if items),
            startup_seconds=starts,
        )
        self._decide(self.balancer)

    def measured(self, ranks: Sequence[Measured], batch: Stamp | None = None) -> None:
        """After an exchange in which all ranks had succeeded. `batch`: what they say it of, if not of the sampler's current batch."""
        batch = batch or self.sampler.current
        if self.balancer is None or batch is None:
            return
        if self._batch != batch:
            self._batch, self._calls = batch, []
        self._calls.append(ranks)

    def follow(self, first: int, plan: int, shares: Sequence[int]) -> None:
        """Do what rank 0 has decided, from the batch with the serial `first` on."""
        self.plan, self.followed, self.shares = plan, plan, tuple(shares)
        self.sampler.follow(first, plan, shares)

    def check_ledger(self) -> None:
        """Warn, once, if the ledger could not be written to its end. To be called where an error of this rank reaches the others."""
        if self.balancer is None or self._warned or not self.balancer.ledger_failed:
            return
        self._warned = True
        warnings.warn(
            "a line of the ledger of the ranks could not be written (is the disk full?). What was written can be replayed, and the rest is lost. "
            "Training goes on.",
            RuntimeWarning,
            stacklevel=2,
        )

    def _decide(self, balancer: Balancer) -> None:
        shares = tuple(balancer.next_plan(self.sampler.units).shares)
        if shares != self.shares:
            self.plan, self.shares = self.plan + 1, shares


def explain_shares(balancer: Balancer) -> str:
    """What was measured of ranks, what was decided and why."""
    unit = balancer.report()["unit"]
    by_cost = f"items are dealt out by cost, and an average batch has {ByCost.UNITS} {unit}; "
    return f"ranks: {'' if unit == 'items' else by_cost}{balancer.explain()}"
