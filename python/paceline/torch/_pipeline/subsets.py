"""What pipelines would do with some of their devices."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from paceline import InvalidArgument
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


def added_to(names: Sequence[str], add: Iterable[tuple[str, float]]) -> list[tuple[str, float]]:
    """What `what_if` is given in `add`.

    Raises
    ------
    InvalidArgument
        For what are no pairs of a name and a speed.
    """
    try:
        pairs = [(like, float(speed)) for like, speed in add]
    except (TypeError, ValueError):
        raise InvalidArgument(
            f"what_if: add is {add!r}; give a list of pairs, each the name of a present device and how many times as fast the new one is, such as "
            f"[({names[-1]!r}, 1.0)]."
        ) from None
    for like, speed in pairs:
        if not 0 < speed < math.inf:
            raise InvalidArgument(f"what_if: the speed of another {like} is {speed}; it is a factor above zero.")
    return pairs


def pipelines_of(
    planner: Any, names: Sequence[str], micro_batches: int | None, add: Mapping[str, tuple[str, float]]
) -> list[_Pipeline]:
    """The pipelines of a planner, which are several for replicas. `names`: of all their devices, in order. `add`: more of them, by name: which one they are like, and how many times as fast."""
    left, found = iter(names), []
    for one in getattr(planner, "planners", [planner]):
        devices = one.stage_devices()
        own = dict(zip(itertools.islice(left, len(devices)), devices, strict=True))
        places = list(own)
        for number, (name, (like, speed)) in enumerate(add.items()):
            if like in places:
                own[name] = one.another(places.index(like), speed, number)
        found.append(_Pipeline(one, own, micro_batches, getattr(planner, "least_items", 1)))
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
