"""What pipelines would do with some of their devices."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from paceline.plan import StageDevice, StagePlan, plan_stages, split_batch
from paceline.torch._pipeline.replicas_plan import line_of


class _Pipeline(NamedTuple):
    planner: Any
    devices: Mapping[str, StageDevice]
    micro_batches: int | None  # None: as many as is best
    least_items: int  # of its share

    def plan(self, items: int) -> StagePlan:
        latency, bandwidth = self.planner.link()
        return plan_stages(
            self.planner.costs,
            list(self.devices.values()),
            batch_size=items,
            micro_batches=self.micro_batches,
            schedule=self.planner.schedule,
            link_latency_seconds=latency,
            link_bytes_per_second=bandwidth,
        )

    def seconds(self, items: int) -> float:
        return self.plan(items).seconds


def pipelines_of(planner: Any, names: Sequence[str], micro_batches: int | None) -> list[_Pipeline]:
    """The pipelines of a planner, which are several for replicas. `names`: of all their devices, in order."""
    left, found = iter(names), []
    for one in getattr(planner, "planners", [planner]):
        devices = one.stage_devices()
        own = itertools.islice(left, len(devices))
        found.append(
            _Pipeline(one, dict(zip(own, devices, strict=True)), micro_batches, getattr(planner, "least_items", 1))
        )
    return found


def planned(pipelines: Sequence[_Pipeline], kept: Collection[str], items: int) -> tuple[dict[str, int], float]:
    """The blocks of each device that has some, if only these devices are there, and the seconds of a step.

    Each device stays in its pipeline. The batch is divided so that all pipelines end as early as possible.

    Raises
    ------
    OutOfMemory
        If the blocks do not fit.
    """
    some = []
    for one in pipelines:
        if left := {name: device for name, device in one.devices.items() if name in kept}:
            some.append(one._replace(devices=left))
    shares = [items]
    if len(some) > 1:
        models = [line_of(one.seconds, max(1, items // 2), items) for one in some]
        least = min(items, some[0].least_items)
        shares = list(split_batch(items, models, minimum=least, may_be_zero=True).shares)
    blocks: dict[str, int] = {}
    seconds = 0.0
    for one, share in zip(some, shares, strict=True):
        if share:
            plan, names = one.plan(share), list(one.devices)
            ends = [*plan.cuts[1:], len(one.planner.costs)]
            blocks |= {names[on]: end - cut for on, cut, end in zip(plan.order, plan.cuts, ends, strict=True)}
            seconds = max(seconds, plan.seconds)
    return blocks, seconds
